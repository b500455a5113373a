"""What-if answers against hand arithmetic on a profile whose figures are known by formula."""

from pathlib import Path

import pytest

import toy_profiles
import toy_what_if
from autotune.what_if import what_if
from autotune.what_if.acceptance import rates_of, static_tau
from autotune.what_if.basis import basis_of_numbers, basis_of_profile
from autotune.what_if.hardware import achieved
from profiles import CostTable, ErrorSummary
from profiles.errors import SpectuneError, UsageError

T4 = Path(__file__).parent.parent / "examples" / "what_if"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_what_if.write(tmp_path_factory.mktemp("toy"))


def speedups(answers: object) -> list[float]:
    return [answer.decode_speedup for answer in answers.answers]  # type: ignore[attr-defined]


def test_an_unchanged_profile_gives_the_replayed_figures(toy: Path) -> None:
    (answer,) = what_if(toy).answers
    score = next(
        s for s in toy_what_if.scores(toy_what_if.ACCEPTANCE) if s.tree == toy_what_if.TREE
    )
    assert answer.tau.is_replayed
    assert answer.tau.value == score.tau
    assert answer.decode_speedup == pytest.approx(score.predicted_speedup, rel=1e-4)
    assert answer.plain_ms == 20.0
    assert answer.round.levels == pytest.approx(20 * (0.02 + 2 * 0.1))
    assert answer.round.verify == pytest.approx(20 * 1.1, rel=1e-4)
    assert answer.round.extend == pytest.approx(20 * (0.09 + 0.01 * score.tau))
    assert answer.tokens_per_s == pytest.approx(1e3 * score.tau / answer.round.total)
    assert answer.break_even_tau == pytest.approx(answer.round.total / 20)
    assert answer.error == 0.05  # the round's only: tau is exact
    low, high = answer.interval or (0, 0)
    assert low < answer.decode_speedup < high


def test_depth_zero_is_exactly_one_whatever_else_is_asked(toy: Path) -> None:
    changes = {"batch": 8, "compute": "3x", "fixed_overhead": 5, "acceptance": 0.1}
    (answer,) = what_if(toy, {"depth": 0} | changes).answers
    assert answer.decode_speedup == answer.end_to_end_speedup == answer.break_even_tau == 1.0
    assert answer.interval == (1.0, 1.0)


@pytest.mark.parametrize("draft", ["toy/head", "lookup"])
def test_acceptance_zero_is_below_one_at_every_depth(toy: Path, draft: str) -> None:
    answers = what_if(toy, {"acceptance": 0, "draft": draft}, sweep={"depth": "1:10"})
    assert all(answer.tau.value == 1.0 for answer in answers.answers)
    assert max(speedups(answers)) < 1.0


def test_a_tree_that_was_not_replayed_is_approximate_with_the_tables_own_error(toy: Path) -> None:
    (answer,) = what_if(toy, {"nodes": 9}).answers
    assert not answer.tau.is_replayed
    # The toy's scores follow the correction's own law, so tables miss them by rounding only.
    assert answer.tau.error is not None
    assert answer.tau.error.p90 < 1e-4
    table = static_tau(rates_of(toy_what_if.ACCEPTANCE), answer.tree)
    assert answer.tau.value == pytest.approx(1 + 0.9 * (table - 1) ** 1.1, rel=1e-3)
    assert any("approximate" in flag for flag in answer.flags)


def test_hypothetical_acceptance_is_continuous_and_monotone(toy: Path) -> None:
    (real,) = what_if(toy).answers
    factors = [0.0, 0.5, 0.999999, 1.0, 1.2]
    answers = what_if(toy, sweep={"acceptance": factors}).answers
    taus = [answer.tau.value for answer in answers]
    assert taus == sorted(taus)
    assert taus[2] == pytest.approx(real.tau.value, rel=1e-4)
    assert [answer.tau.is_replayed for answer in answers] == [False, False, False, True, False]
    assert taus[1] - 1 < 0.5 * (real.tau.value - 1)  # every path has at least one halved rate


def test_another_profiles_acceptance_is_taken_from_its_tables(toy: Path, tmp_path: Path) -> None:
    poor = toy_what_if.ACCEPTANCE.model_copy(update={"tried": (4000, 2000, 1000)})
    other = toy_what_if.write(
        tmp_path, "other", acceptance=[poor], scores=toy_what_if.scores(poor)
    )
    (answer,) = what_if(toy, {"acceptance": str(other)}).answers
    assert not answer.tau.is_replayed
    (exact,) = what_if(other).answers
    assert answer.tau.value == pytest.approx(exact.tau.value, rel=1e-3)
    with pytest.raises(UsageError, match="knows toy/head"):
        what_if(toy, {"acceptance": str(other), "draft": "lookup"})


