"""The guard's books: what speculation has lost, and what a plain token costs now.

Pure arithmetic on numbers that are passed in: no clock, no model, no decision.
"""

import statistics
from collections import deque

OUTLIER = 2.0
"""A time is counted up to this multiple of what was expected: a pause of the machine is nobody's
loss."""

WINDOW = 16
"""Rounds that tell how fast the machine is at the moment."""

FEW = 4
"""Rounds that are enough for a first estimate."""


class Ledger:
    """What speculation may still lose, in units of a plain token's time.

    A bucket that holds `allowance` at most. Every token pours in `tax`, every round its tokens
    minus its price. Whatever is gained beyond the allowance is not kept, so that over *any*
    stretch of a stream, not just from its start, the loss is at most
    `allowance + tax * tokens of the stretch`, as long as only rounds that `can_pay` are run.

    Args:
        allowance: What the bucket holds, and holds at the start.
        tax: What every token adds.
    """

    def __init__(self, allowance: float, tax: float = 0.0) -> None:
        self.allowance = allowance
        self.tax = tax
        self.balance = allowance

    def can_pay(self, loss: float) -> bool:
        """Tell whether a round that loses as much leaves the balance at 0 or above."""
        return self.balance >= loss

    def settle(self, n_tokens: int, price: float) -> None:
        """Enter a round: its tokens are earned, its price in plain tokens is paid."""
        gain = n_tokens * (1 + self.tax) - price
        self.balance = min(self.allowance, self.balance + gain)


class Speed:
    """How the times of rounds now compare with the profile's prices.

    Machines drift by a tenth within a sitting, and prices of speculative rounds are a model's:
    the ratio of observed to modelled times is followed for both kinds of rounds together, with
    a factor between the kinds that is learned wherever both were seen close by.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[bool, float]] = deque(maxlen=WINDOW)
        self._plain_over_other: deque[float] = deque(maxlen=WINDOW // 2)

    def observe(self, is_plain: bool, ratio: float) -> None:
        """Enter a round's observed over modelled time."""
        known = [r for kind, r in self._recent if kind == is_plain]
        if len(known) >= FEW:
            ratio = min(ratio, OUTLIER * statistics.median(known))
        others = [r for kind, r in self._recent if kind != is_plain]
        if len(others) >= FEW:
            other = statistics.median(others)
            self._plain_over_other.append(ratio / other if is_plain else other / ratio)
        self._recent.append((is_plain, ratio))

    @property
    def plain(self) -> float:
        """Observed over modelled time of a plain token."""
        if not self._recent:
            return 1.0
        factor = self._factor
        ratios = [r if kind else r * factor for kind, r in self._recent]
        usual = statistics.median(ratios)
        return statistics.fmean(min(ratio, OUTLIER * usual) for ratio in ratios)

    @property
    def speculative(self) -> float:
        """Observed over modelled time of a speculative round."""
        return self.plain / self._factor

    @property
    def _factor(self) -> float:
        return statistics.median(self._plain_over_other) if self._plain_over_other else 1.0
