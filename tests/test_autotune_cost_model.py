"""The cost model: what the fit recovers, what it may never do, and hand arithmetic."""

from collections.abc import Iterable

import numpy as np
import pytest

from autotune.cost_model import HELD_OUT_EVERY, CostModel
from engine.replay import ReplayedRounds
from engine.rounds import VERIFY_PROBES, RoundTime
from profiles import PLAIN, TreeConfig

REFERENCE_S = 0.02
EXTEND_BASE, EXTEND_TOKEN = 0.10, 0.01
LEVELS_BASE, LEVEL, LEVEL_NODE = 0.03, 0.08, 0.005
COMMIT = 0.02
TREES = [
    TreeConfig(depth=d, width=w, top_k=w, nodes=d * w)
    for d, w in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (3, 4), (6, 4), (2, 8), (5, 8))
]


def verify_cost(n_nodes: int) -> float:
    """Several tokens run on other kernels than one does: a jump, flat, then a slope."""
    return 1.0 if n_nodes == 0 else 1.3 + 0.02 * max(0, n_nodes - 16)


def round_time(
    tree: TreeConfig, n_extend: int, n_nodes: int, *, drift: float = 1.0, noise: float = 1.0
) -> RoundTime:
    """Return a round that costs exactly the known coefficients, times drift and noise."""
    unit = REFERENCE_S * drift * noise
    parts = {"extend_s": 0.0, "levels_s": 0.0, "commit_s": 0.0}
    if not tree.is_plain:
        parts["extend_s"] = unit * (EXTEND_BASE + EXTEND_TOKEN * n_extend)
        n_levels = tree.depth - 1
        parts["levels_s"] = unit * (LEVELS_BASE + n_levels * (LEVEL + LEVEL_NODE * tree.width))
        parts["commit_s"] = unit * COMMIT
    verify_s = unit * verify_cost(n_nodes)
    return RoundTime(
        tree=tree,
        n_nodes=n_nodes,
        n_extend=n_extend,
        context=100 + n_extend,
        verify_s=verify_s,
        total_s=verify_s + sum(parts.values()),
        reference_s=REFERENCE_S * drift,
        **parts,
    )


def probes(rng: np.random.Generator, noise: float = 0.0, n: int = 25) -> list[RoundTime]:
    times = []
    for n_nodes in (0, *VERIFY_PROBES):
        tree = (
            PLAIN if n_nodes == 0 else TreeConfig(depth=1, width=1, top_k=n_nodes, nodes=n_nodes)
        )
        for _ in range(n):
            drift = rng.uniform(0.8, 1.25)
            times.append(round_time(tree, 0, n_nodes, drift=drift, noise=rng.lognormal(0, noise)))
    return times


def rounds(
    rng: np.random.Generator,
    trees: Iterable[TreeConfig] = TREES,
    noise: float = 0.0,
    n: int = 40,
) -> list[RoundTime]:
    return [
        round_time(
            tree,
            int(rng.integers(1, tree.depth + 2)),
            tree.nodes,
            drift=rng.uniform(0.8, 1.25),
            noise=rng.lognormal(0, noise),
        )
        for tree in trees
        for _ in range(n)
    ]


def model(noise: float = 0.0) -> CostModel:
    rng = np.random.default_rng(0)
    return CostModel(probes(rng, noise), {"head": rounds(rng, noise=noise)})


def test_the_fit_recovers_known_coefficients_through_drift() -> None:
    cost = model().drafts["head"]
    assert cost.extend_base == pytest.approx(EXTEND_BASE, rel=1e-6)
    assert cost.extend_token == pytest.approx(EXTEND_TOKEN, rel=1e-6)
    assert cost.levels_base == pytest.approx(LEVELS_BASE, rel=1e-6)
    assert cost.level == pytest.approx(LEVEL, rel=1e-6)
    assert cost.level_node == pytest.approx(LEVEL_NODE, rel=1e-6)
    assert cost.commit == pytest.approx(COMMIT, rel=1e-6)
    assert cost.heldout_error is not None
    assert cost.heldout_error.p90 < 1e-6


def test_the_fit_predicts_every_round_within_the_noise_of_its_medians() -> None:
    noisy = model(noise=0.1)
    for tree in TREES:
        for n_extend in (1, tree.depth + 1):
            exact = round_time(tree, n_extend, tree.nodes)
            predicted = noisy.drafts["head"].round(tree, n_extend) + noisy.verify(tree.nodes)
            assert float(predicted) == pytest.approx(exact.total_s / REFERENCE_S, rel=0.06)
    error = noisy.drafts["head"].heldout_error
    assert error is not None
    assert 0 < error.median <= error.p90 < 0.1


def test_a_single_token_has_its_own_intercept_and_the_rest_is_monotone() -> None:
    noisy = model(noise=0.3)
    assert float(noisy.verify(0)) == pytest.approx(1.0, abs=0.15)
    costs = noisy.verify(np.arange(1, 2 * noisy.max_nodes))
    assert np.all(np.diff(costs) >= 0)


