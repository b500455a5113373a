"""The recorded passes of a neural draft: bringing its state up to date, and growing a tree.

A tree is grown and chosen in one recording, all levels of it, so that nothing waits for the
device between the last committed token and the target's pass.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profiles import TreeConfig

from .cache import KVCache
from .graphs import Recorder
from .growth import Grown, grow_levels
from .pending_tree import PendingTree, choose
from .static import Shelf, SlotCache, StaticCache, bucket_of, in_window, visible_rows
from .tree import Pool

if TYPE_CHECKING:
    from .beam import BeamDraft

Extended = tuple[Tensor, Tensor | None]
"""Logits [1, draft vocabulary] and hidden state [1, H] of the last committed token."""


class DraftSteps:
    """The recorded passes of one draft.

    Args:
        draft: The draft.
        record: Records passes.
    """

    def __init__(self, draft: "BeamDraft", record: Recorder) -> None:
        self.draft = draft
        self.record = record
        self.shelf = Shelf(*draft.cache_layout())
        self._extends: dict[tuple[int, int], _RecordedExtend] = {}
        self._growths: dict[tuple[TreeConfig, int], _RecordedGrowth] = {}

    def lend(self, n_tokens: int) -> StaticCache | None:
        """Return a cache whose passes are recorded; None where all are lent out."""
        return self.shelf.lend(n_tokens)

    def extend(
        self, tokens: list[int], features: Tensor | None, cache: KVCache
    ) -> Extended | None:
        """Append committed tokens; see `BeamDraft.extend`. None if there is no such pass."""
        bucket = bucket_of(len(tokens))
        if bucket is None or not isinstance(cache, StaticCache) or not cache.has_room(bucket):
            return None
        key = bucket, cache.lent.data_ptr()
        if key not in self._extends:
            self._extends[key] = _RecordedExtend(self, cache.lent, bucket)
        result = self._extends[key](tokens, features, cache.length)
        cache.grown(len(tokens))
        return result

    def grow(
        self, logits: Tensor, hidden: Tensor | None, cache: KVCache, tree: TreeConfig
    ) -> "RecordedTree | None":
        """Grow a tree below the last committed token. None if there is no such pass."""
        if not isinstance(cache, StaticCache) or not cache.has_room(tree.width * tree.depth):
            return None
        key = tree, cache.lent.data_ptr()
        if key not in self._growths:
            self._growths[key] = _RecordedGrowth(self, cache.lent, tree)
        return self._growths[key](logits, hidden, cache.length)


class RecordedTree:
    """What a recorded growth gave, until it is played back again."""

    def __init__(self, grown: Grown, chosen: tuple[Tensor, Tensor, Tensor]) -> None:
        self._grown = grown
        self._chosen = chosen

    def tree(self) -> PendingTree:
        """Return the tree, without waiting for it."""
        return PendingTree(*self._chosen, n_levels=len(self._grown.level_ends))

    def pool(self) -> Pool:
        """Return all candidates; waits for the device."""
        return self._grown.pools()[0]


class _RecordedExtend:
    """A pass over committed tokens, padded to one number of them."""

    def __init__(self, steps: DraftSteps, cache: Tensor, n: int) -> None:
        device = cache.device
        self._steps, self._cache = steps, cache
        self._ids = torch.zeros(n, dtype=torch.int64, device=device)
        self._features: Tensor | None = None
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._play: Callable[[], Extended] | None = None

    def __call__(self, tokens: list[int], features: Tensor | None, start: int) -> Extended:
        n = len(tokens)
        self._ids[:n].copy_(torch.tensor(tokens), non_blocking=True)
        if features is not None:
            if self._features is None:
                self._features = features.new_zeros(len(self._ids), features.shape[1])
            self._features[:n].copy_(features)
        self._start.fill_(start)
        self._last.fill_(n - 1)
        if self._play is None:
            self._play = self._steps.record(self._work)
        return self._play()

    def _work(self) -> Extended:
        draft = self._steps.draft
        columns = torch.arange(self._cache.shape[4], device=self._ids.device)
        rows = self._start + torch.arange(len(self._ids), device=self._ids.device)
        visible = columns[None, :] <= rows[:, None]
        if draft.window is not None:
            visible &= rows[:, None] - columns[None, :] < draft.window
        hidden = draft.fused([self._features])
        slots = SlotCache(self._cache, rows)
        logits, hidden = draft.at(self._ids, hidden, rows, slots, visible)
        last = None if hidden is None else hidden.index_select(0, self._last)
        return logits.index_select(0, self._last), last


class _RecordedGrowth:
    """The growth of one tree: every level, and the choice of its nodes."""

    def __init__(self, steps: DraftSteps, cache: Tensor, tree: TreeConfig) -> None:
        self._steps, self._cache, self._tree = steps, cache, tree
        self._logits: Tensor | None = None
        self._hidden: Tensor | None = None
        self._start = torch.zeros(1, dtype=torch.int64, device=cache.device)
        self._play: Callable[[], RecordedTree] | None = None

    def __call__(self, logits: Tensor, hidden: Tensor | None, start: int) -> RecordedTree:
        if self._logits is None:
            self._logits = torch.empty_like(logits)
            self._hidden = None if hidden is None else torch.empty_like(hidden)
        self._logits.copy_(logits)
        if self._hidden is not None and hidden is not None:
            self._hidden.copy_(hidden)
        self._start.fill_(start)
        if self._play is None:
            self._play = self._steps.record(self._work)
        return self._play()

    def _work(self) -> RecordedTree:
        draft, tree, start, device = (
            *(self._steps.draft, self._tree, self._start),
            self._cache.device,
        )
        columns = torch.arange(self._cache.shape[4], device=device)
        beam = None if self._hidden is None else self._hidden[None]  # [1, w, H]
        positions: list[Tensor] = []

        def expand(
            tokens: Tensor, parents: Tensor, ancestors: list[Tensor], level: int
        ) -> tuple[Tensor, Tensor]:
            nonlocal beam
            block = torch.cat([slots[0] for slots in ancestors], dim=1)  # [w, nodes so far]
            n, n_nodes = block.shape
            rows = start + torch.arange(n_nodes - n, n_nodes, device=device)
            positions.append((start + (level - 2)).expand(n))
            visible = visible_rows(columns, start, block)
            if draft.window is not None:
                visible &= in_window(
                    columns, start, positions[-1], torch.cat(positions), draft.window
                )
            if beam is not None:
                beam = beam.gather(1, parents[..., None].expand(-1, -1, beam.shape[2]))
            flat = None if beam is None else beam[0]
            slots = SlotCache(self._cache, rows)
            logits, flat = draft.at(tokens[0], flat, positions[-1], slots, visible)
            beam = None if flat is None else flat[None]
            return draft.children(logits[None], tree.top_k)

        assert self._logits is not None  # noqa: S101 - it was copied before
        grown = grow_levels(*draft.children(self._logits, tree.top_k), expand, tree)
        n_nodes = min(tree.nodes, grown.tokens.shape[1])
        candidates = grown.tokens[0], grown.parents[0], grown.scores[0]
        return RecordedTree(grown, choose(*candidates, n_nodes, tree.depth))
