"""An EAGLE-3 head as draft: its cache holds pairs (target feature of token i, token i + 1).

Committed pairs carry the target's own features; the states a head feeds back to itself while
it grows a tree are forgotten with the tree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch_cache import BatchCache, packed, padded, visible_rows
from .beam import BeamDraft
from .cache import CHUNK, KVCache
from .devices import sent
from .eagle3 import Eagle3Head
from .graphs import recorder_for
from .lean_head import LeanHead
from .packed import pack_in_place
from .static import SlotCache


class Eagle3Draft(BeamDraft):
    """The head of one target (EAGLE-3, arXiv 2503.01840).

    Attributes:
        chunk: Most tokens of one pass over a long input.
        max_positions: The length it was trained for; a head with a sliding window has no limit,
            since within the window no distance is new to it.
    """

    kind = "eagle3"
    first_token = 1  # a pair needs the token before its own

    def __init__(self, head: Eagle3Head) -> None:
        pack_in_place(head)
        self.head = head
        self._lean = LeanHead.build(head)
        self.feature_layers = head.config.feature_layers
        self.n_layers = head.config.n_layers
        self.max_top_k = head.config.draft_vocab_size
        self.chunk = CHUNK
        self.window = head.config.sliding_window
        self.max_positions = head.config.max_positions if self.window is None else None
        config, size = head.config, head.fc.weight.element_size()
        self.cache_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * size
        self.row_bytes = (3 * config.intermediate_size + 6 * config.hidden_size) * size
        self.record(recorder_for(head.fc.weight.device))

    def variant(
        self, *, feature_layers: Sequence[int] | None = None, rope_theta: float | None = None
    ) -> "Eagle3Draft":
        """Return the draft of the same weights under other conventions; see `Eagle3Head`."""
        return Eagle3Draft(self.head.variant(feature_layers=feature_layers, rope_theta=rope_theta))

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache of the head with room for `capacity` tokens."""
        return KVCache(self.head.config.n_layers, capacity)

    def extend(
        self, tokens: list[int], features: Tensor | None, cache: KVCache, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the head over n known tokens with their target features [n, n_features * Ht].

        Returns:
            Logits [n or 1, draft vocabulary] and the states that predict them, [n or 1, H].
        """
        assert features is not None and len(features) == len(tokens)  # noqa: S101
        n_before = max(0, len(tokens) - self.chunk) if last_only else 0
        for start in range(0, n_before, self.chunk):
            end = min(start + self.chunk, n_before)
            self._append(tokens[start:end], features[start:end], cache)
        hidden = self._append(tokens[n_before:], features[n_before:], cache)
        if last_only:
            hidden = hidden[-1:]
        return self._logits(hidden), hidden

    def _append(self, tokens: list[int], features: Tensor, cache: KVCache) -> Tensor:
        """Run the head over committed tokens [n] in one pass; return its states [n, H]."""
        hidden = self.head.fuse(features)
        positions = torch.arange(cache.length, cache.length + len(tokens), device=hidden.device)
        ids = sent(tokens, hidden.device)
        return self._run(ids, hidden, positions, cache, None)

    def expand(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the head over n tree nodes on the states [n, H] that led to them.

        Returns:
            Logits [n, draft vocabulary] and the nodes' own states [n, H].
        """
        assert hidden is not None  # noqa: S101
        n, n_total = len(tokens), cache.length + len(tokens)
        if mask.shape[1] < n_total:
            mask = torch.cat([mask.new_ones(n, n_total - mask.shape[1]), mask], dim=1)
        if self.window is not None:
            keys = torch.cat([cache.positions[: cache.length].to(positions.device), positions])
            mask = mask & (positions[:, None] - keys[None, :] < self.window)
        hidden = self._run(tokens, hidden, positions, cache, mask)
        return self._logits(hidden), hidden

    def fused(self, features: Sequence[Tensor | None]) -> Tensor | None:
        """Return the fused features [n, H] of committed tokens; see `BeamDraft`."""
        config, like = self.head.config, self.head.fc.weight
        width = config.n_features * config.target_hidden_size
        return self.head.fuse(
            torch.cat([like.new_zeros(1, width) if own is None else own for own in features])
        )

    def pass_rows(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        masks: Sequence[Tensor],
        cache: BatchCache,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the head over n tokens of several texts: logits [n, draft vocabulary] and states."""
        assert hidden is not None  # noqa: S101
        layout = cache.begin([len(mask) for mask in masks], positions)
        visible = visible_rows(cache.lengths, masks, cache.end)
        places = padded(positions, layout)
        if self.window is not None:
            keys = cache.positions[: layout.n_rows, : cache.end]
            visible &= places[:, :, None] - keys[:, None] < self.window
        if self._lean is not None:
            hidden = self._lean(tokens, hidden, positions, cache, visible, layout)
            return self._lean.logits(hidden), hidden
        out: Tensor = self.head(
            padded(tokens, layout), padded(hidden, layout), places, cache, visible[:, None]
        )
        hidden = packed(out, layout)
        return self.head.logits(hidden), hidden

    def at(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: SlotCache,
        visible: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the head over tokens [n] of a fixed cache: logits [n, draft vocabulary], states."""
        assert hidden is not None  # noqa: S101
        states = self.head(tokens[None], hidden[None], positions[None], cache, visible[None, None])
        return self.head.logits(states[0]), states[0]

    def cache_layout(self) -> tuple[int, int, int, Tensor]:
        """Return layers, key heads and head size of its cache, and a tensor like its own."""
        config = self.head.config
        return config.n_layers, config.n_kv_heads, config.head_dim, self.head.fc.weight

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids to target ids, of any shape."""
        return self.head.to_target(draft_ids)

    def _run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor | None,
    ) -> Tensor:
        """Run the head over n tokens, who attend by a mask [n, cached + n] or causally."""
        cache.note_positions(positions)
        if self._lean is not None:
            return self._lean(tokens, hidden, positions, cache, mask)
        wide = None if mask is None else mask[None, None]
        out: Tensor = self.head(tokens[None], hidden[None], positions[None], cache, wide)
        return out[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden) if self._lean is None else self._lean.logits(hidden)
