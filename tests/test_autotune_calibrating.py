"""Calibration: scores that lie are corrected, and the rate found is the best of all rates."""

import numpy as np
import pytest
import torch

from autotune.calibrating import MAX_POINTS, calibrate, path_table, predict
from engine.adaptive import Shaper
from engine.adaptive_replay import AdaptiveReplay, DepthSamples
from profiles import CostModelSummary, CostTable, TreeConfig
from profiles.prices import Prices, interpolate
from test_engine_replay import GREEDY, setting


def test_an_overconfident_draft_is_corrected() -> None:
    """Paths of log-probability s are right with probability exp(3 s): the table says so."""
    rng = np.random.default_rng(0)
    scores = rng.uniform(-2, 0, 20_000)
    accepted = rng.random(20_000) < np.exp(3 * scores)
    table = path_table(DepthSamples(scores.tolist(), accepted.tolist(), 100, 37))
    assert table.hit == 0.37
    assert len(table.score) <= MAX_POINTS
    for score in (-1.5, -1.0, -0.5, -0.1):
        found = interpolate((table.score, table.probability), score)
        assert found == pytest.approx(np.exp(3 * score), abs=0.06)


@pytest.mark.parametrize(
    "samples",
    [
        DepthSamples(),
        DepthSamples([-1.0], [True], 1, 1),
        DepthSamples([-1.0, -1.0 - 1e-9], [True, False], 1, 1),
        DepthSamples([float("-inf"), -2.0], [False, False], 1, 0),
        DepthSamples([-1.0] * 5, [True, False, True, False, True], 5, 3),
    ],
)
def test_few_or_equal_samples_still_give_a_table(samples: DepthSamples) -> None:
    table = path_table(samples)
    assert len(table.score) == len(table.probability) >= 1


def test_the_rate_is_the_speed_that_it_leads_to_and_no_other_is_faster() -> None:
    where = setting(torch.float64, GREEDY)
    limits = TreeConfig(depth=5, width=2, top_k=3, nodes=20)
    tables = [
        CostTable(name="verify", x=[0.0, 1.0, 20.0], relative=[1.0, 1.1, 2.5]),
        CostTable(name="level", x=[1.0, 2.0], relative=[0.2, 0.25]),
    ]
    prices = Prices(CostModelSummary(reference_ms=1.0, tables=tables))
    replay = AdaptiveReplay(where.target, where.drafts["model"], where.traces, limits)
    calibration, best = calibrate(replay, limits, prices, where.traces, True)
    for rate in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        other = calibration.model_copy(update={"tokens_per_pass": rate})
        rounds = replay.rounds(Shaper(other, prices, True))
        speedup = predict(limits, rounds, prices, where.traces)[0].decode_speedup
        assert speedup <= 1.03 * best.decode_speedup
    rounds = replay.rounds(Shaper(calibration, prices, True))
    _, rate = predict(limits, rounds, prices, where.traces)
    assert rate == pytest.approx(calibration.tokens_per_pass, rel=0.1)