def test_factors_on_costs_act_on_their_own_part(toy: Path) -> None:
    (base,) = what_if(toy).answers
    (draft,) = what_if(toy, {"draft_cost": 2}).answers
    assert draft.round.extend == pytest.approx(2 * base.round.extend)
    assert draft.round.levels == pytest.approx(2 * base.round.levels)
    assert draft.round.verify == base.round.verify
    (verify,) = what_if(toy, {"verify_cost": 0.5}).answers
    assert verify.round.verify == pytest.approx(0.5 * base.round.verify)
    assert verify.plain_ms == base.plain_ms
    (fixed,) = what_if(toy, {"fixed_overhead": 3}).answers
    assert fixed.round.total == pytest.approx(base.round.total + 3)


def test_a_bandwidth_bound_pair_gains_nothing_from_compute_and_keeps_its_ratio(
    toy: Path,
) -> None:
    (base,) = what_if(toy).answers
    (faster,) = what_if(toy, {"memory_bandwidth": "2x", "compute": "2x"}).answers
    assert faster.plain_ms == pytest.approx(base.plain_ms / 2)
    assert faster.round.verify == pytest.approx(base.round.verify / 2)
    assert faster.round.commit == base.round.commit  # the host's
    (compute,) = what_if(toy, {"compute": "100x"}).answers
    assert compute.plain_ms == pytest.approx(base.plain_ms)
    (slow,) = what_if(toy, {"compute": "0.1x"}).answers
    assert slow.decode_speedup < base.decode_speedup


def test_sizes_scale_passes_and_say_so(toy: Path) -> None:
    (base,) = what_if(toy).answers
    (twice,) = what_if(toy, {"target_size": 2000}).answers  # the toy's target has 1000 weights
    assert twice.plain_ms == pytest.approx(2 * base.plain_ms)
    assert twice.round.levels == base.round.levels
    assert twice.decode_speedup > base.decode_speedup
    assert any("acceptance is left" in flag for flag in twice.flags)
    (head,) = what_if(toy, {"draft_size": "3x"}).answers
    assert head.round.levels == pytest.approx(3 * base.round.levels)


def test_gains_fall_with_the_batch_and_are_flagged_beyond_the_measured(toy: Path) -> None:
    answers = what_if(toy, sweep={"batch": [1, 2, 4, 8, 16]})
    falling = speedups(answers)
    assert falling == sorted(falling, reverse=True)
    assert not answers.answers[0].flags or "batch" not in answers.answers[0].flags[0]
    assert any("72 tokens is above the 65" in flag for flag in answers.answers[3].flags)


def test_a_short_answer_gains_less_end_to_end(toy: Path) -> None:
    answers = what_if(toy, sweep={"output_length": [1, 16, 256]}).answers
    total = [answer.end_to_end_speedup for answer in answers]
    assert total[0] == 1.0
    assert total[1] < total[2] < answers[2].decode_speedup
    assert any("outside" in flag for flag in what_if(toy, {"context": 9000}).answers[0].flags)


def test_the_drafts_prefill_counts_into_the_decode_speedup(tmp_path: Path) -> None:
    tables = [
        *toy_what_if.costs().tables,
        CostTable(name="prefill", x=[100.0, 200.0], relative=[1.0, 2.0]),
    ]
    costs = toy_what_if.costs(tables=tables)
    path = toy_what_if.write(tmp_path, cost_model=costs.model_dump(), scores=[])
    short, long = what_if(path, sweep={"output_length": [16, 512]}).answers
    assert short.round.prefill > 10 * long.round.prefill > 0
    assert short.decode_speedup < long.decode_speedup


def test_two_sweeps_give_a_grid_without_impossible_trees(toy: Path) -> None:
    grid = what_if(toy, sweep={"depth": "1:4", "nodes": [2, 8]})
    trees = [(a.tree.depth, a.tree.nodes) for a in grid.answers]
    assert trees == [(1, 2), (2, 2), (2, 8), (3, 8), (4, 8)]
    assert "3 impossible trees are left out" in grid.notes[-1]
    frame = grid.to_frame()
    assert list(frame["depth"]) == [1, 2, 2, 3, 4]
    assert {"tau", "verify_ms", "tokens_per_s", "break_even_tau"} <= set(frame.columns)


def test_nodes_follow_depth_unless_they_are_asked_for(toy: Path) -> None:
    answers = what_if(toy, sweep={"depth": "1:10"}).answers
    assert [a.tree.nodes for a in answers] == [3, 8, 8, 8, 8, 8, 8, 8, 9, 10]


