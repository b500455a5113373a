"""What a draft's scores are worth, learned from recorded text: the calibration of a profile.

Isotonic regression by depth, since a better score never means a worse path; then the rate at
which more drafting stops paying, by Dinkelbach's iteration over replayed rounds.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from engine.adaptive import Shaper
from engine.adaptive_replay import AdaptiveReplay, DepthSamples
from engine.replay import ReplayedRounds
from engine.trace import Trace
from profiles import Calibration, PathTable, TreeConfig
from profiles.prices import Prices

from .cost import Prediction

MAX_POINTS = 12
"""Points kept of each regression."""

N_ITERATIONS = 4


def calibrate(
    replay: AdaptiveReplay,
    limits: TreeConfig,
    prices: Prices,
    traces: Sequence[Trace],
    stops_early: bool,
) -> tuple[Calibration, Prediction]:
    """Fit the calibration of one draft and predict what adaptive drafting gives.

    Args:
        replay: Of the draft, within `limits`.
        limits: The largest tree.
        prices: What rounds cost.
        traces: The recorded texts of the replay.
        stops_early: Whether levels are decided one by one; see `engine.adaptive.Shaper`.
    """
    depths = [path_table(samples) for samples in replay.samples()]
    calibration = Calibration(limits=limits, tokens_per_pass=1.0, depths=depths)
    best = Prediction(tau=1.0, break_even_tau=1.0)
    rate = 1.0
    for _ in range(N_ITERATIONS):
        candidate = calibration.model_copy(update={"tokens_per_pass": rate})
        rounds = replay.rounds(Shaper(candidate, prices, stops_early))
        prediction, rate = predict(limits, rounds, prices, traces)
        if prediction.decode_speedup > best.decode_speedup:
            best, calibration = prediction, candidate
    return Calibration(**calibration.model_dump()), best


def path_table(samples: DepthSamples) -> PathTable:
    """Return how often the paths of one depth were right, against their score."""
    hit = samples.n_hit / samples.n_expanded if samples.n_expanded else 0.0
    scores = np.array(samples.scores)
    known = np.isfinite(scores)
    if not known.any():
        return PathTable(score=[0.0], probability=[0.0], hit=hit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of equal scores
        fit = IsotonicRegression(y_min=0, y_max=1).fit(
            scores[known], np.array(samples.accepted, dtype=float)[known]
        )
    # As six digits, which is what a profile keeps, scores must still increase.
    x = np.array([float(f"{value:.6g}") for value in fit.X_thresholds_])
    x, first = np.unique(x, return_index=True)
    y = np.maximum.accumulate(fit.y_thresholds_[first])
    if len(x) > MAX_POINTS:
        kept = np.unique(np.interp(np.linspace(0, 1, MAX_POINTS), _arc(x, y), range(len(x))))
        kept = np.unique(kept.round().astype(int))
        x, y = x[kept], y[kept]
    return PathTable(score=x.tolist(), probability=y.tolist(), hit=hit)


def predict(
    limits: TreeConfig,
    replayed: Sequence[ReplayedRounds],
    prices: Prices,
    traces: Sequence[Trace],
) -> tuple[Prediction, float]:
    """Return the predicted figures of adaptive rounds, and their tokens per reference pass."""
    n_rounds = n_tokens = 0
    price = plain = 0.0
    for rounds, trace in zip(replayed, traces, strict=True):
        context = len(trace.prompt)
        for depth, n_extend, n_nodes, n, is_free in zip(
            rounds.depths.tolist(),
            rounds.n_extend.tolist(),
            rounds.n_nodes.tolist(),
            rounds.n_emitted.tolist(),
            (rounds.depths > 0) & ~rounds.extends,
            strict=True,
        ):
            tree = limits.limited(depth)
            price += prices.round(tree, n_extend, n_nodes, context, bool(is_free)).total
            plain += sum(prices.plain(context + i) for i in range(n))
            context, n_tokens = context + n, n_tokens + n
        if rounds.extends.any():
            price += prices.prefill(len(trace.prompt))
        n_rounds += len(rounds.depths)
    break_even = (price / n_rounds) / (plain / n_tokens)
    return Prediction(n_tokens / n_rounds, break_even), n_tokens / price


def _arc(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the curve's length up to each point, so that steps keep their edges."""
    steps = np.abs(np.diff(x)) / max(float(np.ptp(x)), 1e-9)
    steps += np.abs(np.diff(y)) / max(float(np.ptp(y)), 1e-9)
    length = np.concatenate(([0.0], np.cumsum(steps)))
    return np.asarray(length / length[-1])
