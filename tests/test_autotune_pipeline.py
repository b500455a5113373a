"""Whole tuning jobs on tiny pairs, and what a profile does where it does not belong."""

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune.job
import autotune.proving
import autotune.racing
import autotune.report.page
import autotune.serving
import engine.decoder
from autotune import Settings, tune
from autotune.candidates import Candidate
from autotune.cost import Prediction
from autotune.job import Job, Models, prepare
from autotune.plan import Pace, agree, cuts, fit_budget, plan_of
from autotune.progress import Silent
from autotune.proving import prove
from autotune.racing import ForcedTrack
from autotune.report.job_report import report_path
from autotune.study_files import study_home, study_path
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, run_forced
from engine.guard import Guard
from engine.pair import LoadedTarget, load_target
from engine.trace import Trace
from engine.trust import UntrustedProfileWarning
from pairs import (
    read,
    save,
    save_cycle,
    save_heavy,
    save_noisy_copy,
    save_target,
    small_llama,
    speculating_profile,
    write_prompts,
)
from profiles import (
    CostModelSummary,
    GuardSettings,
    Profile,
    Sampling,
    Serving,
    TreeConfig,
    load,
    load_measurements,
    measurements_path,
    sealed,
)
from profiles import (
    save as save_profile,
)
from profiles.engine_spaces import can_run
from profiles.errors import SpectuneError, UsageError

TINY = Settings(
    n_tune=3,
    n_holdout=8,
    n_race=3,
    max_new_tokens=12,
    n_trials=4,
    n_probe_rounds=1,
    max_nodes=6,
    max_depth=3,
    max_lookup_depth=4,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return target and draft folders and prompt files by name."""
    base = tmp_path_factory.mktemp("pair")
    target = save_target(base / "target")
    paths = {
        "target": target,
        "noisy": save_noisy_copy(target, base / "noisy"),
        "heavy": save_heavy(target, base / "heavy"),
        "hostile": save(small_llama(seed=7), base / "hostile"),
        "cycle": save_cycle(base / "cycle", length=3),
        "prompts": write_prompts(base / "prompts.jsonl"),
        "turns": write_prompts(base / "turns.jsonl", n_turns=2),
    }
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, str]) -> LoadedTarget:
    return load_target(folders["target"], dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out of the report: drawing takes longer than these jobs."""
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])


def run_job(
    folders: dict[str, str],
    out: Path,
    *drafts: str,
    target: str = "target",
    prompts: str = "prompts",
    resume: bool = False,
    storage: str | None = None,
    budget_s: float | None = None,
    **changes: Any,
) -> Profile:
    models = Models(folders[target], [folders.get(d, d) for d in drafts], "float32", "cpu")
    return tune(
        models,
        folders[prompts],
        out,
        settings=replace(TINY, **changes),
        resume=resume,
        storage=storage,
        budget_s=budget_s,
    )


