"""Trees for several prompts at a time: how they are chosen, proved and written down."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotune.batches.proving
import autotune.batches.trying
import autotune.proving
import autotune.racing
import autotune.report.page
import autotune.serving
import toy_what_if
from autotune import Settings, tune
from autotune.batches.blocks import batches_of
from autotune.batches.costs import with_batches
from autotune.batches.proving import SizeProof, judged, prove_sizes
from autotune.batches.schedule import BatchResults
from autotune.batches.trying import SizeTimes, larger_sizes, trees_for_batches
from autotune.candidates import Candidate
from autotune.commands.cli import parser
from autotune.cost import Prediction
from autotune.holdout import PairedTimes, judge
from autotune.job import Job, Models, prepare
from autotune.plan import Pace, plan_of
from autotune.progress import Silent
from autotune.what_if import what_if
from autotune.what_if.pricing import Conditions, plain_price
from autotune.what_if.scenario import Scenario
from engine.decode import DecodeStats
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedBatch, ForcedRun, run_forced, run_forced_batch
from engine.guard import Guard
from engine.pair import load_target
from engine.trace import Trace
from pairs import save_cycle, write_prompts
from profiles import (
    PLAIN,
    CostModelSummary,
    GuardSettings,
    Profile,
    Serving,
    TreeConfig,
    load,
    load_measurements,
    measurements_path,
)
from profiles.errors import UsageError
from profiles.prices import Prices

CHAIN = TreeConfig.chain(2)
SETTINGS = Settings(
    n_tune=8,
    n_holdout=12,
    n_race=3,
    n_replay=4,
    max_new_tokens=14,
    n_trials=4,
    n_probe_rounds=1,
    max_nodes=6,
    max_depth=3,
    max_lookup_depth=4,
    batch_sizes=(1, 4, 2),
)


def answer(name: str, n: int) -> list[Trace]:
    return [Trace(name, [1, 2, 3], list(range(n))), Trace(f"{name}.1", [1], [2])]


def test_batches_are_of_one_length_and_share_no_answer() -> None:
    conversations = [answer(str(i), n) for i, n in enumerate((9, 30, 8, 31, 5, 7, 20))]
    batches = batches_of(conversations, 2)
    assert [[trace.id for trace in batch] for batch in batches] == [
        ["3", "1"],
        ["6", "0"],
        ["2", "5"],
    ]
    assert [[len(trace.generated) for trace in batch] for batch in batches] == [
        [30, 30],
        [9, 9],
        [7, 7],
    ]
    assert batches[0][0].generated == list(range(30))
    assert batches_of(conversations, 7) == []  # one answer is too short to time


def ran(seconds: float, n_rows: int = 2, tau: float = 1.0, n_nodes: int = 0) -> ForcedBatch:
    """Return a batch of 13 tokens a row, 12 of them from rounds, that took so long."""
    n_rounds = round(12 / tau)
    return ForcedBatch(
        total_s=seconds,
        decode_s=seconds,
        n_tokens=13 * n_rows,
        n_round_tokens=12 * n_rows,
        n_rounds=n_rounds,
        n_row_rounds=n_rounds * n_rows,
        n_nodes=n_nodes * n_rounds * n_rows,
    )


def tried(size: int, ratio: float) -> SizeTimes:
    """Return times of tune prompts on which the chain is `ratio` times as fast as plain."""
    single = ForcedRun(0.6, 0.6, 13, DecodeStats(n_rounds=12, n_round_tokens=12))
    return SizeTimes(
        size,
        single=[single] * 3,
        plain=[(ran(1.0, size), ran(1.0, size))] * 3,
        trees={
            TreeConfig.chain(1): [ran(9.0, size)] * 3,
            CHAIN: [ran(1 / ratio, size, 2.0, 2)] * 3,
        },
    )


def proof(size: int, ratios: Sequence[float]) -> SizeProof:
    """Return the judgement on batches with such speedups."""
    return judged(
        size,
        CHAIN,
        [[(ran(r, size), ran(r, size)), (ran(1.0, size), ran(1.0, size))] for r in ratios],
    )


GOOD, BAD, FEW = (1.4, 1.5, 1.6, 1.5), (1.4, 0.6, 1.0, 1.1), (1.5, 1.51)


def test_a_size_is_proved_by_enough_batches_that_agree() -> None:
    assert proof(2, GOOD).is_faster
    assert not proof(2, BAD).is_faster
    assert not proof(8, FEW).is_faster  # however clear, two batches prove nothing
    assert not proof(2, GOOD[:3]).is_faster  # 6 prompts are fewer than 8
    assert not proof(2, ()).is_faster
    evidence = proof(2, GOOD).evidence
    assert evidence is not None
    assert evidence.ratio == pytest.approx(1.5)
    assert (evidence.worst_batch, evidence.batches, evidence.rows) == (1.4, 4, 2)
    assert 1 < evidence.low < 1.5
    assert evidence.plain_tokens_per_s == pytest.approx(26 * 4 / sum(GOOD), rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "proofs", "expected", "reason"),
    [
        ([(2, 1.5), (4, 1.2)], [GOOD, GOOD], ["2", "3 to 4", "5 and more"], "not measured"),
        ([(2, 1.5), (4, 1.2)], [GOOD, BAD], ["2", "3 and more"], "Not proved faster"),
        ([(2, 1.5), (4, 1.2)], [GOOD, FEW], ["2", "3 and more"], "2 batches of 4 .* hold out 12"),
        ([(2, 1.5), (4, 0.9)], [GOOD], ["2", "3 and more"], "No tree was faster on 4 .*0.900x"),
        ([(2, 0.9), (4, 1.5)], [], ["2 and more"], "No tree was faster on 2"),
        ([(4, 1.5), (8, 1.5)], [GOOD], ["2 to 4", "5 and more"], "fewer than 8 prompts were held"),
        ([], [], [], ""),
    ],
)
def test_ranges_end_at_measured_sizes_and_are_plain_beyond(
    sizes: list[tuple[int, float]],
    proofs: list[tuple[float, ...]],
    expected: list[str],
    reason: str,
) -> None:
    times = [tried(*each) for each in sizes]
    results = BatchResults(
        times, [proof(t.size, ratios) for t, ratios in zip(times, proofs, strict=False)]
    )
    schedule = results.schedule
    assert [each.label() for each in schedule] == expected
    assert all(each.tree == CHAIN for each in schedule[:-1])
    if schedule:
        assert schedule[-1].decision == "plain"
        assert re.search(reason, schedule[-1].reason)


def test_sizes_without_prompts_are_said_to_be_unmeasured() -> None:
    (only,) = BatchResults([SizeTimes(64)], []).schedule
    assert only.reason == "Not measured: there are fewer than 64 tune prompts."


def test_sizes_that_do_not_fit_the_memory_are_said_to_be_unmeasured(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree, n: n + 0.05 * tree.nodes)
    monkeypatch.setattr(SpeculativeDecoder, "rows_that_fit", lambda self, n_tokens: 3)
    small, large = run_job(folders, tmp_path / "cycle.yaml").batch_schedule
    assert small.label() == "2"
    assert large.reason == "Not measured: the memory holds 3 prompts at a time, not 4."


def test_trees_for_batches_get_smaller_from_the_leader_on() -> None:
    leader = TreeConfig(depth=6, width=2, top_k=2, nodes=12)
    shallow = TreeConfig(depth=2, width=2, top_k=2, nodes=4)
    prediction = Prediction(tau=2.0, break_even_tau=1.0)
    measured = [
        Candidate("head", tree, prediction)
        for tree in (leader, shallow, TreeConfig.chain(4), PLAIN)
    ]
    other = Candidate("lookup", TreeConfig.chain(9), prediction)
    trees = trees_for_batches(measured[0], [*measured, other])
    assert trees[0] == leader
    assert {shallow, TreeConfig.chain(4), TreeConfig.chain(2)} <= set(trees)
    assert TreeConfig.chain(9) not in trees
    assert all(tree.nodes <= 12 and not tree.is_plain for tree in trees)
    assert len(set(trees)) == len(trees) <= 6


@pytest.mark.parametrize("sizes", [(0,), (1, 513), (-2,)])
def test_batch_sizes_out_of_range_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="batch_sizes must be from 1 to 512"):
        Settings(batch_sizes=sizes)


def test_one_is_always_among_the_sizes() -> None:
    assert larger_sizes(Settings()) == []
    assert larger_sizes(Settings(batch_sizes=(8, 1, 2, 8))) == [2, 8]


# Prices


def test_what_if_gives_the_measured_times_of_a_batch(tmp_path: Path) -> None:
    """At a measured size a plain round takes what it took, between sizes something between."""
    costs = toy_what_if.costs()
    known = with_batches(costs, [tried(2, 1.5), tried(4, 1.2)], 100.0)
    assert known.valid["batch"] == (1.0, 4.0)
    context = 100 + 13 / 2
    for size in (2, 4):
        conditions = Conditions(100, 13, context, Scenario(batch=size))
        # A batch took 1 s for 12 rounds, a single prompt 0.6 s: 5/3 of a plain token's price.
        expected = Prices(costs).plain(context) * 1.0 / 0.6
        assert plain_price(Prices(known), conditions) == pytest.approx(expected, rel=1e-5)
    path = toy_what_if.write(tmp_path, cost_model=known.model_dump())
    asked = {n: what_if(path, {"batch": n}).answers[0] for n in (1, 2, 3, 4, 8)}
    assert asked[2].plain_ms == pytest.approx(20 / 0.6, rel=0.02)
    assert not [flag for n in (1, 2, 4) for flag in asked[n].flags if "batch" in flag]
    assert any("lies between" in flag for flag in asked[3].flags)
    assert any("8 is above the 4 measured" in flag for flag in asked[8].flags)
    assert min(asked[2].plain_ms, asked[4].plain_ms) <= asked[3].plain_ms + 1e-6
    unknown = what_if(toy_what_if.write(tmp_path, "other"), {"batch": 2}).answers[0]
    assert any("batches were not measured" in flag for flag in unknown.flags)


def test_nothing_measured_changes_no_price() -> None:
    costs = toy_what_if.costs()
    assert with_batches(costs, [], 100.0) is costs
    assert with_batches(costs, [SizeTimes(4)], 100.0) is costs


# Whole jobs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("batches")
    cycle, prompts = save_cycle(base / "cycle"), write_prompts(base / "prompts.jsonl", 20)
    return {"target": str(cycle), "prompts": str(prompts)}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])


BatchPrice = Callable[[TreeConfig, int], float]


def fixed_times(monkeypatch: pytest.MonkeyPatch, price: BatchPrice) -> list[tuple[int, bool]]:
    """Let a round cost what `price` says of its tree and rows; return the batches as they run."""
    seen: list[tuple[int, bool]] = []

    def single(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
        done = run_forced(decoder, trace)
        seconds = 1e-3 * done.stats.n_rounds * price(decoder.tree, 1)
        done.stats.prefill_s = 1e-3
        return ForcedRun(seconds + 1e-3, seconds, done.n_tokens, done.stats)

    def batch(decoder: SpeculativeDecoder, traces: Sequence[Trace]) -> ForcedBatch:
        seen.append((len(traces), decoder.tree.is_plain))
        done = run_forced_batch(decoder, traces)
        seconds = 1e-3 * done.n_rounds * price(decoder.tree, len(traces))
        return replace(done, total_s=seconds + 1e-3, decode_s=seconds)

    def unlimited(job: Job, rung: Candidate, cost_model: CostModelSummary) -> Serving:
        return Serving(cost_model, GuardSettings())

    monkeypatch.setattr(Guard, "speculates", lambda *_, **__: True)
    monkeypatch.setattr(autotune.serving, "fixed_serving", unlimited)
    for module in (autotune.racing, autotune.proving, autotune.batches.trying):
        monkeypatch.setattr(module, "run_forced", single)
    for module in (autotune.batches.trying, autotune.batches.proving):
        monkeypatch.setattr(module, "run_forced_batch", batch)
    for module in (autotune.proving, autotune.batches.proving):
        monkeypatch.setattr(module, "pace_of", lambda _, pass_s: pass_s)
    return seen


def run_job(folders: dict[str, str], out: Path, **changes: Any) -> Profile:
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    return tune(models, folders["prompts"], out, settings=replace(SETTINGS, **changes))


def test_a_job_schedules_the_batches_that_pay_and_serves_them(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nodes are free up to two rows and dear with four, so that four decode plainly."""
    seen = fixed_times(monkeypatch, lambda tree, n: n + (0.05 if n < 4 else 3.0 * n) * tree.nodes)
    out = tmp_path / "cycle.yaml"
    profile = run_job(folders, out)
    assert load(out) == profile
    assert profile.decision == "speculate"
    small, large = profile.batch_schedule
    assert (small.label(), small.decision) == ("2", "speculate")
    assert (large.label(), large.decision) == ("3 and more", "plain")
    assert "No tree was faster on 4 tune prompts" in large.reason
    assert small.evidence is not None
    assert (small.evidence.rows, small.evidence.batches) == (2, 6)
    runs = load_measurements(measurements_path(out)).batches
    assert {(run.rows, run.prompts) for run in runs} == {(2, "tune"), (4, "tune"), (2, "holdout")}
    assert seen[-4:] == [(2, True), (2, False), (2, False), (2, True)]  # A B B A
    decoder = SpeculativeDecoder.from_profile(profile)
    plain = SpeculativeDecoder(decoder.loaded)
    prompts = [f"answer {i}" for i in range(5)]
    found = decoder.generate_many(prompts, batch_size=3, max_new_tokens=20)
    alone = [plain.generate(p, max_new_tokens=20, raw=decoder.raw) for p in prompts]
    assert [g.token_ids for g in found] == [g.token_ids for g in alone]
    assert decoder.tree_of_batch(2) == small.tree
    assert decoder.tree_of_batch(3) == decoder.tree_of_batch(64) == PLAIN


