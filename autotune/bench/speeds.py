"""Speeds and ratios of paired runs, each with its interval over the prompts. Pure statistics."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 4000
CONFIDENCE = 0.95


class Figure(NamedTuple):
    """A figure and its interval; a single prompt has no interval, its bounds are NaN."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float], seed: int = 0) -> Figure:
    """Return the median over the prompts, with a bootstrap interval."""
    return _bootstrap(np.asarray(values, dtype=float)[None], _median, seed)


def ratio_of_totals(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Figure:
    """Return the ratio of two sums over the same prompts, with a paired bootstrap interval.

    Args:
        above: For example the seconds of plain decoding, by prompt.
        below: For example those of speculative decoding, in the same order.
        seed: Of the resampling.
    """
    return _bootstrap(np.array([above, below], dtype=float), _ratio, seed)


def _median(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.median(rows[0], axis=-1)
    return result


def _ratio(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = rows[0].sum(axis=-1) / rows[1].sum(axis=-1)
    return result


def _bootstrap(
    rows: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    seed: int,
) -> Figure:
    """Resample the prompts (columns) and take the percentiles of the statistic."""
    n = rows.shape[1]
    value = float(statistic(rows))
    if n < 2:
        return Figure(value, float("nan"), float("nan"))
    picks = np.random.default_rng(seed).integers(0, n, size=(N_RESAMPLES, n))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(rows[:, picks]), [tail, 1 - tail])
    return Figure(value, float(low), float(high))