def test_a_single_token_may_cost_more_than_several() -> None:
    rng = np.random.default_rng(0)
    cheap = [
        RoundTime(**{**vars(t), "verify_s": 0.7 * t.verify_s}) if t.n_nodes else t
        for t in probes(rng)
    ]
    assert float(CostModel(cheap, {}).verify(0)) == pytest.approx(1.0)
    assert float(CostModel(cheap, {}).verify(1)) == pytest.approx(0.91)


def test_sizes_that_were_timed_cost_what_was_timed() -> None:
    exact = model()
    for n_nodes in (0, *VERIFY_PROBES):
        assert float(exact.verify(n_nodes)) == pytest.approx(verify_cost(n_nodes))


def test_the_largest_size_that_was_timed_is_known() -> None:
    exact = model()
    assert exact.max_nodes == VERIFY_PROBES[-1]
    assert exact.summary("head").valid["nodes"] == (1.0, float(VERIFY_PROBES[-1]))


def test_rounds_that_do_not_fit_the_model_give_a_large_error_on_trees_left_out() -> None:
    rng = np.random.default_rng(0)
    odd = [
        RoundTime(
            **{**vars(t), "levels_s": t.levels_s + (0.05 if t.tree.width == 1 else 0.0)}
            | {"total_s": t.total_s + (0.05 if t.tree.width == 1 else 0.0)}
        )
        for t in rounds(rng)
    ]
    error = CostModel(probes(rng), {"head": odd}).drafts["head"].heldout_error
    assert error is not None
    assert error.p90 > 0.1


def test_too_few_trees_to_leave_one_out_claim_no_error() -> None:
    rng = np.random.default_rng(0)
    few = CostModel(probes(rng), {"head": rounds(rng, TREES[: HELD_OUT_EVERY - 1])})
    assert few.drafts["head"].heldout_error is None
    assert few.summary("head").heldout_error is None


def replayed(depths: list[int], n_nodes: list[int], n_emitted: list[int]) -> ReplayedRounds:
    return ReplayedRounds(*(np.array(column) for column in (depths, n_nodes, n_emitted)))


def test_plain_rounds_cost_one_whatever_the_draft_costs() -> None:
    exact = model()
    plain = replayed([0, 0, 0], [0, 0, 0], [1, 1, 1])
    assert exact.round_times("head", PLAIN, plain).tolist() == [1.0, 1.0, 1.0]
    prediction = exact.predict("head", PLAIN, [plain])
    assert (prediction.tau, prediction.break_even_tau, prediction.decode_speedup) == (1, 1, 1)


def test_a_prediction_equals_hand_arithmetic() -> None:
    exact = model()
    tree = TreeConfig(depth=3, width=2, top_k=2, nodes=6)
    # Two texts; the last round of the first has no budget left for a tree.
    texts = [replayed([3, 3, 0], [6, 6, 0], [3, 1, 1]), replayed([3], [6], [4])]
    draft = LEVELS_BASE + 2 * (LEVEL + 2 * LEVEL_NODE) + COMMIT + EXTEND_BASE
    speculative = draft + verify_cost(6)
    # The extend pass runs over what the round before emitted; the first over its own.
    by_hand = [
        speculative + 3 * EXTEND_TOKEN,
        speculative + 3 * EXTEND_TOKEN,
        1.0,
        speculative + 4 * EXTEND_TOKEN,
    ]
    prediction = exact.predict("head", tree, texts)
    assert exact.round_times("head", tree, texts[0]).tolist() == pytest.approx(by_hand[:3])
    assert prediction.tau == pytest.approx(9 / 4)
    assert prediction.break_even_tau == pytest.approx(sum(by_hand) / 4)
    assert prediction.decode_speedup == pytest.approx(9 / sum(by_hand))


def test_a_text_without_a_round_changes_nothing() -> None:
    exact = model()
    tree = TreeConfig.chain(2)
    text = replayed([2, 2], [2, 2], [2, 3])
    assert exact.predict("head", tree, [text, replayed([], [], [])]) == exact.predict(
        "head", tree, [text]
    )


def test_the_tables_of_a_profile_give_the_same_round_time() -> None:
    exact = model()
    summary = exact.summary("head")
    tables = {table.name: table for table in summary.tables}

    def at(name: str, x: float) -> float:
        return float(np.interp(x, tables[name].x, tables[name].relative))

    from_tables = at("extend", 2) + at("grow", 1) + 3 * at("level", 4) + at("commit", 1)
    from_tables += at("verify", 16)
    tree = TreeConfig(depth=4, width=4, top_k=4, nodes=16)
    direct = float(exact.drafts["head"].round(tree, 2) + exact.verify(16))
    assert from_tables == pytest.approx(direct, rel=1e-5)
    assert summary.reference_ms == pytest.approx(1e3 * exact.reference_s, rel=1e-5)