def test_a_job_without_larger_batches_has_no_schedule(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fixed_times(monkeypatch, lambda tree, n: 1.0 + 0.05 * tree.nodes)
    profile = run_job(folders, tmp_path / "cycle.yaml", batch_sizes=(1,))
    assert profile.decision == "speculate"
    assert profile.batch_schedule == ()
    assert not seen


def test_where_one_prompt_is_plain_so_are_batches(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fixed_times(monkeypatch, lambda tree, n: 1.0 + 9.0 * tree.nodes)
    profile = run_job(folders, tmp_path / "cycle.yaml")
    assert profile.decision == "plain"
    assert profile.batch_schedule == ()
    assert not seen


def test_a_job_on_real_times_writes_a_schedule_of_all_batches(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """Whatever it decides: the ranges follow one another and the last is plain."""
    out = tmp_path / "cycle.yaml"
    profile = run_job(folders, out)
    if profile.decision == "speculate":
        assert profile.batch_schedule[0].first == 2
        assert profile.batch_schedule[-1].decision == "plain"
        assert profile.cost_model is not None
        assert profile.cost_model.valid["batch"] == (1.0, 4.0)


def test_judging_stops_at_the_first_size_that_is_not_proved(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fixed_times(monkeypatch, lambda tree, n: 1.0 if tree.is_plain else 9.0)
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    job = prepare(models, folders["prompts"], None, SETTINGS, Silent())
    loaded = load_target(folders["target"], dtype="float32", device="cpu")
    plain = SpeculativeDecoder(loaded)
    texts = [
        [Trace(p.id, p.token_ids, plain.generate(p.token_ids, max_new_tokens=14).token_ids)]
        for p in job.sample.holdout
    ]
    proofs = prove_sizes(job, "lookup", [tried(2, 1.5), tried(4, 1.5)], texts, Silent())
    assert [(found.size, found.is_faster) for found in proofs] == [(2, False)]
    assert {size for size, _ in seen} == {2}
    assert prove_sizes(job, "lookup", [tried(2, 0.9), tried(4, 1.5)], texts, Silent()) == []


def test_the_plan_counts_batches(folders: dict[str, str]) -> None:
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    job = prepare(models, folders["prompts"], None, SETTINGS, Silent())
    pace = Pace(0.01, 14)
    assert plan_of(job, pace, {}).seconds["batches"] > 0
    single = replace(job, settings=replace(SETTINGS, batch_sizes=(1,)))
    assert "batches" not in plan_of(single, pace, {}).seconds


def test_a_tree_that_gains_nothing_is_seldom_proved() -> None:
    """At most in 5 of 100 jobs, whatever the size; and a true 1.2x mostly is."""
    rng = np.random.default_rng(0)

    def share(ratio: float, n_batches: int, n_jobs: int = 400) -> float:
        found = 0
        for _ in range(n_jobs):
            gains = np.log(ratio) + rng.normal(0, 0.08, n_batches)
            times = PairedTimes(tuple(np.exp(gains)), (1.0,) * n_batches)
            verdict = judge(times, 1)
            found += verdict.ratio > 1 and verdict.low > 1
        return found / n_jobs

    for n_batches in (3, 4, 8):
        assert share(1.0, n_batches) <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    assert share(1.2, 4) > 0.8


def test_the_command_takes_sizes_between_commas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--target", "demo", "--prompts", "x.jsonl", "--batch-sizes"]
    assert parser().parse_args([*words, "1,2,4"]).batch_sizes == (1, 2, 4)
    for wrong in ("1,two", "", "1,,2"):
        with pytest.raises(SystemExit) as stop:
            parser().parse_args([*words, wrong])
        assert stop.value.code == 2
        assert f"invalid list of whole numbers value: {wrong!r}" in capsys.readouterr().err