def fixed_times(monkeypatch: pytest.MonkeyPatch, round_s: Callable[[TreeConfig], float]) -> None:
    """Let every round cost what `round_s` says, a plain round 1: no test then hangs on a clock."""

    def run(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
        done = run_forced(decoder, trace)
        seconds = 1e-3 * done.stats.n_rounds * round_s(decoder.tree)
        done.stats.prefill_s = 1e-3
        return ForcedRun(seconds + 1e-3, seconds, done.n_tokens, done.stats)

    def unlimited(job: Job, rung: Candidate, cost_model: CostModelSummary) -> Serving:
        return Serving(cost_model, GuardSettings())

    monkeypatch.setattr(Guard, "speculates", lambda *_, **__: True)
    monkeypatch.setattr(autotune.serving, "fixed_serving", unlimited)
    monkeypatch.setattr(autotune.racing, "run_forced", run)
    monkeypatch.setattr(autotune.proving, "run_forced", run)
    monkeypatch.setattr(autotune.proving, "pace_of", lambda _, pass_s: pass_s)


def check_consistent(profile: Profile, out: Path, n_trials: int) -> None:
    """Check what every finished job must have written, whatever it decided."""
    assert load(out) == profile
    beside = {out, measurements_path(out), study_path(out), report_path(out)}
    assert set(out.parent.iterdir()) == beside, "no temporary file is left"
    assert profile.search is not None
    assert profile.search.storage == study_path(out).name
    measurements = load_measurements(measurements_path(out))
    assert profile.measurements == measurements_path(out).name
    assert len(measurements.scores) == profile.search.predicted
    assert 1 <= len(measurements.measured) <= profile.search.measured <= n_trials
    if profile.decision == "speculate":
        assert profile.evidence is not None
        assert profile.evidence.speedup.is_proved
        assert profile.evidence.speedup.prompts == profile.domain.n_holdout >= 8
        assert profile.reason.startswith("Faster than plain decoding")
    else:
        assert profile.tree.is_plain
        assert profile.evidence is None
        assert profile.reason


def test_a_job_on_real_times_writes_a_whole_profile(
    folders: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "tiny.yaml"
    profile = run_job(folders, out, "lookup", "noisy")
    check_consistent(profile, out, TINY.n_trials)
    assert profile.target.id == folders["target"]
    assert profile.domain.name == "prompts"
    assert (profile.domain.n_tune, profile.domain.n_holdout) == (3, 8)
    assert profile.domain.template == "chat"
    drafts = {score.draft for score in load_measurements(measurements_path(out)).scores}
    assert {name.partition(" ")[0] for name in drafts} == {"lookup", folders["noisy"]}
    assert "lookup max_match=3" in drafts, "knobs of a draft are searched, too"


def test_a_job_where_speculation_pays_proves_it_and_serves_it(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out = tmp_path / "cycle.yaml"
    profile = run_job(folders, out, "lookup", target="cycle")
    check_consistent(profile, out, TINY.n_trials)
    assert profile.decision == "speculate"
    assert profile.evidence is not None
    assert profile.evidence.decode_speedup == pytest.approx(profile.evidence.tau / 1.1, rel=0.01)
    assert profile.evidence.speedup.low <= profile.evidence.speedup.ratio
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder = SpeculativeDecoder.from_profile(profile)
    assert decoder.tree == profile.tree
    assert decoder.stats is not None
    decoder = SpeculativeDecoder(decoder.loaded, decoder.draft, decoder.tree)  # no clock decides
    generation = decoder.generate("what comes next", max_new_tokens=40)
    plain = SpeculativeDecoder(decoder.loaded).generate("what comes next", max_new_tokens=40)
    assert generation.token_ids == plain.token_ids
    assert generation.stats.n_rounds < plain.stats.n_rounds / 1.5


def test_b23_the_speedup_follows_from_the_raw_times_beside_the_profile(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out = tmp_path / "raw.yaml"
    profile = run_job(folders, out, "lookup", target="cycle")
    judged = [profile.evidence, *(rival.evidence for rival in profile.alternatives)]
    found = {
        (evidence.speedup.ratio, evidence.speedup.worst_prompt, evidence.speedup.prompts)
        for evidence in judged
        if evidence is not None
    }
    expected = set()
    for rung in load_measurements(measurements_path(out)).holdout:
        ratios = [p / s for p, s in zip(rung.plain_ms, rung.speculative_ms, strict=True)]
        total = sum(rung.plain_ms) / sum(rung.speculative_ms)
        expected.add((total, min(ratios), len(ratios)))
        assert rung.run_noise == pytest.approx(0)  # the clock is invented
    assert expected
    assert sorted(found) == [pytest.approx(figures, rel=1e-4) for figures in sorted(expected)]


def test_b25_a_job_where_a_round_costs_too_much_is_plain_and_says_why(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1 + 2.0 * tree.depth)
    out = tmp_path / "costly.yaml"
    profile = run_job(folders, out, "lookup", "noisy", target="target")
    check_consistent(profile, out, TINY.n_trials)
    assert profile.decision == "plain"
    assert profile.reason == "No tree was faster than plain decoding on the tune prompts."


def test_b25_luck_on_the_tune_prompts_does_not_pass_the_holdout(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same trees look good in the race and are slower afterwards: the winner's curse.
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    lucky = autotune.racing.run_forced
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 20.0)
    monkeypatch.setattr(autotune.racing, "run_forced", lucky)
    profile = run_job(folders, tmp_path / "lucky.yaml", "lookup", target="cycle")
    check_consistent(profile, tmp_path / "lucky.yaml", TINY.n_trials)
    assert profile.decision == "plain"
    assert profile.reason.startswith("Not faster than plain decoding")
    assert profile.alternatives
    assert all(rival.evidence.speedup.ratio < 1 for rival in profile.alternatives)


@pytest.mark.parametrize("draft", ["hostile", "heavy"])
def test_b25_a_draft_that_cannot_pay_ends_in_plain(
    folders: dict[str, str], tmp_path: Path, draft: str
) -> None:
    profile = run_job(folders, tmp_path / "out.yaml", draft)
    check_consistent(profile, tmp_path / "out.yaml", TINY.n_trials)
    assert profile.decision == "plain"
    assert profile.draft.id == folders[draft]


def test_b25_a_machine_that_turns_busy_for_good_ends_in_plain_and_says_so(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    monkeypatch.setattr(autotune.proving, "pace_of", lambda _, pass_s: 2 * pass_s)
    profile = run_job(folders, tmp_path / "busy.yaml", "lookup", target="cycle")
    assert profile.decision == "plain"
    assert "no held-out prompt could be measured undisturbed" in profile.reason
    assert "a fixed pass took up to 2.00 times its usual time" in profile.reason
    assert profile.noise is not None
    assert (profile.noise.slowest, profile.noise.left_out) == (2.0, 8)
    assert load(tmp_path / "busy.yaml") == profile


def test_b25_a_single_prompt_is_insufficient_evidence(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    one = folders | {"prompts": str(write_prompts(tmp_path / "one.jsonl", 1))}
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "one.yaml"
    profile = run_job(one, out, "lookup", target="cycle")
    check_consistent(profile, out, TINY.n_trials)
    assert profile.decision == "plain"
    assert profile.reason.startswith("Insufficient evidence, ")


@pytest.mark.parametrize("n_holdout", [1, 5])
def test_b25_a_small_holdout_is_insufficient_evidence_and_asks_for_the_missing_prompts(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_holdout: int
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out = tmp_path / "few.yaml"
    profile = run_job(folders, out, "lookup", target="cycle", n_holdout=n_holdout)
    check_consistent(profile, out, TINY.n_trials)
    assert profile.decision == "plain"
    assert f"Insufficient evidence, about {8 - n_holdout} more prompts" in profile.reason


@pytest.mark.parametrize("max_new_tokens", [2, 5, 6])
def test_b25_very_short_answers_end_in_a_profile_or_in_one_sentence(
    folders: dict[str, str], tmp_path: Path, max_new_tokens: int
) -> None:
    out = tmp_path / "short.yaml"
    try:
        profile = run_job(folders, out, "lookup", max_new_tokens=max_new_tokens)
    except SpectuneError as error:
        assert "answers of at least" in str(error)
        assert list(tmp_path.iterdir()) == []
        assert max_new_tokens < 6
    else:
        check_consistent(profile, out, TINY.n_trials)


@pytest.mark.parametrize(
    "changes", [{"max_nodes": 1}, {"n_trials": 1}, {"max_depth": 1, "max_lookup_depth": 1}]
)
def test_the_smallest_searches_finish(
    folders: dict[str, str], tmp_path: Path, changes: dict[str, int]
) -> None:
    profile = run_job(folders, tmp_path / "small.yaml", "lookup", "noisy", **changes)
    check_consistent(profile, tmp_path / "small.yaml", TINY.n_trials)


def test_no_text_reaches_a_file(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    run_job(folders, tmp_path / "out.yaml", "lookup", target="cycle", prompts="turns")
    written = b"".join(read(path) for path in tmp_path.iterdir())
    assert len(written) > 1000
    for line in Path(folders["turns"]).read_text().splitlines():
        for text in json.loads(line)["turns"]:
            assert text[:8].encode() not in written
            assert str([*text.encode()])[1:30].encode() not in written
    assert b"abcabcabc" not in written  # what this target answers


def test_b27_a_sampled_job_records_its_sampling(folders: dict[str, str], tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.8, top_k=20)
    profile = run_job(folders, tmp_path / "out.yaml", "lookup", "noisy", sampling=sampling)
    check_consistent(profile, tmp_path / "out.yaml", TINY.n_trials)
    assert profile.sampling == sampling


def test_b27_the_order_of_the_file_does_not_change_the_split(
    folders: dict[str, str], tmp_path: Path
) -> None:
    lines = Path(folders["prompts"]).read_text().splitlines()
    random.Random(0).shuffle(lines)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("\n".join(lines))
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    jobs = [prepare(models, p, "x", TINY, Silent()) for p in (folders["prompts"], shuffled)]
    assert jobs[0].sample.fingerprint == jobs[1].sample.fingerprint
    for side in ("tune", "holdout"):
        ids = [[p.id for p in getattr(job.sample, side)] for job in jobs]
        assert ids[0] == ids[1]


def test_answers_of_one_token_on_the_holdout_are_judged(
    folders: dict[str, str], loaded: LoadedTarget
) -> None:
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    job = prepare(models, folders["prompts"], "x", TINY, Silent())
    rung = Candidate("lookup", TreeConfig.chain(2), Prediction(2, 1), 1.5, (1.5,))
    ended = [[Trace(f"{i}", list(p.token_ids), [5])] for i, p in enumerate(job.sample.holdout)]
    serving = Serving(CostModelSummary(reference_ms=1.0, tables=[]), GuardSettings())
    proof = prove(job, [rung], [serving], ended, Silent())
    assert proof.winner is None or proof.evidence[0].tau >= 1


# --- what a stopped job leaves ------------------------------------------------------------------


STUDY = "old.unfinished-study.log"


def old_files(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Write an older profile, measurements and study; return the profile and all contents."""
    out = folder / "old.yaml"
    for path in (out, measurements_path(out), study_path(out), report_path(out)):
        path.write_bytes(f"the old {path.name}".encode())
    return out, contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("module", "error"), [("racing", KeyboardInterrupt), ("proving", RuntimeError)]
)
def test_b31_a_job_that_is_stopped_leaves_every_file_as_it_was_and_its_study(
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    error: type[BaseException],
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out, before = old_files(tmp_path)
    n_runs = 0
    real = autotune.racing.run_forced

    def stopped(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
        nonlocal n_runs
        n_runs += 1
        if n_runs > 5:
            raise error("stop")
        return real(decoder, trace)

    monkeypatch.setattr(f"autotune.{module}.run_forced", stopped)
    with pytest.raises(error):
        run_job(folders, out, "lookup", target="cycle")
    after = contents(tmp_path)
    assert after.pop(STUDY), "the study is there to go on with"
    assert after == before


def test_a_job_stopped_on_the_holdout_does_not_race_again_when_resumed(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out = tmp_path / "out.yaml"
    with monkeypatch.context() as stopping:
        stopping.setattr("autotune.pipeline.prove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_job(folders, out, "lookup", target="cycle")

    def race_again(*_: object) -> None:
        raise AssertionError("a tree was measured twice")

    monkeypatch.setattr("autotune.racing.run_forced", race_again)
    profile = run_job(folders, out, "lookup", target="cycle", resume=True)
    check_consistent(profile, out, TINY.n_trials)
    n_measured = load_measurements(measurements_path(out)).measured
    assert len(n_measured) == TINY.n_trials
    run_job(folders, out, "lookup", target="cycle", resume=True)  # the finished one
    assert load_measurements(measurements_path(out)).measured == n_measured


def test_the_study_can_lie_in_a_database_whose_password_is_never_written(
    folders: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out" / "out.yaml"
    out.parent.mkdir()
    url = f"sqlite:///{tmp_path}/studies.db?timeout=20"
    profile = run_job(folders, out, "lookup", storage=url)
    assert profile.search is not None
    assert profile.search.storage == f"sqlite:///{tmp_path}/studies.db"
    assert set(out.parent.iterdir()) == {out, measurements_path(out), report_path(out)}


def test_b35_two_jobs_cannot_write_one_profile(folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    with (
        study_home(out, None, resume=False),
        pytest.raises(SpectuneError, match="another is at"),
    ):
        run_job(folders, out, "lookup")
    assert list(tmp_path.iterdir()) == []


def test_a_torn_study_is_mended_and_gone_on_with(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 1.1)
    out = tmp_path / "out.yaml"
    run_job(folders, out, "lookup", target="cycle")
    study_path(out).write_bytes(study_path(out).read_bytes()[:-7])
    profile = run_job(folders, out, "lookup", target="cycle", resume=True)
    check_consistent(profile, out, TINY.n_trials)


def test_a_budget_cuts_the_job_and_the_profile_says_so(
    folders: dict[str, str], tmp_path: Path
) -> None:
    changes = {"n_tune": 12, "n_holdout": 20, "n_race": 8, "n_trials": 10, "n_probe_rounds": 10}
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    settings = replace(TINY, max_new_tokens=32, **changes)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    job = prepare(models, prompts, "x", settings, Silent())
    pace = Pace(0.01, 32)
    whole = plan_of(job, pace, {})
    cut = fit_budget(job, pace, {}, 0.7 * whole.total_s)
    assert plan_of(cut, pace, {}).total_s <= 0.7 * whole.total_s
    assert len(cut.sample.holdout) == cut.settings.n_holdout < 20
    assert cut.sample.fingerprint != job.sample.fingerprint
    words = cuts(settings, cut.settings)
    assert words is not None
    n_holdout = cut.settings.n_holdout
    assert words.startswith(f"{n_holdout} prompts held out instead of 20, ")
    with pytest.raises(UsageError, match="raise --budget-min"):
        fit_budget(job, pace, {}, 0.01)
    profile = run_job(folders, tmp_path / "o.yaml", "lookup", budget_s=1e6)
    assert profile.job is not None
    assert profile.job.cut is None
    assert set(profile.job.seconds) == {
        *("prepare", "trace", "probe", "cost", "search", "serving", "holdout"),
    }
    assert profile.job.planned_s > 0


def test_the_plan_that_is_said_is_the_one_that_was_fitted_to_the_budget(
    folders: dict[str, str],
) -> None:
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    settings = replace(TINY, max_new_tokens=64)
    job, pace = prepare(models, folders["prompts"], "x", settings, Silent()), Pace(0.01, 64)
    cut = fit_budget(job, pace, {}, 0.6 * plan_of(job, pace, {}).total_s)
    n_new = cut.settings.max_new_tokens
    assert n_new < 64
    budget_s = plan_of(cut, Pace(0.01, n_new), {}).total_s
    assert agree(job, pace, {}, budget_s, Silent())[1].total_s == pytest.approx(budget_s)
    assert Pace(0.01, 60, n_turns=2).within(20).n_tokens == 40


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "openvino"])
def test_only_trees_that_the_engine_can_run_are_scored_and_measured(
    folders: dict[str, str], tmp_path: Path, engine: str
) -> None:
    out = tmp_path / "out.yaml"
    profile = run_job(folders, out, "lookup", "noisy", engine_space=engine)
    found = load_measurements(measurements_path(out))
    kinds = {"lookup": "lookup", folders["noisy"]: "model"}
    assert any(not s.tree.is_chain for s in found.scores) == (engine == "sglang")
    for scored in (*found.scores, *found.measured):
        assert can_run(engine, scored.tree, kinds[scored.draft.partition(" ")[0]])
    assert any(m.tree.is_chain for m in found.measured), "the best chain is always measured"
    assert profile.search is not None


@pytest.mark.parametrize(
    ("draft", "kind", "engine"),
    [("hybrid", "hybrid", "vllm"), ("suffix", "suffix", "sglang"), ("noisy", "model", "eagle")],
)
def test_drafts_that_the_engine_does_not_run_are_refused_before_anything_is_measured(
    folders: dict[str, str], tmp_path: Path, draft: str, kind: str, engine: str
) -> None:
    drafts = ("noisy", "hybrid") if draft == "hybrid" else (draft,)
    with pytest.raises(UsageError, match=f"is of kind {kind}; leave it out"):
        run_job(folders, tmp_path / "out.yaml", *drafts, engine_space=engine)
    assert not (tmp_path / "out.yaml").exists()


KILLED = """\
import os, signal, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import autotune.proving, autotune.racing, profiles.io
import pytest
from test_autotune_pipeline import Path, fixed_times, load, run_job
fixed_times(pytest.MonkeyPatch(), lambda tree: 1.0 if tree.is_plain else 1.1)
folders, out = {folders!r}, Path({out!r})
old = out.read_bytes()

def after(n, real):
    calls = []
    def run(*arguments):
        calls.append(1)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return run

moments = (
    (autotune.racing, "run_forced", 3), (autotune.proving, "run_forced", 5),
    (profiles.io.os, "fsync", 1), (profiles.io.os, "fsync", 2),
)
for module, name, n in moments:
    child = os.fork()
    if child == 0:
        setattr(module, name, after(n, getattr(module, name)))
        run_job(folders, out, "lookup", target="cycle", n_trials=2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(name, n, os.WIFSIGNALED(status), out.read_bytes() == old, load(out).name)
"""


def test_b31_a_killed_job_leaves_the_old_profile_whole(
    folders: dict[str, str], tmp_path: Path, loaded: LoadedTarget
) -> None:
    out = tmp_path / "old.yaml"
    save_profile(speculating_profile(loaded), out)
    program = KILLED.format(tests=str(Path(__file__).parent), folders=folders, out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.endswith("True True toy-code-epyc"), line
    profile = run_job(folders, out, "lookup", target="cycle")  # nothing left behind is in the way
    assert load(out) == profile


def outputs_in_the_way(tmp_path: Path) -> dict[str, Path]:
    for name in ("a.yaml", "b.measurements.json.gz", "c.study.log"):
        (tmp_path / name).mkdir()
    return {
        "is a folder": tmp_path / "a.yaml",
        "measurements are a folder": tmp_path / "b.yaml",
        "study is a folder": tmp_path / "c.yaml",
        "in a folder that is not there": tmp_path / "nowhere" / "d.yaml",
        "in a folder that takes no file": Path("/proc/e.yaml"),
    }


def test_b31_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(autotune.job, "load_target", load_nothing)
    for why, out in outputs_in_the_way(tmp_path).items():
        with pytest.raises(SpectuneError, match="cannot be written") as caught:
            run_job(folders, out, "lookup")
        assert "\n" not in str(caught.value), why


# --- a profile where it does not belong ---------------------------------------------------------


DIFFERENCES = {
    "device.name": "Another CPU",
    "device.threads": 77,
    "device.count": 99,
    "device.memory_gib": 1.5,
    "target.sha256": "e" * 64,
    "target.dtype": "float16",
    "draft.sha256": "e" * 64,
    "sampling.temperature": 0.75,
}


def field_of(profile: Profile, key: str) -> Any:
    value: Any = profile
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_change(profile: Profile, key: str, value: object) -> Profile:
    part, name = key.split(".")
    changed = getattr(profile, part).model_copy(update={name: value})
    return sealed(profile.model_copy(update={part: changed}))


@pytest.fixture(scope="module")
def fitting(folders: dict[str, str], loaded: LoadedTarget) -> Profile:
    return speculating_profile(loaded, folders["noisy"])


def test_b29_a_profile_that_fits_is_used_without_a_word(
    loaded: LoadedTarget, fitting: Profile
) -> None:
    harmless = with_change(with_change(fitting, "device.torch", "1.0"), "device.driver", "9")
    for profile in (fitting, harmless):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decoder = SpeculativeDecoder.from_profile(profile, loaded=loaded)
        assert decoder.tree == fitting.tree
        assert decoder.draft is not None


CASES = [
    *((key, value) for key, value in DIFFERENCES.items()),
    *((key, None) for key in DIFFERENCES if key != "sampling.temperature"),
    *((key, "unknown") for key in ("device.name", "target.sha256", "target.dtype")),
]


@pytest.mark.parametrize(("key", "value"), CASES)
def test_b29_a_profile_that_does_not_fit_is_decoded_plainly_with_both_values_named(
    loaded: LoadedTarget, fitting: Profile, key: str, value: object
) -> None:
    profile = with_change(fitting, key, value)
    sampling = fitting.sampling if key == "sampling.temperature" else None
    with pytest.warns(UntrustedProfileWarning) as caught:
        decoder = SpeculativeDecoder.from_profile(profile, loaded=loaded, sampling=sampling)
    assert decoder.draft is None
    assert decoder.tree.is_plain
    message = str(caught[0].message)
    assert key in message
    assert str(value or "unknown")[:20] in message
    if (key, value) != ("draft.sha256", None):  # the draft is not even loaded to be hashed
        assert str(field_of(fitting, key))[:16] in message
    assert decoder.generate("abc", max_new_tokens=3).stats.n_drafted == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trusted = SpeculativeDecoder.from_profile(
            profile, loaded=loaded, sampling=sampling, trust=True
        )
    assert trusted.tree == fitting.tree
    assert trusted.draft is not None


def test_b29_another_kind_of_device_is_named(loaded: LoadedTarget, fitting: Profile) -> None:
    profile = with_change(fitting, "device.kind", "cuda")
    with pytest.warns(UntrustedProfileWarning, match=r"device\.kind: 'cuda' .*'cpu' here"):
        assert SpeculativeDecoder.from_profile(profile, loaded=loaded).draft is None


def test_b29_a_profile_edited_by_hand_is_decoded_plainly(
    loaded: LoadedTarget, fitting: Profile
) -> None:
    deeper = fitting.model_copy(update={"tree": TreeConfig.chain(4)})
    unsealed = fitting.model_copy(update={"content_sha256": None})
    for edited in (deeper, unsealed):
        with pytest.warns(UntrustedProfileWarning, match="edited after it was written"):
            assert SpeculativeDecoder.from_profile(edited, loaded=loaded).draft is None
    renamed = fitting.model_copy(update={"name": "mine"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SpeculativeDecoder.from_profile(renamed, loaded=loaded).draft is not None


def test_b29_weights_that_changed_under_the_same_name_are_noticed(
    folders: dict[str, str], fitting: Profile, tmp_path: Path
) -> None:
    other = load_target(str(save_target(tmp_path / "target", seed=3)), dtype="float32")
    with pytest.warns(UntrustedProfileWarning, match=r"target\.sha256"):
        assert SpeculativeDecoder.from_profile(fitting, loaded=other).draft is None


def test_no_draft_is_loaded_for_plain_decoding(
    loaded: LoadedTarget, fitting: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: object) -> None:
        raise AssertionError("a draft was loaded")

    monkeypatch.setattr(engine.decoder, "draft_of", load_nothing)
    changes = {"decision": "plain", "tree": TreeConfig(depth=0), "evidence": None}
    plain = SpeculativeDecoder.from_profile(fitting.model_copy(update=changes), loaded=loaded)
    assert plain.draft is None
    assert plain.generate("abc", max_new_tokens=5).stats.n_drafted == 0
    elsewhere = with_change(fitting, "device.name", "Another CPU")
    with pytest.warns(UntrustedProfileWarning):
        assert SpeculativeDecoder.from_profile(elsewhere, loaded=loaded).draft is None


def test_the_race_times_the_turns_of_a_conversation_together(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, lambda tree: 1.0 if tree.is_plain else 2.0)
    models = Models(folders["target"], ["lookup"], "float32", "cpu")
    job = prepare(models, folders["turns"], "x", TINY, Silent())
    prompts = [list(p.token_ids) for p in job.sample.tune]
    texts = [[Trace(f"{i}.{t}", p, [7, 8, 9, 10]) for t in (0, 1)] for i, p in enumerate(prompts)]
    track = ForcedTrack(job, texts)
    assert track.n_prompts == len(texts)
    assert track.seconds(0, "", TreeConfig(depth=0)) == pytest.approx(
        2 * 4e-3
    )  # prefill, 3 rounds
