"""Growing candidates level by level, whatever scores them. Index arithmetic on tensors.

Without a shaper nothing here waits for the device, so that a growth can be recorded as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from profiles import TreeConfig

from .adaptive import Shaper
from .tree import Pool

Expand = Callable[[Tensor, Tensor, list[Tensor], int], tuple[Tensor, Tensor]]
"""Called as (tokens [roots, w], parents [roots, w] as indices into the previous beam, ancestors,
level) and returns the children's tokens and log-probabilities, each [roots, w, K]. `ancestors`
holds, for every beam so far, bool [roots, w, slots]: which of its nodes are ancestors of the new
ones, or themselves."""


@dataclass(frozen=True)
class Grown:
    """The candidates of several roots, level by level; P of each root.

    Attributes:
        tokens: [roots, P].
        parents: [roots, P], indices into the same row, -1 for the root.
        scores: [roots, P], cumulative log-probabilities.
        level_ends: Candidates in levels 1..d, for d = 1..depth.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    level_ends: list[int]

    def pools(self) -> list[Pool]:
        """Return the pool of every root."""
        columns = (self.tokens, self.parents, self.scores)
        return [
            Pool(t, p, s, self.level_ends)
            for t, p, s in zip(*(column.tolist() for column in columns), strict=True)
        ]


def grow_levels(
    tokens: Tensor,
    scores: Tensor,
    expand: Expand,
    tree: TreeConfig,
    shaper: Shaper | None = None,
) -> Grown:
    """Grow candidates: the best `width` of a level are expanded.

    The published EAGLE-2 expansion (arXiv 2406.16858, section 4.1), with width and top-k apart.

    Args:
        tokens: [roots, K] children of the roots.
        scores: [roots, K] their log-probabilities.
        expand: Scores the children of a beam.
        tree: Depth and width.
        shaper: Asked before every level whether it is worth growing; for a single root only.
    """
    n_roots, top_k = tokens.shape
    level_tokens, level_scores, level_start = tokens, scores, 0
    parents = torch.full_like(tokens, -1)
    pool = [(tokens, parents, scores)]
    ancestors: list[Tensor] = []
    for level in range(2, tree.depth + 1):
        if shaper and not shaper.goes_deeper(level_scores[0].tolist(), level - 1):
            break
        n_beam = min(tree.width, level_tokens.shape[1])
        order = level_scores.sort(dim=1, descending=True, stable=True).indices[:, :n_beam]
        beam_parents = order // top_k
        ancestors = [
            slots.gather(1, beam_parents[..., None].expand(-1, -1, slots.shape[2]))
            for slots in ancestors
        ]
        itself = torch.eye(n_beam, dtype=torch.bool, device=tokens.device)
        ancestors.append(itself.expand(n_roots, -1, -1))
        children, child_scores = expand(
            level_tokens.gather(1, order), beam_parents, ancestors, level
        )
        beam_scores = level_scores.gather(1, order)
        parents = (level_start + order)[..., None].expand(-1, -1, top_k).flatten(1)
        level_start += level_tokens.shape[1]
        level_tokens = children.flatten(1)
        level_scores = (beam_scores[..., None] + child_scores).flatten(1)
        pool.append((level_tokens, parents, level_scores))
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    return Grown(tokens, parents, scores, list(accumulate(part[0].shape[1] for part in pool)))
