"""A small causal language model as draft."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch_cache import BatchCache
from .beam import BeamDraft
from .cache import KVCache
from .graphs import Recorder
from .static import SlotCache, StaticForward
from .target import Target


class ModelDraft(BeamDraft):
    """A causal language model with the target's vocabulary, drafting chains and trees.

    Args:
        model: The loaded model, in eval mode.
        target_vocab_size: Padding rows beyond it are never proposed.
    """

    kind = "model"

    def __init__(self, model: Any, target_vocab_size: int) -> None:
        self.model = model
        self._decoder = Target(model)
        self.n_layers = self._decoder.n_layers
        # Within a sliding window no distance is new to it, however long the text.
        windowed = self._decoder.is_windowed
        self.max_positions = None if windowed else self._decoder.max_positions
        self.max_top_k = min(self._decoder.vocab_size, target_vocab_size)
        self.cache_bytes = self._decoder.cache_bytes
        self.row_bytes = self._decoder.row_bytes
        self._play_back(self._decoder.static)

    def record(self, recorder: Recorder | None) -> None:
        """Record rounds, where the model's own passes are recorded; see `BeamDraft.record`."""
        self._decoder.record(recorder)
        self._play_back(self._decoder.static)

    def _play_back(self, static: StaticForward | None) -> None:
        super().record(None if static is None else static.record)
        self.window = None if static is None else static.window

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache of the model with room for `capacity` tokens."""
        return self._decoder.new_cache(capacity)

    def extend(
        self, tokens: list[int], features: Tensor | None, cache: KVCache, last_only: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over n known tokens; return logits [n or 1, `max_top_k`] and no states."""
        logits, _ = self._decoder.forward(self._known(tokens), cache, last_only=last_only)
        return logits[:, : self.max_top_k], None

    def expand(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: KVCache,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over n tree nodes; return logits [n, `max_top_k`] and no states."""
        logits, _ = self._decoder.forward(tokens, cache, positions=positions, mask=mask)
        return logits[:, : self.max_top_k], None

    def fused(self, features: Sequence[Tensor | None]) -> Tensor | None:
        """Return None: a model reads tokens alone."""
        return None

    def pass_rows(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        masks: Sequence[Tensor],
        cache: BatchCache,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over n tokens of several texts: logits [n, `max_top_k`] and no states."""
        logits, _ = self._decoder.forward_rows(self._known(tokens), positions, masks, cache)
        return logits[:, : self.max_top_k], None

    def at(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        cache: SlotCache,
        visible: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over tokens [n] of a fixed cache: logits [n, `max_top_k`], no states."""
        assert self._decoder.static is not None  # noqa: S101 - else nothing is recorded
        ids, lean = self._known(tokens), self._decoder.static.lean
        logits, _ = lean(ids, positions, cache, visible, last_only=False, feature_layers=())
        return logits[:, : self.max_top_k], None

    def cache_layout(self) -> tuple[int, int, int, Tensor]:
        """Return layers, key heads and head size of its cache, and a tensor like its own."""
        assert self._decoder.static is not None  # noqa: S101 - else nothing is recorded
        return self._decoder.static.lean.cache_layout()

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Return the ids as they are: both vocabularies are the same."""
        return draft_ids

    def _known(self, tokens: list[int] | Tensor) -> Tensor:
        """Replace target ids beyond the draft's embedding rows, which it cannot read, by 0."""
        ids = torch.as_tensor(tokens)
        return ids.masked_fill(ids >= self._decoder.vocab_size, 0)
