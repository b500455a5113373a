"""`check --remeasure`: the verdict, what it does to the profile, and the command around it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotune.proving
import autotune.rechecking
import engine.decoder
from autotune.commands.cli import main
from autotune.holdout import PairedTimes
from autotune.rechecking import recheck, verdict_on, with_recheck
from autotune.sample import Sample, build_sample
from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, run_forced
from engine.pair import LoadedTarget, load_target
from engine.trace import Trace
from pairs import save_target, speculating_profile, write_prompts
from profiles import Profile, is_sealed, load, save, validated
from profiles.errors import SpectuneError
from toy_profiles import data, profile


def times_of(ratios: list[float]) -> PairedTimes:
    return PairedTimes((1.0,) * len(ratios), tuple(1 / ratio for ratio in ratios))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.3, 1.2, 1.25, 1.4] * 2, "confirmed"),
        ([0.8, 0.7, 0.75, 0.9] * 2, "refuted"),
        ([1.3, 0.8, 1.1, 0.95] * 2, "inconclusive"),
        ([1.0] * 8, "inconclusive"),
        ([1.5] * 7, "inconclusive"),  # too few to prove anything
        ([0.5] * 7, "inconclusive"),
        ([], "inconclusive"),
    ],
)
def test_either_side_may_be_proved_the_faster_one(ratios: list[float], verdict: str) -> None:
    found = verdict_on(times_of(ratios), 64)
    assert found.verdict == verdict
    assert found.prompts == len(ratios)
    if ratios:
        assert found.ratio == pytest.approx(len(ratios) / sum(1 / r for r in ratios), rel=1e-5)
        assert found.low <= found.ratio
        assert found.high is not None
        assert found.high >= found.ratio * (1 - 1e-5)


def test_as_many_ties_are_confirmed_as_refuted_and_few_of_either() -> None:
    rng = np.random.default_rng(0)
    verdicts = [
        verdict_on(times_of(rng.lognormal(0, 0.1, 8).tolist()), 64).verdict for _ in range(400)
    ]
    margin = 3 * math.sqrt(0.05 * 0.95 / 400)
    for wrong in ("confirmed", "refuted"):
        assert verdicts.count(wrong) / 400 <= 0.05 + margin


CONFIRMED = verdict_on(times_of([1.3, 1.2, 1.25, 1.4] * 2), 64)
REFUTED = verdict_on(times_of([0.8, 0.7, 0.75, 0.9] * 2), 64)
UNDECIDED = verdict_on(times_of([1.3, 0.8, 1.1, 0.95] * 2), 64)


def test_a_recheck_is_appended_and_the_rest_stays() -> None:
    made = profile()
    once = with_recheck(made, CONFIRMED)
    twice = with_recheck(once, UNDECIDED)
    assert [found.verdict for found in twice.rechecks] == ["confirmed", "inconclusive"]
    changed = {"rechecks", "content_sha256"}
    assert twice.model_dump(exclude=changed) == made.model_dump(exclude=changed)
    assert is_sealed(twice)


def test_a_refuted_profile_is_plain_and_keeps_its_evidence_as_an_alternative() -> None:
    made = profile()
    refuted = with_recheck(made, REFUTED)
    assert (refuted.decision, refuted.tree.depth, refuted.evidence) == ("plain", 0, None)
    was, *others = refuted.alternatives
    assert (was.draft, was.tree, was.evidence) == (made.draft.id, made.tree, made.evidence)
    assert tuple(others) == made.alternatives
    assert refuted.rechecks == (REFUTED,)
    assert f"{REFUTED.ratio:.3f}x" in refuted.reason
    assert is_sealed(refuted)


def test_b29_a_recheck_does_not_launder_an_edited_profile() -> None:
    edited = profile().model_copy(update={"reason": "Because I say so."})
    assert not is_sealed(with_recheck(edited, CONFIRMED))


def test_a_refuted_profile_cannot_be_turned_back_by_hand() -> None:
    refuted = data({"rechecks": [REFUTED.model_dump(mode="json")]})
    with pytest.raises(SpectuneError, match="was refuted since"):
        validated(Profile, refuted, "toy")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, prompts and a profile that fits this machine."""
    base = tmp_path_factory.mktemp("recheck")
    target = save_target(base / "target")
    write_prompts(base / "prompts.jsonl", n=9)
    loaded = load_target(str(target), dtype="float32", device="cpu")
    save(speculating_profile(loaded), base / "fast.yaml")
    save(speculating_profile(loaded, changes={"domain.template": "none"}), base / "raw.yaml")
    return base


Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that checks a copy of the profile, `tmp_path / "x.yaml"`."""
    (tmp_path / "x.yaml").write_bytes((base / "fast.yaml").read_bytes())

    def run(*options: object) -> tuple[int, str, str]:
        arguments = ["check", tmp_path / "x.yaml", *options]
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def again(base: Path) -> tuple[object, ...]:
    return ("--remeasure", "--prompts", base / "prompts.jsonl", "--max-new-tokens", 6)


def speed(monkeypatch: pytest.MonkeyPatch, speedup: Callable[[int], float]) -> None:
    """Let plain requests take a second and others `1 / speedup(run)`, on a steady machine."""
    n_runs = iter(range(10_000))

    def run(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
        done = run_forced(decoder, trace)
        total_s = 1.0 if decoder.draft is None else 1 / speedup(next(n_runs))
        return ForcedRun(total_s, total_s / 2, done.n_tokens, done.stats)

    monkeypatch.setattr(autotune.proving, "run_forced", run)
    monkeypatch.setattr(autotune.proving, "pace_of", lambda _, pass_s: pass_s)


@pytest.mark.parametrize(
    ("speedup", "verdict", "code"),
    [
        (lambda run: 1.5, "confirmed", 0),
        (lambda run: 0.6, "refuted", 1),
        (lambda run: 1.5 if run // 2 % 2 else 0.7, "inconclusive", 0),
    ],
)
def test_the_verdict_is_told_written_and_decides_the_exit_code(
    check: Check,
    again: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speedup: Callable[[int], float],
    verdict: str,
    code: int,
) -> None:
    speed(monkeypatch, speedup)
    before = load(tmp_path / "x.yaml")
    found_code, out, _ = check(*again, "--json")
    document = json.loads(out)
    assert found_code == code
    assert document["recheck"]["verdict"] == verdict
    assert document["recheck"]["prompts"] == 8
    after = load(tmp_path / "x.yaml")
    assert document["decision"] == after.decision
    assert after.decision == ("plain" if code else "speculate")
    assert [r.verdict for r in after.rechecks] == [verdict]
    evidence = after.alternatives[0].evidence if code else after.evidence
    assert evidence == before.evidence
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]
    # The next look at it: a refuted profile is plain and cannot be refuted again.
    speed(monkeypatch, lambda run: 1.5)
    found_code, out, _ = check(*again)
    assert found_code == 0
    assert ("nothing to measure again" in out) == (verdict == "refuted")
    assert ("confirmed: 1.500x in total" in out) == (verdict != "refuted")
    assert len(load(tmp_path / "x.yaml").rechecks) == (1 if verdict == "refuted" else 2)


def test_it_runs_on_real_times(check: Check, again: tuple[object, ...], tmp_path: Path) -> None:
    code, out, err = check(*again, "--n-prompts", 3)
    assert "Read 9 prompts, use 3, " in err
    assert code == 0  # three prompts prove nothing
    assert "inconclusive: " in out
    (found,) = load(tmp_path / "x.yaml").rechecks
    assert found.prompts <= 3


@pytest.mark.parametrize("name", ["fast.yaml", "raw.yaml"])
def test_prompts_are_built_as_when_the_profile_was_made(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[bool] = []

    def build(*arguments: Any, raw: bool, **options: Any) -> Sample:
        seen.append(raw)
        return build_sample(*arguments, raw=raw, **options)

    monkeypatch.setattr(autotune.rechecking, "build_sample", build)
    recheck(load(base / name), base / "prompts.jsonl", n_prompts=1, max_new_tokens=4)
    assert seen == [name == "raw.yaml"]


def test_code_of_a_target_is_trusted_by_the_flag(
    check: Check, again: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def load_it(name: str, *, trust_remote_code: bool, **options: Any) -> LoadedTarget:
        asked.append(trust_remote_code)
        return load_target(name, **options)

    monkeypatch.setattr(engine.decoder, "load_target", load_it)
    few = (*again, "--n-prompts", 1)
    assert check(*few)[0] == check(*few, "--trust-remote-code")[0] == 0
    assert asked == [False, True]


def test_a_profile_that_does_not_fit_here_is_not_measured_unless_trusted(
    check: Check, again: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed(monkeypatch, lambda run: 1.5)
    text = (tmp_path / "x.yaml").read_text()
    (tmp_path / "x.yaml").write_text(text.replace("tau: 2.9", "tau: 2.91"))
    before = (tmp_path / "x.yaml").read_bytes()
    code, out, err = check(*again)
    assert (code, out) == (1, "")
    assert "edited" in err
    assert "--trust" in err
    assert (tmp_path / "x.yaml").read_bytes() == before
    assert "It was edited" in check()[1]
    assert json.loads(check("--json")[1])["edited"]
    assert check(*again, "--trust")[0] == 0
    assert json.loads(check("--json")[1])["edited"]


def test_remeasure_and_prompts_need_each_other(check: Check, again: tuple[Any, ...]) -> None:
    assert check("--remeasure")[0] == 2
    assert check("--prompts", again[2])[0] == 2


@pytest.mark.parametrize("option", ["--n-prompts", "--max-new-tokens"])
def test_counts_below_one_are_refused(
    check: Check, again: tuple[object, ...], option: str
) -> None:
    code, out, err = check(*again, option, 0)
    assert (code, out) == (2, "")
    assert "must be at least 1" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_b31_a_recheck_that_is_stopped_leaves_the_profile_as_it_was(
    check: Check,
    again: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def stop(run: int) -> float:
        if run > 3:
            raise error("stop")
        return 0.5

    speed(monkeypatch, stop)
    before = (tmp_path / "x.yaml").read_bytes()
    if error is KeyboardInterrupt:
        assert check(*again)[0] == 130
    else:
        with pytest.raises(error):
            check(*again)
    assert (tmp_path / "x.yaml").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_b31_a_profile_that_was_rewritten_meanwhile_is_not_overwritten(
    check: Check, again: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.yaml"
    newer = profile({"name": "newer"})

    def rewrite(run: int) -> float:
        save(newer, path)
        return 0.5

    speed(monkeypatch, rewrite)
    code, _, err = check(*again)
    assert code == 1
    assert "changed while it was measured" in err
    assert load(path) == newer


def test_b31_a_profile_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    check: Check, again: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise SpectuneError(f"{path} cannot be written")

    def load_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("autotune.commands.check.check_writable", refuse)
    monkeypatch.setattr("engine.decoder.load_target", load_nothing)
    assert check(*again)[0] == 1
