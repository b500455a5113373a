"""Measuring on a machine that others use too: the same fixed pass, before and between blocks.

Ratios of interleaved runs forgive a slow machine, but not one that changes its pace: what is
fastest under load need not be so without. Blocks measured at another pace than the machine's
steady one are measured again, and left out if that does not help. The choice hangs on the fixed
pass alone, never on what a block showed, so it favours neither side.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from engine.reference import reference_times
from engine.target import Target
from profiles import Noise

TOLERANCE = 0.25
"""How much slower than its steady pace the machine may be; ordinary drift is near 10 %."""

NOISY_SPREAD = 0.2
"""Spread of a fixed pass above which a machine is too busy to measure on without a word."""

READING_S = 0.1
"""Seconds a reading of the pace takes at least: many time slices of a scheduler."""

FEWEST, MOST = 5, 500
"""Passes of a reading."""

MAX_REPEATS = 2
"""How often a disturbed block is measured again."""

STEADY_QUANTILE = 0.25
"""Of the readings between the blocks: the pace of their calmest quarter counts as steady."""

T = TypeVar("T")


@dataclass(frozen=True)
class Steadily(Generic[T]):
    """Blocks measured at a steady pace.

    Attributes:
        blocks: By number; those that stayed disturbed are missing.
        slowest: Slowest reading over the steady pace.
        n_remeasured: Blocks measured more than once.
        n_left_out: Blocks that stayed disturbed.
    """

    blocks: dict[int, T]
    slowest: float
    n_remeasured: int
    n_left_out: int

    def summary(self) -> str | None:
        """Say in one sentence what was disturbed; None if nothing was."""
        if not self.n_remeasured:
            return None
        left_out = f"{self.n_left_out} of them left out" if self.n_left_out else "all of them kept"
        return (
            f"The machine was busy or throttled (a fixed pass took up to {self.slowest:.2f} "
            f"times its usual time), so {self.n_remeasured} prompts were measured again and "
            f"{left_out}."
        )


def measure_steadily(
    n_blocks: int, measure: Callable[[int], T], pace_s: Callable[[], float], steady_s: float
) -> Steadily[T]:
    """Measure every block, and again those during which the machine was slow.

    Args:
        n_blocks: Blocks, at least 1.
        measure: Called with the number of a block.
        pace_s: Reads the pace: seconds of the fixed pass. Called before, between and after.
        steady_s: The pace read earlier in the job, when the machine was warm.
    """
    readings = [pace_s()]

    def run(number: int) -> tuple[float, T]:
        result = measure(number)
        readings.append(pace_s())
        return max(readings[-2:]), result

    done = {number: run(number) for number in range(n_blocks)}
    usual_s = min(steady_s, float(np.quantile(readings, STEADY_QUANTILE)))
    limit_s = (1 + TOLERANCE) * usual_s
    repeated: set[int] = set()
    for _ in range(MAX_REPEATS):
        disturbed = [number for number, (pace, _) in done.items() if pace > limit_s]
        repeated.update(disturbed)
        if disturbed:
            readings.append(pace_s())
        for number in disturbed:
            done[number] = min(done[number], run(number), key=lambda block: block[0])
    blocks = {number: result for number, (pace, result) in done.items() if pace <= limit_s}
    return Steadily(blocks, max(readings) / usual_s, len(repeated), n_blocks - len(blocks))


def pace_of(target: Target, pass_s: float) -> float:
    """Read the machine's pace: the mean of a fixed pass, repeated.

    Not the median: where work takes turns on a core, it stops few passes, for long.

    Args:
        target: The target whose pass it is.
        pass_s: About how long one takes.
    """
    n_passes = min(MOST, max(FEWEST, math.ceil(READING_S / pass_s)))
    return statistics.fmean(reference_times(target, n_passes))


def noise_of(times: Sequence[float]) -> Noise:
    """Return spread (interquartile range over median) and drift of a repeated pass."""
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
    third = len(times) // 3
    drift = statistics.median(times[-third:]) / statistics.median(times[:third]) - 1
    return Noise(spread=float((high - low) / median), drift=drift)


def noise_warning(noise: Noise) -> str | None:
    """Say that a machine is too busy to measure on, with the figure; None if it is not."""
    if noise.spread <= NOISY_SPREAD and abs(noise.drift) <= TOLERANCE:
        return None
    return (
        f"Warning: the same pass varies by {100 * noise.spread:.0f} % and drifts by "
        f"{100 * noise.drift:+.0f} % on this machine, so the result will be less certain; stop "
        "other work for a sharper one."
    )
