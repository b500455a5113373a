"""The trees a search may propose: fixed ranges, every point legal, equal trees one point."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from profiles import PLAIN, TreeConfig
from profiles.engine_spaces import ENGINE_SPACES, can_run

if TYPE_CHECKING:
    from engine.memory import Room

NODE_BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 31, 32, 40, 48, 59, 64)
"""Node budgets a search tries; finer steps cost the target the same."""

WIDTH_AND_TOP_K = (
    *((1, 1), (1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (3, 3), (3, 6), (4, 4), (6, 6), (8, 8)),
    (10, 10),
)
"""Pairs of width and top-k whose trees replay can score."""

COARSE = ((1, 1), (2, 2), (4, 4), (10, 10))
"""The pairs that are scored first; then those near the best of them."""

NEAR = 1.2
"""Distance in powers of 2, width and top-k together, up to which a pair is near another."""

DEFAULTS = (
    TreeConfig.from_eagle(total_token=60, depth=7, top_k=10),
    TreeConfig.from_sglang(num_steps=3, eagle_topk=1, num_draft_tokens=4),
    TreeConfig.from_sglang(num_steps=5, eagle_topk=4, num_draft_tokens=8),
)
"""The settings people start from: EAGLE's, and SGLang's two."""


@dataclass(frozen=True)
class SearchSpace:
    """The bounds of a search for one draft.

    Attributes:
        max_depth: Deepest tree.
        max_width: Most nodes expanded per level.
        max_top_k: Most children of a node.
        max_nodes: Most nodes verified per round.
        draft_kind: Kind of the draft.
        engine: Another engine that must be able to run every tree, or None.
        room: Memory that every tree must fit; None does not ask.
    """

    max_depth: int
    max_width: int
    max_top_k: int
    max_nodes: int
    draft_kind: str = "eagle3"
    engine: str | None = None
    room: "Room | None" = field(default=None, compare=False)

    @property
    def ranges(self) -> dict[str, Any]:
        """The bounds; memory, which is another at every job, is none of them."""
        return {name: value for name, value in asdict(self).items() if name != "room"}

    def contains(self, tree: TreeConfig) -> bool:
        """Tell whether a tree is within the bounds, and fits the memory."""
        return (
            tree.depth <= self.max_depth
            and tree.width <= self.max_width
            and tree.top_k <= self.max_top_k
            and tree.nodes <= self.max_nodes
            and (self.engine is None or can_run(self.engine, tree, self.draft_kind))
            and (self.room is None or self.room.fits(tree))
        )

    def tree(self, depth: int, width: int, top_k: int, fill: float) -> TreeConfig:
        """Return the tree at a point of the fixed ranges, in canonical form.

        It is within the bounds; whether it fits the memory is for `contains` to say.

        Args:
            depth, width, top_k: Clamped to this space; depth 0 is plain.
            fill: In [0, 1]: which node budget between `depth` and what the tree can hold.
        """
        if depth == 0:
            return PLAIN
        depth = min(depth, self.max_depth, self.max_nodes)
        width, top_k = self._shape(min(width, self.max_width), min(top_k, self.max_top_k))
        budgets = self.budgets(depth, width, top_k)
        nodes = budgets[round(fill * (len(budgets) - 1))]
        return TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes).canonical()

    def budgets(self, depth: int, width: int, top_k: int) -> list[int]:
        """Return the node budgets of trees with these levels, ascending; never empty."""
        narrowest = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=depth)
        most = min(narrowest.pool, self.max_nodes)
        if self.engine and ENGINE_SPACES[self.engine].nodes_per_level:
            most = min(most, top_k * depth)
        return [depth, *(n for n in NODE_BUCKETS if depth < n <= most)]

    def _shape(self, width: int, top_k: int) -> tuple[int, int]:
        """Return the width and top-k nearest to these that the engine can run."""
        if self.engine is None:
            return width, top_k
        if self.draft_kind not in ENGINE_SPACES[self.engine].branching:
            return 1, 1
        return min(top_k, self.max_width), min(top_k, self.max_width)

    def fill(self, tree: TreeConfig) -> float:
        """Return the `fill` whose tree has the budget nearest to this tree's."""
        if tree.is_plain:
            return 0.0
        budgets = self.budgets(tree.depth, tree.width, tree.top_k)
        nearest = min(range(len(budgets)), key=lambda i: abs(budgets[i] - tree.nodes))
        return nearest / max(1, len(budgets) - 1)

    def enumerate(
        self, pairs: Sequence[tuple[int, int]] = WIDTH_AND_TOP_K
    ) -> Iterator[TreeConfig]:
        """Yield every tree of some pairs of width and top-k, each canonical tree once."""
        seen = set()
        for width, top_k in pairs:
            if width > self.max_width or top_k > self.max_top_k:
                continue
            for depth in range(1, min(self.max_depth, self.max_nodes) + 1):
                for nodes in self.budgets(depth, width, top_k):
                    tree = TreeConfig(depth=depth, width=width, top_k=top_k, nodes=nodes)
                    if tree.canonical() == tree and tree not in seen and self.contains(tree):
                        seen.add(tree)
                        yield tree


def near(width: int, top_k: int) -> list[tuple[int, int]]:
    """Return the pairs of width and top-k beside this one that are not among the coarse ones."""
    return [
        (w, k)
        for w, k in WIDTH_AND_TOP_K
        if (w, k) not in COARSE and abs(math.log2(w / width)) + abs(math.log2(k / top_k)) <= NEAR
    ]
