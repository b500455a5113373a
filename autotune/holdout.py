"""The holdout test: is a tree, fixed beforehand, faster than plain on prompts it never saw?

Pure statistics and the order of the runs; the timing itself is passed in.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ALPHA = 0.05
"""Chance, over all rungs together, of calling a tree faster that is not."""

MIN_PROMPTS = 8
"""Fewer prompts prove nothing."""

MAX_RUNGS = 3


@dataclass(frozen=True)
class PairedTimes:
    """Total seconds by prompt, plain and speculative, from interleaved runs."""

    plain_s: tuple[float, ...]
    speculative_s: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """What the test says of one rung.

    Attributes:
        ratio: Total plain over total speculative time.
        low: One-sided lower bound of the typical prompt's speedup, at the confidence below.
        confidence: Of `low`, corrected for the number of rungs.
        worst_prompt: Smallest speedup of a single prompt.
        spread: Standard deviation of the log ratios by prompt.
        n_prompts: Pairs.
    """

    ratio: float
    low: float
    confidence: float
    worst_prompt: float
    spread: float
    n_prompts: int

    @property
    def is_faster(self) -> bool:
        """Whether the tree is proved faster: both figures must exceed 1."""
        return self.n_prompts >= MIN_PROMPTS and self.ratio > 1 and self.low > 1

    @property
    def n_prompts_needed(self) -> int | None:
        """Prompts that would probably settle it, were the observed mean the truth.

        None if the observed mean is not above 1, or if the question is settled.
        """
        if self.is_faster or (self.ratio <= 1 and self.n_prompts >= MIN_PROMPTS):
            return None
        if self.n_prompts < MIN_PROMPTS:
            return MIN_PROMPTS
        critical = stats.norm.ppf(self.confidence) + stats.norm.ppf(0.8)
        return max(MIN_PROMPTS, math.ceil((critical * self.spread / math.log(self.ratio)) ** 2))


def run_order(n_rungs: int) -> list[int]:
    """Return the order of runs on one prompt: plain (-1), the rungs, and the same backwards.

    Linear drift of the machine then adds the same to both sides (A B B A).
    """
    half = [-1, *range(n_rungs)]
    return half + half[::-1]


def measure_pairs(
    n_prompts: int, n_rungs: int, run_s: Callable[[int, int], float]
) -> list[PairedTimes]:
    """Time every rung against plain on every prompt.

    Args:
        n_prompts: Prompts.
        n_rungs: Rungs, at most `MAX_RUNGS`.
        run_s: Called as (prompt, rung), -1 for plain, returns seconds.

    Returns:
        One entry per rung; all share the plain runs.
    """
    seconds = np.zeros((n_rungs + 1, n_prompts))
    for prompt in range(n_prompts):
        for rung in run_order(n_rungs):
            seconds[rung + 1, prompt] += run_s(prompt, rung)
    plain = tuple(seconds[0].tolist())
    return [PairedTimes(plain, tuple(row.tolist())) for row in seconds[1:]]


def judge(times: PairedTimes, n_rungs: int) -> Verdict:
    """Test one rung: one-sided t on the log ratios by prompt, Bonferroni over the rungs."""
    plain, speculative = np.array(times.plain_s), np.array(times.speculative_s)
    logs = np.log(plain / speculative)
    n = len(logs)
    confidence = 1 - ALPHA / n_rungs
    spread = float(logs.std(ddof=1)) if n > 1 else float("inf")
    margin = stats.t.ppf(confidence, n - 1) * spread / math.sqrt(n) if n > 1 else float("inf")
    return Verdict(
        ratio=float(plain.sum() / speculative.sum()),
        low=float(math.exp(logs.mean() - margin)),
        confidence=confidence,
        worst_prompt=float(np.exp(logs.min())),
        spread=spread,
        n_prompts=n,
    )


def first_proved(verdicts: Sequence[Verdict]) -> int | None:
    """Return the first rung, in the order fixed beforehand, that is proved faster."""
    return next((i for i, verdict in enumerate(verdicts) if verdict.is_faster), None)
