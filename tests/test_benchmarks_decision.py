"""The simulation of decisions: what it draws from, and that it knows right from wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decision import World, false_rate, found_rate
from decision_records import COMMITTED, extract, load, records_of

from profiles import HoldoutTree, MeasuredTree, Measurements, TreeConfig, save_measurements
from profiles.errors import SpectuneError

CHAIN, TREE = TreeConfig.chain(3), TreeConfig(depth=2, width=2, top_k=2, nodes=4)


def variation() -> dict[str, Any]:
    """Return records of two alike trees whose ratios vary by a tenth."""
    rng = np.random.default_rng(0)
    easy = rng.normal(0, 0.1, 12)
    race = [
        {"tree": tree.model_dump(), "prompt_ratios": np.exp(gain + easy).tolist()}
        for tree, gain in ((CHAIN, 0.3), (TREE, 0.2))
    ]
    holdout = {"plain_ms": [10.0, 20.0, 30.0, 20.0], "speculative_ms": [8.0, 15.0, 20.0, 16.0]}
    return {"races": [race], "holdouts": [holdout | {"run_noise": 0.02}]}


def test_records_know_gaps_spreads_and_how_alike_trees_are() -> None:
    records = records_of(variation())
    ((trees, behind),) = records.races
    assert trees == (CHAIN, TREE)
    assert behind == pytest.approx((0.0, 0.1))
    assert records.alike == pytest.approx(1)
    assert records.spreads[0] == pytest.approx(records.spreads[1])
    assert records.residuals[:12].mean() == pytest.approx(0)
    assert records.lengths.mean() == pytest.approx(1)
    assert records.noises.tolist() == [0.02]


def test_measurements_of_a_job_can_be_drawn_from(tmp_path: Path) -> None:
    ratios = [1.1, 1.3, 1.2, 1.4]
    whole = [
        MeasuredTree(draft="lookup", tree=tree, prompt_ratios=ratios) for tree in (CHAIN, TREE)
    ]
    pruned = MeasuredTree(draft="lookup", tree=TreeConfig.chain(1), prompt_ratios=[1.0])
    rung = HoldoutTree(
        draft="lookup", tree=CHAIN, plain_ms=[4.0] * 4, speculative_ms=[2, 3, 4, 3], run_noise=0.1
    )
    save_measurements(
        Measurements(measured=[*whole, pruned], holdout=[rung]), tmp_path / "m.json.gz"
    )
    records = records_of(extract([tmp_path / "m.json.gz"]))
    assert [trees for trees, _ in records.races] == [(CHAIN, TREE)]
    assert records.noises.tolist() == [0.1]
    with pytest.raises(SpectuneError, match="lack one of them"):
        records_of({"races": [], "holdouts": []})


def test_b25_what_is_clearly_slower_is_refused_and_what_is_clearly_faster_is_found() -> None:
    world, rng = World(records_of(variation()), n_race=6, n_holdout=16), np.random.default_rng(0)
    assert found_rate(world, rng, truth=0.9, spread=0.1, n_jobs=30) == 0
    assert found_rate(world, rng, truth=1.3, spread=0.1, n_jobs=30) == 1


def test_the_simulated_ratio_of_totals_is_the_true_one() -> None:
    world, rng = World(records_of(variation()), 6, 20_000), np.random.default_rng(0)
    ratios = world.ratios(rng, {CHAIN: 1.1, TREE: 0.9}, 0.4, 20_000)
    for tree, truth in ((CHAIN, 1.1), (TREE, 0.9)):
        assert 1 / np.mean(1 / ratios[tree]) == pytest.approx(truth, rel=0.02)


def test_b25_the_committed_records_give_few_wrong_decisions() -> None:
    world, rng = World(load(COMMITTED), n_race=6, n_holdout=16), np.random.default_rng(0)
    n_hopeless, n_false = false_rate(world, rng, 120)
    assert n_hopeless > 10
    assert n_false <= 0.15 * n_hopeless  # 0.05 is what the benchmark shows with many more jobs
