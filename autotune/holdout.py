"""The holdout test: is a tree, fixed beforehand, faster than plain on prompts it never saw?

Pure statistics and the order of the runs; the timing itself is passed in.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

ALPHA = 0.05
"""Chance, over all rungs together, of calling a tree faster that is not."""

POWER = 0.8
"""Chance of settling the question that a number of prompts is named for."""

MIN_PROMPTS = 8
"""Fewer prompts prove nothing."""

MAX_PROMPTS = 10_000
"""More prompts than this are not worth naming."""

CERTAIN = 30.0
"""Shift of t beyond which a test cannot fail, and scipy's series for the noncentral t can."""

MAX_RUNGS = 3

T = TypeVar("T")

Pairs = list[tuple[float, float]]
"""Seconds of one prompt by side, plain first: on the way there and on the way back."""


@dataclass(frozen=True)
class PairedTimes:
    """Total seconds by prompt, plain and speculative, from interleaved runs."""

    plain_s: tuple[float, ...]
    speculative_s: tuple[float, ...]

    def swapped(self) -> "PairedTimes":
        """Return the same times with the sides exchanged: is plain the faster one?"""
        return PairedTimes(self.speculative_s, self.plain_s)


@dataclass(frozen=True)
class Verdict:
    """What the test says of one rung.

    Attributes:
        ratio: Total plain over total speculative time.
        low: One-sided lower bound, at the confidence below, of the typical prompt's speedup and
            of the ratio of totals alike: the smaller of the two bounds.
        confidence: Of `low`, corrected for the number of rungs.
        worst_prompt: Smallest speedup of a single prompt.
        spread: Standard deviation of the log ratios by prompt.
        n_prompts: Pairs.
        effects: The means behind the two bounds, in units of their standard deviations.
    """

    ratio: float
    low: float
    confidence: float
    worst_prompt: float
    spread: float
    n_prompts: int
    effects: tuple[float, ...] = ()

    @property
    def is_faster(self) -> bool:
        """Whether the tree is proved faster: both figures must exceed 1."""
        return self.n_prompts >= MIN_PROMPTS and self.ratio > 1 and self.low > 1

    @property
    def n_prompts_needed(self) -> int | None:
        """Prompts that prove it with probability `POWER`, if the figures seen are the truth.

        None if it is proved already, or if no number of prompts would.
        """
        if self.is_faster:
            return None
        numbers = [prompts_needed(effect, self.confidence) for effect in self.effects]
        known = [number for number in numbers if number is not None]
        if self.n_prompts < MIN_PROMPTS:
            return max([MIN_PROMPTS, *known])
        return max(known) if known and len(known) == len(numbers) else None


def run_order(n_rungs: int) -> list[int]:
    """Return the order of runs on one prompt: plain (-1), the rungs, and the same backwards.

    Linear drift of the machine then adds the same to both sides (A B B A).
    """
    half = [-1, *range(n_rungs)]
    return half + half[::-1]


def measure_block(n_rungs: int, run: Callable[[int], T]) -> list[tuple[T, T]]:
    """Run plain and every rung on one prompt, each twice.

    Args:
        n_rungs: Rungs, at most `MAX_RUNGS`.
        run: Called with a rung, -1 for plain.

    Returns:
        What each side gave on the way there and on the way back, plain first.
    """
    done: list[list[T]] = [[] for _ in range(n_rungs + 1)]
    for rung in run_order(n_rungs):
        done[rung + 1].append(run(rung))
    return [(there, back) for there, back in done]


def paired(blocks: Sequence[Sequence[tuple[float, float]]], n_rungs: int) -> list[PairedTimes]:
    """Return the times of every rung; all share the plain runs.

    Args:
        blocks: Seconds by prompt, side and run, plain first, as from `measure_block`.
        n_rungs: Rungs.
    """
    plain, *rungs = (tuple(sum(block[side]) for block in blocks) for side in range(n_rungs + 1))
    return [PairedTimes(plain, rung) for rung in rungs]


def judge(times: PairedTimes, n_rungs: int) -> Verdict:
    """Test one rung: one-sided t over the prompts, Bonferroni over the rungs.

    Two means are tested, and both must be above 0. That of the log ratios is the typical prompt's
    speedup. That of the seconds saved is the total's: where the speedup varies from prompt to
    prompt, the ratio of totals is the smaller of the two (Jensen), and a test of the log ratios
    alone would call trees faster that are not. As either failing is enough to reject, the two
    need no correction for each other.
    """
    n, confidence = len(times.plain_s), 1 - ALPHA / n_rungs
    if n == 0:
        return Verdict(1.0, 0.0, confidence, 1.0, math.inf, 0)
    plain, speculative = np.array(times.plain_s), np.array(times.speculative_s)
    logs, saved = np.log(plain / speculative), plain - speculative
    spread = float(logs.std(ddof=1)) if n > 1 else math.inf
    low = 0.0
    if n > 1:
        factor = float(stats.t.ppf(confidence, n - 1)) / math.sqrt(n)
        typical = math.exp(logs.mean() - factor * spread)
        low = min(typical, ratio_low(plain, speculative, factor))
    return Verdict(
        ratio=float(plain.sum() / speculative.sum()),
        low=low,
        confidence=confidence,
        worst_prompt=float(np.exp(logs.min())),
        spread=spread,
        n_prompts=n,
        effects=(_effect(logs), _effect(saved)),
    )


def ratio_low(above: NDArray[np.float64], below: NDArray[np.float64], factor: float) -> float:
    """Return the lower bound of a ratio of means (Fieller 1954).

    It is the smallest R at which the mean of `above - R * below` is not yet significantly
    above 0: the lower root of a quadratic in R.

    Args:
        above: Values above the line, in pairs with those below, all positive.
        below: Values below the line.
        factor: Critical value of t over the root of the number of pairs.
    """
    covariance = factor**2 * np.cov(above, below)
    square_above = above.mean() ** 2 - covariance[0, 0]
    square_below = below.mean() ** 2 - covariance[1, 1]
    product = above.mean() * below.mean() - covariance[0, 1]
    if square_above <= 0 or square_below <= 0:
        return 0.0  # the pairs vary too much to bound it
    root = math.sqrt(max(0.0, product**2 - square_above * square_below))
    return float((product - root) / square_below)


def first_proved(verdicts: Sequence[Verdict]) -> int | None:
    """Return the first rung, in the order fixed beforehand, that is proved faster."""
    return next((i for i, verdict in enumerate(verdicts) if verdict.is_faster), None)


def power(effect: float, n: int, confidence: float) -> float:
    """Return the chance that a one-sided t test on `n` values finds their mean above 0.

    Args:
        effect: True mean over true standard deviation.
        n: Values, at least 2.
        confidence: Of the test.
    """
    shift = math.sqrt(n) * effect
    if shift > CERTAIN:
        return 1.0
    return float(stats.nct.sf(stats.t.ppf(confidence, n - 1), n - 1, shift))


def prompts_needed(effect: float, confidence: float) -> int | None:
    """Return the fewest prompts with which such an effect is found with probability `POWER`.

    None if there is none to be found, or if even `MAX_PROMPTS` would be too few.
    """
    if effect <= 0:
        return None
    numbers = range(MIN_PROMPTS, MAX_PROMPTS + 1)
    place = bisect_left(numbers, POWER, key=lambda n: power(effect, n, confidence))
    return numbers[place] if place < len(numbers) else None


def _effect(values: NDArray[np.float64]) -> float:
    """Return mean over standard deviation; infinite where all values agree."""
    mean, deviation = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return mean / deviation if deviation > 0 else math.copysign(math.inf, mean) if mean else 0.0