def test_a_plain_profile_starts_from_the_tree_that_came_nearest(tmp_path: Path) -> None:
    path = toy_what_if.write(tmp_path, **(toy_profiles.PLAIN_CHANGES | {"alternatives": []}))
    assert speedups(what_if(path)) == [1.0]
    (answer,) = what_if(path, {"depth": 2}).answers
    assert answer.tree.depth == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depth": 9, "nodes": 3}, "depth 9 needs at least 9 nodes"),
        ({"draft": "nobody"}, "must be one of toy/head, lookup"),
        ({"acceptance": "nowhere.yaml"}, "does not exist"),
        ({"memory_bandwidth": "Abacus"}, "has none; give one of"),
        ({"draft_size": "2x", "draft": "lookup"}, "draft with weights"),
        ({"colour": 3}, "must be one of depth"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    toy: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(SpectuneError, match=says) as refusal:
        what_if(toy, changes)
    assert "\n" not in str(refusal.value)


def test_a_profile_without_a_cost_model_or_with_lost_measurements_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpectuneError, match="must hold a cost model"):
        what_if(toy_what_if.write(tmp_path, cost_model=None))
    path = toy_what_if.write(tmp_path, "lost")
    path.with_name("lost.measurements.json.gz").unlink()
    with pytest.raises(SpectuneError, match="does not exist"):
        what_if(path)


def test_a_device_without_a_sheet_is_described_by_what_it_achieved(toy: Path) -> None:
    basis = basis_of_profile(toy)
    reached = achieved(basis, basis.draft(None))
    assert reached["memory_bandwidth"] == pytest.approx(1e-9 * 2 * 1000 / 0.020)
    # Slope of the verify table's upper half: 0.0625 reference passes a token.
    assert reached["compute"] == pytest.approx(2e-12 * 1000 / (0.0625 * 0.020), rel=0.1)
    (answer,) = what_if(toy, {"memory_bandwidth": "T4"}).answers
    assert answer.plain_ms < 20
    assert any("achieved" in flag for flag in answer.flags)


def test_a_device_with_a_sheet_is_compared_by_its_sheet(tmp_path: Path) -> None:
    device = {"kind": "cuda", "name": "Tesla T4", "count": 40, "memory_gib": 14.6}
    path = toy_what_if.write(tmp_path, device=device, **{"target.dtype": "float16"})
    (answer,) = what_if(path, {"memory_bandwidth": "L4", "compute": "L4"}).answers
    assert answer.plain_ms == pytest.approx(20 * 320 / 300, rel=1e-4)
    (same,) = what_if(path, {"memory_bandwidth": 320}).answers
    assert same.plain_ms == pytest.approx(20.0)


# The four findings of the article, from its three pass times and our assumptions.


def test_verifying_is_nearly_free_up_to_a_knee() -> None:
    basis = basis_of_numbers(T4 / "t4_qwen3_1.7b.yaml")
    wide = {"width": 100, "top_k": 10}
    nodes = [59, 191, 511]
    small, knee, beyond = what_if(basis, wide, sweep={"nodes": nodes}).answers
    plain = small.plain_ms
    assert plain == pytest.approx(44.7)
    assert (knee.round.verify, beyond.round.verify) == pytest.approx((51.8, 125.6), rel=1e-4)
    assert small.round.verify < 1.06 * plain
    assert (beyond.round.verify - knee.round.verify) / 320 > 5 * (knee.round.verify - plain) / 191


@pytest.mark.parametrize("file", ["t4_qwen3_1.7b.yaml", "t4_qwen3_4b.yaml"])
def test_depth_is_a_trap_where_little_is_accepted(file: str) -> None:
    basis = basis_of_numbers(T4 / file)
    atypical = {"acceptance": "atypical"}
    assert 1.04 <= speedups(what_if(basis, atypical | {"depth": 2}))[0] <= 1.10
    deep = speedups(what_if(basis, atypical, sweep={"depth": "7:10"}))
    assert max(deep) < 1.0
    assert deep == sorted(deep, reverse=True)
    assert speedups(what_if(basis, {"acceptance": "code"}))[0] == pytest.approx(2.6, abs=0.2)


def test_a_larger_target_with_a_larger_head_brings_no_leap() -> None:
    domains = {"acceptance": ["code", "chat"]}
    small = speedups(what_if(basis_of_numbers(T4 / "t4_qwen3_1.7b.yaml"), sweep=domains))
    large = speedups(what_if(basis_of_numbers(T4 / "t4_qwen3_4b.yaml"), sweep=domains))
    for one, other in zip(small, large, strict=True):
        assert 1.0 <= other / one <= 1.10  # 2.3 times the weights


def test_gains_fall_with_the_batch_on_the_t4() -> None:
    basis = basis_of_numbers(T4 / "t4_qwen3_1.7b.yaml")
    batches = what_if(basis, {"acceptance": "code"}, sweep={"batch": [1, 2, 4, 8, 16]})
    falling = speedups(batches)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 2.4
    assert falling[-1] < 1.0
    assert any(note.startswith("assumed: acceptance") for note in batches.notes)


def test_errors_of_round_and_tau_are_carried_together(toy: Path) -> None:
    basis = basis_of_profile(toy)
    table = next(iter(basis.draft(None).acceptance.values()))
    table.__dict__["error"] = ErrorSummary(median=0.05, p90=0.12)
    (answer,) = what_if(basis, {"acceptance": 0.7}).answers
    assert answer.error == pytest.approx(0.13)
