"""An EAGLE-3 head as draft: its cache holds pairs (target feature of token i, token i + 1).

Committed pairs carry the target's own features; the states a head feeds back to itself while
it grows a tree are forgotten with the tree.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch_cache import BatchCache, packed, padded, visible_rows
from .beam import BeamDraft
from .cache import KVCache
from .eagle3 import Eagle3Head
from .packed import pack_in_place


class Eagle3Draft(BeamDraft):
    """The head of one target (EAGLE-3, arXiv 2503.01840)."""

    kind = "eagle3"
    first_token = 1  # a pair needs the token before its own

    def __init__(self, head: Eagle3Head) -> None:
        pack_in_place(head)
        self.head = head
        self.feature_layers = head.config.feature_layers
        self.n_layers = head.config.n_layers
        self.max_top_k = head.config.draft_vocab_size
        self._window = head.config.sliding_window

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
        hidden = self.head.fuse(features)
        positions = torch.arange(cache.length, cache.length + len(tokens), device=hidden.device)
        ids = torch.tensor(tokens, device=hidden.device)
        hidden = self._run(ids, hidden, positions, cache, None)
        if last_only:
            hidden = hidden[-1:]
        return self.head.logits(hidden), hidden

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
        if self._window is not None:
            keys = torch.cat([cache.positions[: cache.length].to(positions.device), positions])
            mask = mask & (positions[:, None] - keys[None, :] < self._window)
        hidden = self._run(tokens, hidden, positions, cache, mask[None, None])
        return self.head.logits(hidden), hidden

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
        if self._window is not None:
            keys = cache.positions[: layout.n_rows, : cache.end]
            visible &= places[:, :, None] - keys[:, None] < self._window
        out: Tensor = self.head(
            padded(tokens, layout), padded(hidden, layout), places, cache, visible[:, None]
        )
        hidden = packed(out, layout)
        return self.head.logits(hidden), hidden

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
        cache.note_positions(positions)
        out: Tensor = self.head(tokens[None], hidden[None], positions[None], cache, mask)
        return out[0]
