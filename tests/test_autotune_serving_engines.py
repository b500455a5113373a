"""Jobs on a serving engine, with a small server that answers as vLLM's does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import autotune.report.page
import autotune.serving_engines.proving
from autotune.commands.cli import main
from autotune.job import Models
from autotune.progress import Silent
from autotune.serving_engines.interface import Speculation
from autotune.serving_engines.lengths import Family, next_setting
from autotune.serving_engines.metrics import Counts
from autotune.serving_engines.own import OwnDecoding
from autotune.serving_engines.pipeline import ServerOptions, logs_path, tune_server
from autotune.serving_engines.searching import ratios_of
from autotune.serving_engines.turns import Work, take_turn, units_of
from autotune.serving_engines.vllm import PYTHON_VARIABLE, Vllm
from autotune.settings import Settings
from engine.decoder import SpeculativeDecoder
from engine.pair import load_draft, load_target
from engine.timing import TimedText
from engine.trace import Trace
from fake_vllm import VERSION, make_environment, pids
from pairs import save_noisy_copy, save_target, write_prompts
from profiles import (
    DraftRef,
    Profile,
    Sampling,
    TreeConfig,
    find,
    load,
    load_measurements,
    measurements_path,
    validated,
)
from profiles.errors import SpectuneError, UsageError
from test_autotune_servers import is_gone

SETTINGS = Settings(
    n_tune=3,
    n_holdout=8,
    n_race=3,
    max_new_tokens=20,
    n_trials=9,
    max_depth=3,
    max_lookup_depth=8,
)

LOOKUP = DraftRef(kind="lookup", min_match=1, max_match=5)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out of the report: drawing takes longer than these jobs."""
    monkeypatch.setattr(autotune.report.page, "sections", lambda *_: [])


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("pair")
    target = save_target(base / "target")
    paths = {
        "target": target,
        "small": save_noisy_copy(target, base / "small"),
        "prompts": write_prompts(base / "prompts.jsonl", n=12),
        "turns": write_prompts(base / "turns.jsonl", n=12, n_turns=2),
        "many": write_prompts(base / "many.jsonl", n=24),
    }
    return {name: str(path) for name, path in paths.items()}


