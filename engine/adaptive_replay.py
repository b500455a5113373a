"""Replay of adaptive drafting: what its rounds would have been on recorded text, and what the
draft's scores were worth there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from profiles import TreeConfig

from .adaptive import Shaper
from .draft import Draft
from .replay import ReplayedRounds, grow_pools
from .target import Target
from .trace import Trace
from .tree import Pool


@dataclass
class DepthSamples:
    """The candidates at one depth, at all positions of the recorded text.

    Attributes:
        scores: Their cumulative log-probabilities.
        accepted: Whether each lies on the recorded path.
        n_expanded: Nodes of the recorded path, one level up, that were expanded.
        n_hit: How many of them had the next recorded token among their children.
    """

    scores: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    n_expanded: int = 0
    n_hit: int = 0


class AdaptiveReplay:
    """Replays one draft within the largest tree that adaptive drafting may grow.

    Args:
        target: Gives the features of the traces to drafts that read them.
        draft: The draft.
        traces: Recorded texts.
        limits: The largest tree.
    """

    def __init__(
        self, target: Target, draft: Draft, traces: Sequence[Trace], limits: TreeConfig
    ) -> None:
        self._traces = traces
        self._limits = limits
        self._pools = list(grow_pools(target, draft, traces, limits))

    def samples(self) -> list[DepthSamples]:
        """Return the candidates of all pools by depth, from depth 1."""
        samples = [DepthSamples() for _ in range(self._limits.depth)]
        for trace, pools in zip(self._traces, self._pools, strict=True):
            for i, pool in enumerate(pools):
                if not pool.is_whole:
                    _add_samples(samples, pool, trace.generated[i + 1 :])
        return samples

    def rounds(self, shaper: Shaper) -> list[ReplayedRounds]:
        """Return the rounds of every trace as this shaper would have them."""
        return [
            _replay(trace, pools, shaper)
            for trace, pools in zip(self._traces, self._pools, strict=True)
        ]


def _add_samples(samples: list[DepthSamples], pool: Pool, continuation: Sequence[int]) -> None:
    """Walk down the recorded path; every candidate is a sample, right only if it is on it."""
    node, start, expanded = -1, 0, set(pool.parents)
    for depth, (end, token) in enumerate(zip(pool.level_ends, continuation, strict=False)):
        level = range(start, end)
        right = next((j for j in level if pool.parents[j] == node and pool.tokens[j] == token), -2)
        samples[depth].scores += pool.scores[start:end]
        samples[depth].accepted += [j == right for j in level]
        if node in expanded:
            samples[depth].n_expanded += 1
            samples[depth].n_hit += right >= 0
        node, start = right, end


def _replay(trace: Trace, pools: Sequence[Pool], shaper: Shaper) -> ReplayedRounds:
    """Walk over a trace as `Request.step` would, round by round."""
    depths, n_nodes, n_emitted, model_free = [], [], [], []
    n_new, budget = 1, len(trace.generated)
    while n_new < budget:
        max_depth = min(shaper.limits.depth, budget - n_new - 1)
        pool = pools[n_new - 1]
        if pool.is_whole and max_depth:  # a hybrid's model-free round, which is not shaped
            tree, depth = pool.tree(), min(len(pool.level_ends), max_depth)
        else:
            pool = _grown(pool, shaper, max_depth)
            tree, depth = shaper.select(pool), len(pool.level_ends)
        node = accepted = 0
        for token in trace.generated[n_new:]:
            child = tree.children.get((node, token))
            if child is None:
                break
            node, accepted = child, accepted + 1
        depths.append(depth)
        n_nodes.append(tree.n_nodes)
        n_emitted.append(accepted + 1)
        model_free.append(pool.is_whole)
        n_new += accepted + 1
    return ReplayedRounds(
        np.array(depths, dtype=np.int64),
        np.array(n_nodes, dtype=np.int64),
        np.array(n_emitted, dtype=np.int64),
        np.array(model_free, dtype=np.bool_),
    )


def _grown(pool: Pool, shaper: Shaper, max_depth: int) -> Pool:
    """Return as much of a full pool as would have been grown, with at most `max_depth` levels."""
    depth, start = min(1, max_depth), 0
    while 0 < depth < max_depth:
        level, start = pool.scores[start : pool.level_ends[depth - 1]], pool.level_ends[depth - 1]
        if shaper.stops_early and not shaper.goes_deeper(level, depth):
            break
        depth += 1
    return pool.cut(depth)
