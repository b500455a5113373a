"""Draft trees: tokens and parents, and what the target needs to verify them in one pass.

Index arithmetic only: this module knows neither models nor sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from profiles.tree import MAX_DEPTH


@dataclass(frozen=True)
class DraftTree:
    """The nodes one round verifies. Node 0 is the root: the last committed token.

    Attributes:
        tokens: Target token ids of nodes 1..N (the root's token is not repeated).
        parents: Parent node of each of nodes 1..N; a parent's number is below its child's.
        n_levels: Levels the draft grew to find them, if fewer than it was asked for.
        model_free: Whether a hybrid found them without its head.
    """

    tokens: list[int]
    parents: list[int]
    n_levels: int = field(default=MAX_DEPTH, compare=False)
    model_free: bool = field(default=False, compare=False)

    @property
    def n_nodes(self) -> int:
        """Draft nodes, the root excluded."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> list[int]:
        """Depth of nodes 0..N; the root has depth 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """Map (node, token) to the child of that node which carries that token."""
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(self.parents, self.tokens, strict=True), start=1
            )
        }

    def as_input(self, root: int, start: int) -> tuple[list[int], Tensor, Tensor | None]:
        """Return ids and positions [N+1] and the mask of the pass that verifies the tree.

        Args:
            root: Token of the root.
            start: Its position.
        """
        positions = start + torch.tensor(self.depths)
        return [root, *self.tokens], positions, self.mask() if self.n_nodes else None

    def mask(self) -> Tensor:
        """Return bool [N+1, N+1]: row i may attend to its ancestors and to itself."""
        mask = np.zeros((self.n_nodes + 1, self.n_nodes + 1), dtype=np.bool_)
        mask[0, 0] = True
        for node, parent in enumerate(self.parents, start=1):
            mask[node] = mask[parent]
            mask[node, node] = True
        return torch.from_numpy(mask)


ROOT_ONLY = DraftTree(tokens=[], parents=[])
"""The tree of a plain round."""


@dataclass(frozen=True)
class Pool:
    """The candidates of one root, level by level, before the node budget is applied.

    Attributes:
        tokens: Token of every candidate; levels follow one another.
        parents: Index of each candidate's parent in the pool, -1 for the root.
        scores: Cumulative log-probability of each candidate's path; never above its parent's.
        level_ends: Number of candidates in levels 1..d, for d = 1..depth.
        is_whole: Whether this is the tree of a round as it stands, not to be cut to another
            depth or node budget; the levels are then those it was grown to.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    level_ends: list[int]
    is_whole: bool = False

    @cached_property
    def order(self) -> list[int]:
        """Candidates by cumulative score, best first, ties by index."""
        return sorted(range(len(self.tokens)), key=lambda i: -self.scores[i])

    def cut(self, depth: int) -> "Pool":
        """Return the pool as it would be without the levels below `depth`."""
        if depth >= len(self.level_ends):
            return self
        n = self.level_ends[depth - 1] if depth else 0
        return Pool(self.tokens[:n], self.parents[:n], self.scores[:n], self.level_ends[:depth])

    def select(self, n_nodes: int) -> DraftTree:
        """Return the tree of the `n_nodes` best candidates; see `whole`."""
        return self.whole(n_nodes).tree()

    def whole(self, n_nodes: int) -> "Pool":
        """Keep the `n_nodes` best candidates by cumulative score, ties by index.

        A child's score is at most its parent's and its index is higher, so what is kept is
        connected (EAGLE-2, arXiv 2406.16858, section 4.2, with ties made safe).
        """
        kept = sorted(self.order[:n_nodes])
        place = {-1: -1} | {candidate: i for i, candidate in enumerate(kept)}
        return Pool(
            tokens=[self.tokens[i] for i in kept],
            parents=[place[self.parents[i]] for i in kept],
            scores=[self.scores[i] for i in kept],
            level_ends=self.level_ends,
            is_whole=True,
        )

    def tree(self) -> DraftTree:
        """Return all candidates as a tree."""
        parents = [parent + 1 for parent in self.parents]
        return DraftTree(self.tokens, parents, n_levels=len(self.level_ends))


def best(scores: Sequence[float], n: int) -> list[int]:
    """Return the indices of the `n` largest finite scores, best first, ties by index."""
    return sorted(
        (i for i, score in enumerate(scores) if score != float("-inf")), key=lambda i: -scores[i]
    )[:n]
