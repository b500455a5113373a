"""A tree that the device has chosen: it can be verified before the host knows its tokens.

The host waits for the device once a round, for the target's choices; the tree comes with them.
"""

from functools import cached_property

import torch
from torch import Tensor

from .devices import sent
from .tree import DraftTree


class PendingTree:
    """The best candidates of one root, as `Pool.select` would choose them; see `DraftTree`.

    Nothing is copied: the tree must be verified, and its tokens asked for, before the candidates'
    memory is used again.

    Args:
        tokens: [N], nodes in the order of the candidates.
        parents: [N], the parent node of each; 0 is the root.
        mask: bool [N + 1, N + 1], ancestors and the node itself.
        n_levels: Levels that were grown.
    """

    model_free = False

    def __init__(self, tokens: Tensor, parents: Tensor, mask: Tensor, n_levels: int) -> None:
        self._tokens, self._parents, self._mask = tokens, parents, mask
        self.n_levels = n_levels

    @property
    def n_nodes(self) -> int:
        """Draft nodes, the root excluded."""
        return len(self._tokens)

    def as_input(self, root: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and positions [N + 1] and the mask of the pass that verifies the tree."""
        first = sent([root], self._tokens.device)
        return torch.cat([first, self._tokens]), self._mask.sum(1) + (start - 1), self._mask

    @cached_property
    def fetched(self) -> DraftTree:
        """The tree on the host; waits for the device."""
        tokens, parents = torch.stack([self._tokens, self._parents]).tolist()
        return DraftTree(tokens, parents, n_levels=self.n_levels)

    @property
    def tokens(self) -> list[int]:
        """See `DraftTree`."""
        return self.fetched.tokens

    @property
    def parents(self) -> list[int]:
        """See `DraftTree`."""
        return self.fetched.parents

    @property
    def depths(self) -> list[int]:
        """See `DraftTree`."""
        return self.fetched.depths

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """See `DraftTree`."""
        return self.fetched.children

    def mask(self) -> Tensor:
        """See `DraftTree`."""
        return self.fetched.mask()


def choose(
    tokens: Tensor, parents: Tensor, scores: Tensor, n_nodes: int, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, parents and mask of the `n_nodes` best candidates, as `Pool.select` does.

    Args:
        tokens: [P], the candidates of one root.
        parents: [P], their parents among them, -1 for the root.
        scores: [P].
        n_nodes: At most P.
        depth: Levels of the tree.
    """
    order = scores.sort(descending=True, stable=True).indices
    kept = order[:n_nodes].sort().values
    node_of = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=tokens.device)  # root first
    node_of[kept + 1] = torch.arange(1, n_nodes + 1, device=tokens.device)
    node_parents = node_of[parents[kept] + 1]
    above = torch.cat([node_parents.new_zeros(1), node_parents])  # the root is its own parent
    itself = torch.eye(n_nodes + 1, dtype=torch.bool, device=tokens.device)
    mask = itself
    for _ in range(depth):
        mask = itself | mask[above]
    return tokens[kept], node_parents, mask
