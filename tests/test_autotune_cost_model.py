"""The cost model: what the fit recovers, what it may never do, and hand arithmetic."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from autotune.cost import CostModel
from autotune.cost.fitting import MIN_LEFT_OUT, Line
from engine.contexts import N_NODES, ContextTime
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
    exact = model()
    cost = exact.drafts["head"]
    assert cost.extend.base == pytest.approx(EXTEND_BASE, rel=1e-6)
    assert cost.extend.slope == pytest.approx(EXTEND_TOKEN, rel=1e-6)
    assert cost.grow == pytest.approx(LEVELS_BASE, rel=1e-6)
    assert cost.level.base == pytest.approx(LEVEL, rel=1e-6)
    assert cost.level.slope == pytest.approx(LEVEL_NODE, rel=1e-6)
    assert cost.commit == pytest.approx(COMMIT, rel=1e-6)
    error = exact.heldout_error("head")
    assert error is not None
    assert error.p90 < 1e-6


def test_sizes_of_one_have_their_own_price_in_every_part() -> None:
    """A single row runs on kernels of its own; the line of the others must not bend for it."""
    rng = np.random.default_rng(0)
    odd = [
        replace(
            t,
            extend_s=t.extend_s * (2 if t.n_extend == 1 else 1),
            levels_s=t.levels_s + 0.1 * t.reference_s * (t.tree.depth - 1) * (t.tree.width == 1),
        )
        for t in rounds(rng)
    ]
    cost = CostModel(probes(rng), {"head": odd}).drafts["head"]
    assert float(cost.extend(1)) == pytest.approx(2 * (EXTEND_BASE + EXTEND_TOKEN), rel=1e-6)
    assert float(cost.extend(3)) == pytest.approx(EXTEND_BASE + 3 * EXTEND_TOKEN, rel=1e-6)
    assert float(cost.level(1)) == pytest.approx(LEVEL + LEVEL_NODE + 0.1, rel=1e-6)
    assert float(cost.level(4)) == pytest.approx(LEVEL + 4 * LEVEL_NODE, rel=1e-6)


def test_a_line_is_never_negative_and_never_falls() -> None:
    line = Line.fit([10, 20, 30], [0.1, 1.0, 2.2])
    assert float(line(1)) == 0.0
    assert np.all(np.diff(line(np.arange(1, 50))) >= 0)


def test_the_first_extend_pass_of_a_text_is_priced_apart() -> None:
    rng = np.random.default_rng(0)
    firsts = [
        replace(round_time(TreeConfig.chain(1), n, 1), extend_s=0.003 * n * REFERENCE_S)
        for n in (80, 120, 200)
    ]
    firsts = [replace(t, is_first=True) for t in firsts]
    cost = CostModel(probes(rng), {"head": [*rounds(rng), *firsts]}).drafts["head"]
    assert float(cost.prefill(100)) == pytest.approx(0.3, rel=1e-3)
    assert float(cost.extend(3)) == pytest.approx(EXTEND_BASE + 3 * EXTEND_TOKEN, rel=1e-6)


PLAIN_CONTEXT, NODE_CONTEXT = 1e-4, 1e-5


def context_times(base_context: int) -> list[ContextTime]:
    """Return passes that cost 1 at the given context, and more behind longer ones."""
    return [
        ContextTime(
            context,
            n,
            REFERENCE_S
            * (
                (1.0 if n == 0 else 1.3)
                + (context - base_context) * (PLAIN_CONTEXT + n * NODE_CONTEXT)
            ),
        )
        for context in (64, 1024)
        for n in (0, N_NODES)
        for _ in range(3)
    ]


def test_a_longer_context_costs_what_was_timed_and_the_range_is_stated() -> None:
    rng = np.random.default_rng(0)
    exact = CostModel(probes(rng), {"head": rounds(rng)}, context_times(100))
    assert float(exact.plain(100)) == pytest.approx(1.0)
    assert float(exact.plain(600)) == pytest.approx(1 + 500 * PLAIN_CONTEXT)
    longer = verify_cost(16) + 500 * (PLAIN_CONTEXT + 16 * NODE_CONTEXT)
    assert float(exact.verify(16, 600)) == pytest.approx(longer)
    assert float(exact.verify(16)) == pytest.approx(verify_cost(16))
    assert exact.summary("head").valid["context"] == (64, 1024)


def test_rounds_behind_long_contexts_do_not_make_the_staircase_steeper() -> None:
    rng = np.random.default_rng(0)
    far = []
    for t in probes(rng):
        extra = 500.0 if t.n_nodes == 24 else 0.0
        factor = 1 + extra * PLAIN_CONTEXT
        verify_s = t.verify_s + extra * t.reference_s * (PLAIN_CONTEXT + t.n_nodes * NODE_CONTEXT)
        reference_s = t.reference_s * factor  # plain rounds beside it slow down as well
        far.append(
            replace(t, context=100 + int(extra), verify_s=verify_s, reference_s=reference_s)
        )
    exact = CostModel(far, {}, context_times(100))
    assert float(exact.verify(24)) == pytest.approx(verify_cost(24))


def test_the_fit_predicts_every_round_within_the_noise_of_its_medians() -> None:
    noisy = model(noise=0.1)
    for tree in TREES:
        for n_extend in (1, tree.depth + 1):
            exact = round_time(tree, n_extend, tree.nodes)
            predicted = noisy.drafts["head"].round(tree, n_extend) + noisy.verify(tree.nodes)
            assert float(predicted) == pytest.approx(exact.total_s / REFERENCE_S, rel=0.06)
    error = noisy.heldout_error("head")
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
    error = CostModel(probes(rng), {"head": odd}).heldout_error("head")
    assert error is not None
    assert error.p90 > 0.1


def test_too_few_trees_to_leave_one_out_claim_no_error() -> None:
    rng = np.random.default_rng(0)
    few = CostModel(probes(rng), {"head": rounds(rng, TREES[: MIN_LEFT_OUT - 1])})
    assert few.heldout_error("head") is None
    assert few.summary("head").heldout_error is None


def replayed(depths: list[int], n_nodes: list[int], n_emitted: list[int]) -> ReplayedRounds:
    return ReplayedRounds(*(np.array(column) for column in (depths, n_nodes, n_emitted)))


def test_plain_rounds_cost_one_whatever_the_draft_costs() -> None:
    exact = model()
    plain = replayed([0, 0, 0], [0, 0, 0], [1, 1, 1])
    assert exact.round_times("head", PLAIN, plain, 50).tolist() == [1.0, 1.0, 1.0]
    prediction = exact.predict("head", PLAIN, [plain], [50])
    assert (prediction.tau, prediction.break_even_tau, prediction.decode_speedup) == (1, 1, 1)


def test_a_prediction_equals_hand_arithmetic() -> None:
    exact = model()
    tree = TreeConfig(depth=3, width=2, top_k=2, nodes=6)
    # Two texts; the last round of the first has no budget left for a tree.
    texts = [replayed([3, 3, 0], [6, 6, 0], [3, 1, 1]), replayed([3], [6], [4])]
    draft = LEVELS_BASE + 2 * (LEVEL + 2 * LEVEL_NODE) + COMMIT + EXTEND_BASE
    speculative = draft + verify_cost(6)
    # The extend pass runs over what the round before emitted; the first over the prompt.
    by_hand = [
        speculative + 50 * EXTEND_TOKEN,
        speculative + 3 * EXTEND_TOKEN,
        1.0,
        speculative + 70 * EXTEND_TOKEN,
    ]
    prediction = exact.predict("head", tree, texts, [50, 70])
    assert exact.round_times("head", tree, texts[0], 50).tolist() == pytest.approx(by_hand[:3])
    assert prediction.tau == pytest.approx(9 / 4)
    assert prediction.break_even_tau == pytest.approx(sum(by_hand) / 4)
    assert prediction.decode_speedup == pytest.approx(9 / sum(by_hand))


def test_a_text_without_a_round_changes_nothing() -> None:
    exact = model()
    tree = TreeConfig.chain(2)
    text = replayed([2, 2], [2, 2], [2, 3])
    assert exact.predict("head", tree, [text, replayed([], [], [])], [50, 9]) == exact.predict(
        "head", tree, [text], [50]
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