class Told(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"


def run_job(
    python: Path,
    folders: dict[str, str],
    out: Path,
    *drafts: str,
    prompts: str = "prompts",
    concurrency: int = 1,
    told: Told | None = None,
    **changes: object,
) -> Profile:
    return tune_server(
        Vllm(python),
        Models(folders["target"], [folders.get(draft, draft) for draft in drafts], "float32"),
        folders[prompts],
        out,
        options=ServerOptions(concurrency, ("--enforce-eager",)),
        settings=replace(SETTINGS, **changes),  # type: ignore[arg-type]
        progress=told or Silent(),
    )


def test_a_lookup_that_pays_is_proved_and_exported_as_it_was_measured(
    python: Path, folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, told = tmp_path / "code.yaml", Told()
    profile = run_job(python, folders, out, "lookup", "suffix", told=told)

    assert load(out) == profile
    assert profile.decision == "speculate"
    assert profile.draft.kind == "lookup"
    assert profile.tree.is_chain
    assert profile.engine == "vllm"
    assert profile.server is not None
    assert profile.server.version == f"{VERSION}+cpu"
    assert profile.server.environment["OMP_NUM_THREADS"] == str(profile.device.threads)
    evidence = profile.evidence
    assert evidence is not None
    assert "without a draft" in evidence.baseline
    assert evidence.speedup.prompts == SETTINGS.n_holdout
    # Rounds of 0, 4, 1 and 3 tokens right: 3 tokens each, of which the last may not fit.
    assert 2.3 < evidence.tau < 3.3

    assert "Plan: about" in told.text
    assert "suffix 8: it ended with code 3: Arctic Inference is required" in told.text
    assert profile.search is not None
    assert 2 <= profile.search.measured - 1 <= 8
    measurements = load_measurements(measurements_path(out))
    (table, _) = measurements.acceptance
    rates = [accepted[0] / table.tried[0] for accepted in table.accepted]
    assert rates == pytest.approx([0.75, 0.5, 0.5, 0.25, 0, 0, 0, 0], abs=0.08)

    assert pids(python), "servers were started"
    assert all(is_gone(pid) for pid in pids(python))
    assert not logs_path(out).exists()

    assert main(["export", str(out), "--to", "vllm"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "as it was measured" in line)
    assert f"vllm serve {profile.target.id} --dtype float32" in line
    assert f'"num_speculative_tokens": {profile.tree.depth}' in line
    assert "--enforce-eager" in line
    assert "unproven" not in text
    assert main(["export", str(out), "--to", "sglang"]) == 0
    assert "unproven on SGLang" in capsys.readouterr().out
    assert main(["show", str(out)]) == 0
    assert f"vllm {VERSION}" in capsys.readouterr().out

    with pytest.raises(UsageError, match=f"made on vllm {VERSION}.*spectune export"):
        SpeculativeDecoder.from_profile(out)
    assert main(["run", str(out), "--prompt", "a"]) == 2
    assert find(tmp_path, engine="vllm") == profile
    with pytest.raises(SpectuneError, match="vllm in the profile, spectune wanted"):
        find(tmp_path)


def test_a_draft_that_costs_more_than_it_gives_leaves_plain_decoding(
    python: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.yaml"
    profile = run_job(python, folders, out, "small")
    assert profile.decision == "plain"
    assert profile.draft.kind == "model"
    assert profile.draft.id == folders["small"]
    assert profile.search is not None
    assert 1 <= profile.search.measured - 1 <= SETTINGS.max_depth
    assert all(is_gone(pid) for pid in pids(python))


def test_requests_are_served_at_once_and_judged_together(
    python: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    profile = run_job(
        python, folders, tmp_path / "x.yaml", "lookup", prompts="many", concurrency=2
    )
    assert profile.server is not None
    assert profile.server.concurrency == 2
    judged = profile.evidence or profile.alternatives[0].evidence
    assert judged.speedup.prompts == SETTINGS.n_holdout
    assert profile.domain.n_holdout == 2 * SETTINGS.n_holdout


def test_the_turns_of_a_conversation_follow_each_other(
    python: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    profile = run_job(python, folders, tmp_path / "x.yaml", "lookup", prompts="turns")
    assert profile.decision == "speculate"


def test_where_no_draft_can_be_run_the_job_says_why_and_writes_nothing(
    python: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "x.yaml"
    with pytest.raises(SpectuneError, match="suffix 8: it ended with code 3: Arctic"):
        run_job(python, folders, out, "suffix")
    assert not out.exists()
    assert list(logs_path(out).glob("*suffix*")), "the logs are kept"
    assert all(is_gone(pid) for pid in pids(python))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_job_leaves_no_server_and_no_profile(
    python: Path, folders: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    code = "from autotune.commands.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "tune", "--backend", "vllm", "--draft", "lookup"]
    command += ["--target", folders["target"], "--prompts", folders["prompts"]]
    command += ["--out", str(tmp_path / "x.yaml"), "--dtype", "float32"]
    environment = os.environ | {
        PYTHON_VARIABLE: str(python),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(pids(python)) < 2 and time.monotonic() < deadline:  # plain, and a setting beside it
        time.sleep(0.05)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert "no profile was written" in said
    assert not (tmp_path / "x.yaml").exists()
    assert len(pids(python)) >= 2
    assert all(is_gone(pid) for pid in pids(python))


def test_a_dry_run_starts_one_server_and_says_the_minutes(
    python: Path, folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "--backend", "vllm", "--backend-python", str(python), "--dry-run"]
    command += ["--target", folders["target"], "--prompts", folders["prompts"], "--json"]
    command += ["--out", str(tmp_path / "x.yaml")]
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan["plan_s"]) == {"prepare", "trace", "search", "holdout"}
    assert len(pids(python)) == 1
    assert all(is_gone(pid) for pid in pids(python))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--backend", "vllm", "--resume"], "--resume has no meaning"),
        (["--concurrency", "4"], "--concurrency has no meaning for --backend spectune"),
        (["--backend", "vllm", "--draft", "hybrid"], "no hybrid drafts"),
        (["--backend", "vllm", "--draft", "/nowhere"], "there is no /nowhere"),
        (["--backend", "vllm", "--device", "cuda"], "computes on cpu, but --device is cuda"),
        (["--backend", "vllm", "--concurrency", "-1"], "must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_a_server_is_started(
    more: list[str],
    reason: str,
    python: Path,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    command = ["tune", "--target", folders["target"], "--prompts", folders["prompts"]]
    assert main([*command, *more]) == 2
    assert reason in capsys.readouterr().err
    assert pids(python) == []


def test_a_profile_names_the_server_where_and_only_where_there_was_one() -> None:
    import toy_profiles

    for changes in ({"engine": "vllm"}, {"server": {"version": "1"}}):
        with pytest.raises(SpectuneError, match="server"):
            validated(Profile, toy_profiles.data(changes), "toy")


# --- lengths ------------------------------------------------------------------------------------


def work(tau: float, round_s: float, *by_position: int) -> Work:
    counts = Counts(100, 100 * len(by_position), sum(by_position), by_position)
    n_decoded = round(100 * tau)
    return Work(counts, n_decoded, n_decoded, 100 * round_s)


PLAIN = Work(n_tokens=100, n_decoded=100, decode_s=100 * 0.01)


def test_one_run_of_the_longest_chain_tells_the_tokens_of_every_shorter_one() -> None:
    family = Family("lookup", LOOKUP, 4)
    assert next_setting([family], PLAIN) == Speculation("lookup", LOOKUP, 4)
    family.known[4] = work(2.2, 0.02, 60, 40, 15, 5)
    predicted = {depth: family.predict(depth, PLAIN) for depth in family.lengths}
    assert [p.tau for p in predicted.values()] == pytest.approx([1.6, 2.0, 2.15, 2.2])
    prices = [p.break_even_tau for p in predicted.values()]
    assert prices == pytest.approx([1.25, 1.5, 1.75, 2.0])


def test_the_most_promising_length_is_measured_until_it_has_been() -> None:
    families = [Family("lookup", LOOKUP, 4), Family("other", LOOKUP, 3)]
    families[0].known[4] = work(2.2, 0.02, 60, 40, 15, 5)
    assert next_setting(families, PLAIN) == families[1].speculation(3)
    families[1].failed.add(3)
    assert next_setting(families, PLAIN) == families[0].speculation(2)  # 2.0 / 1.5
    families[0].known[2] = work(2.0, 0.019, 60, 40)  # dearer than thought: 1.05x
    assert next_setting(families, PLAIN) == families[0].speculation(1)  # 1.6 / 1.45
    families[0].known[1] = work(1.6, 0.015, 60)
    assert next_setting(families, PLAIN) == families[0].speculation(3)  # 2.15 / 1.95
    families[0].known[3] = work(2.15, 0.021, 60, 40, 15)
    assert next_setting(families, PLAIN) is None  # 4 is the best, at 1.1x, and measured


def test_rounds_are_those_with_a_draft_and_those_without() -> None:
    some = Work(Counts(10, 40, 25, (10, 8, 5, 2)), n_tokens=61, n_decoded=60, decode_s=7.0)
    assert some.n_rounds == 35
    assert some.tau == pytest.approx(60 / 35)
    assert some.round_s == pytest.approx(0.2)
    cut = replace(some, n_decoded=30)  # the last rounds' tokens did not fit
    assert cut.n_rounds == 10


# --- the interface, with our own engine ---------------------------------------------------------


def test_our_engine_is_timed_in_the_same_turns_and_counts_the_same(
    folders: dict[str, str],
) -> None:
    loaded = load_target(folders["target"], dtype="float32", device="cpu")
    draft = load_draft(folders["small"], loaded)
    plain = OwnDecoding("plain", SpeculativeDecoder(loaded))
    chain = OwnDecoding(
        "chain",
        SpeculativeDecoder(loaded, draft.draft, TreeConfig.chain(2), Sampling(temperature=0)),
    )
    traces = [Trace(str(i), [5 + i, 6, 7], list(range(10, 30))) for i in range(3)]
    units = units_of([[trace] for trace in traces], 1)
    before, turn, after = (take_turn(side, units, traces[0]) for side in (plain, chain, plain))
    assert before.work.counts == Counts()
    assert before.work.n_rounds == 3 * 19
    assert turn.work.n_rounds <= 3 * 19
    assert turn.work.counts.n_drafted > 0
    assert len(ratios_of(before, turn, after)) == 3


class Asleep:
    """A way of decoding that notes whether it was awake when it was asked."""

    def __init__(self, wakes: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.name = "asleep"
        self.awake = wakes
        self.n_runs = 0

    def run(self, trace: Trace) -> TimedText:
        self.n_runs += 1
        return TimedText(0.1, 0.05, tuple(trace.generated[:2]))

    def counts(self) -> Counts:
        return Counts()


def test_who_gives_too_few_tokens_is_refused() -> None:
    with pytest.raises(SpectuneError, match="must give 4 tokens, but gave 2"):
        take_turn(Asleep(), [[[Trace("a", [1], [0] * 4)]]], Trace("f", [1], [0, 0]))


def test_conversations_left_over_make_no_unit() -> None:
    conversations = [[Trace(str(i), [1], [2])] for i in range(5)]
    assert [len(unit) for unit in units_of(conversations, 2)] == [2, 2]


@pytest.mark.slow
@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} is not set")
def test_a_short_job_on_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "real.yaml"
    prompts = Path(__file__).parent.parent / "examples" / "domains" / "rewrite.jsonl"
    command = ["tune", "--backend", "vllm", "--backend-args=--enforce-eager", "--target", "demo"]
    command += ["--draft", "lookup", "--prompts", str(prompts), "--out", str(out), "--quick"]
    command += ["--holdout-prompts", "8", "--trials", "3"]
    assert main(command) == 0
    profile = load(out)
    assert profile.engine == "vllm"
    assert (profile.evidence or profile.alternatives[0].evidence).tau > 1
