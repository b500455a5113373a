"""Adaptive drafting: how deep to grow a round's tree and how much of it to verify.

Every token per second counts the same, so a round is worth its expected tokens minus `rate` times
its price, where `rate` is the tokens per time that the whole text reaches: maximising that
difference round by round maximises the ratio over the text (Dinkelbach 1967). The rate is found
once on recorded text and then frozen, like the prices, so that the tree stays a function of the
prefix and replay stays exact.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from profiles.prices import Prices, interpolate
from profiles.serving import Calibration, PathTable

from .tree import DraftTree, Pool


class Shaper:
    """Fits the tree of a round to what the draft is sure of.

    Args:
        calibration: What the draft's scores are worth.
        prices: What levels and verify passes cost.
        stops_early: Whether to decide level by level. On an accelerator each decision would wait
            for the device: there every level is grown, and only the nodes are chosen.

    Attributes:
        limits: The largest tree.
    """

    def __init__(self, calibration: Calibration, prices: Prices, stops_early: bool) -> None:
        limits = calibration.limits
        self.limits = limits
        self._depths = calibration.depths
        rate, context = calibration.tokens_per_pass, prices.usual_context
        self._node_costs = [rate * prices.verify(n, context) for n in range(limits.nodes + 1)]
        self._level_costs = [
            rate * prices.level(width, context) for width in range(limits.width + 1)
        ]
        self.stops_early = stops_early

    def goes_deeper(self, scores: Sequence[float], depth: int) -> bool:
        """Tell whether a level below `depth` is worth its price.

        Args:
            scores: Cumulative log-probabilities of the candidates at `depth`, at most `width` of
                which would be expanded.
            depth: From 1, below the deepest level allowed.
        """
        beam = sorted(scores, reverse=True)[: self.limits.width]
        if not beam:
            return False
        table, below = self._depths[depth - 1], self._depths[depth]
        expected = below.hit * sum(_probability(table, score) for score in beam)
        return expected > self._level_costs[len(beam)]

    def select(self, pool: Pool) -> DraftTree:
        """Return the tree of the candidates worth verifying; it may be empty."""
        order = pool.order[: self.limits.nodes]
        probabilities = [
            _probability(self._depths[bisect_right(pool.level_ends, i)], pool.scores[i])
            for i in order
        ]
        expected = accumulate(probabilities, initial=0.0)
        values = [e - cost for e, cost in zip(expected, self._node_costs, strict=False)]
        return pool.select(values.index(max(values)))


def _probability(table: PathTable, score: float) -> float:
    """Return how often a path of that score is accepted."""
    x = table.score
    if score <= x[0]:
        return table.probability[0]
    return table.probability[-1] if score >= x[-1] else interpolate((x, table.probability), score)
