"""Several workers on one study: nothing lost, nothing twice, one end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

import autotune.search.workers
from autotune.candidates import PLAIN_PREDICTION, Candidate
from autotune.progress import Silent
from autotune.search.shared import SharedStudy
from autotune.search.storage import open_storage
from autotune.search.workers import FINISH, Alone, Workers, workers_of
from autotune.serving_engines.client import free_port
from autotune.space import SearchSpace
from autotune.study_files import StudyHome, study_home
from pairs import save_noisy_copy, save_target, write_prompts
from profiles import PLAIN, Device, TreeConfig, load
from profiles.errors import SpectuneError, UsageError
from profiles.match import same_device
from test_autotune_search import FIRST, SPACES, Objective, predict

PASSWORD = "open-sesame"

N_TRIALS = 6

WORKER = """
import json, sys, time
from dataclasses import replace

import pytest

import autotune.racing
import autotune.report.page
from autotune import Models, tune
from autotune.cost import Prediction
from autotune.cost.predicting import Predictor
from autotune.progress import Silent
from test_autotune_pipeline import TINY, fixed_times

options = json.loads(sys.argv[1])
patch = pytest.MonkeyPatch()


def round_s(tree):
    return 1.0 if tree.is_plain else 1 + 0.02 * tree.nodes + 0.03 * tree.depth


fixed_times(patch, round_s)
predict, timed = Predictor.predict, autotune.racing.run_forced


def invented(self, draft, tree):
    return Prediction(predict(self, draft, tree).tau, round_s(tree))


def slow(decoder, trace):
    time.sleep(options["sleep_s"])
    return timed(decoder, trace)


patch.setattr(Predictor, "predict", invented)
patch.setattr(autotune.racing, "run_forced", slow)
patch.setattr(autotune.report.page, "sections", lambda *_: [])


class Told(Silent):
    def say(self, text):
        print(text, file=sys.stderr, flush=True)


tune(
    Models(options["target"], ["lookup", options["draft"]], "float32", "cpu"),
    options["prompts"],
    options["out"],
    settings=replace(TINY, n_trials=options["n_trials"]),
    storage=options.get("storage"),
    study=options.get("study"),
    progress=Told(),
)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("pair")
    target = save_target(base / "target")
    return {
        "target": str(target),
        "draft": str(save_noisy_copy(target, base / "noisy")),
        "prompts": str(write_prompts(base / "prompts.jsonl")),
    }


@pytest.fixture
def postgresql() -> Iterator[str]:
    """Start a PostgreSQL server of our own and return its URL, password included."""
    pytest.importorskip("psycopg")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("Debian's package postgresql is not installed")
    home = Path(tempfile.mkdtemp(prefix="spectune-postgresql-"))
    # PostgreSQL does not run as root.
    other = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if other:
        shutil.chown(home, "postgres")
    word = home / "password"
    word.write_text(PASSWORD)
    word.chmod(0o644)
    port, data = free_port(), home / "data"
    started = [*other, str(programs[-1] / "pg_ctl"), "-D", str(data), "-w"]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={home}"
    try:
        subprocess.run(
            [*other, str(programs[-1] / "initdb"), "-D", str(data), "-U", "tuner"]
            + ["-A", "scram-sha-256", "--pwfile", str(word), "-E", "UTF8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=home,
        )
        subprocess.run(
            [*started, "-l", str(home / "log"), "-o", options, "start"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=home,
        )
        yield f"postgresql://tuner:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*started, "-m", "immediate", "stop"], capture_output=True, cwd=home)
        shutil.rmtree(home, ignore_errors=True)


def start_worker(folders: dict[str, str], out: Path, **options: Any) -> "subprocess.Popen[str]":
    root = Path(__file__).parent
    paths = [str(root.parent), str(root), *filter(None, sys.path)]
    given = folders | {"out": str(out), "n_trials": N_TRIALS, "sleep_s": 0.1} | options
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(given)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_race(url: str, name: str) -> int:
    """Return the process that races a tree, with some times measured and others to come."""
    storage = open_storage(url)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            study = optuna.load_study(study_name=name, storage=storage)
        except KeyError:
            time.sleep(0.2)
            continue
        for trial in study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING and trial.intermediate_values:
                return int(trial.user_attrs["worker"]["pid"])
        time.sleep(0.05)
    raise AssertionError("no tree was ever raced")


def test_three_workers_one_of_them_killed_give_what_one_alone_does(
    folders: dict[str, str], tmp_path: Path, postgresql: str
) -> None:
    single = start_worker(folders, tmp_path / "single.yaml", sleep_s=0)
    workers = [
        start_worker(folders, tmp_path / f"{i}.yaml", storage=postgresql, study="shared")
        for i in range(3)
    ]
    told: dict[int, str] = {}
    try:
        killed = wait_for_race(postgresql, "shared")
        os.kill(killed, signal.SIGKILL)
        for worker in (single, *workers):
            told[worker.pid] = worker.communicate(timeout=300)[1]
    finally:
        for worker in (single, *workers):
            worker.kill()
            told.setdefault(worker.pid, worker.communicate()[1])
    for worker in (single, *workers):
        assert worker.returncode == (-signal.SIGKILL if worker.pid == killed else 0), told

    trials = optuna.load_study(study_name="shared", storage=open_storage(postgresql)).trials
    measured = Counter(t.user_attrs["tree"] + t.params["draft"] for t in trials if outcome(t))
    assert len(measured) == N_TRIALS, "none is lost"
    assert set(measured.values()) == {1}, "none is measured twice"
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    left = [t for t in trials if t.user_attrs["worker"]["pid"] == killed and not outcome(t)]
    assert left, "the killed worker was measuring"
    assert all(t.user_attrs["tree"] + t.params["draft"] in measured for t in left)
    others = {t.user_attrs["worker"]["pid"] for t in trials if outcome(t)}
    assert others & {worker.pid for worker in workers if worker.pid != killed}

    steps = optuna.load_study(study_name="shared.steps", storage=open_storage(postgresql)).trials
    done = Counter(t.user_attrs["step"] for t in steps if t.state == TrialState.COMPLETE)
    assert done == {"describe": 1, "queue": 1, FINISH: 1}

    alone = load(tmp_path / "single.yaml")
    profiles = [load(tmp_path / f"{i}.yaml") for i in range(3) if workers[i].pid != killed]
    assert len({profile.content_sha256 for profile in profiles}) == 1
    for profile in profiles:
        assert (profile.decision, profile.draft, profile.tree) == (
            alone.decision,
            alone.draft,
            alone.tree,
        )
    assert alone.decision == "speculate"
    assert sum(profile.measurements is not None for profile in profiles) == 1

    said = "".join(told.values())
    assert "Waiting for another worker that is timing on cpu" in said
    written = "".join(
        (tmp_path / f"{i}.yaml").read_text() for i in range(3) if (tmp_path / f"{i}.yaml").exists()
    )
    assert "127.0.0.1" in written
    assert PASSWORD not in said + written


def outcome(trial: optuna.trial.FrozenTrial) -> bool:
    """Tell whether a trial was measured to its end, and not given up as a repeat."""
    return "outcome" in trial.user_attrs


# --- steps, without any decoding ----------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> StudyHome:
    return StudyHome(f"sqlite:///{tmp_path}/x.db", False, "x.db", "shared")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune.search.workers, "POLL_S", 0.02)
    monkeypatch.setattr("autotune.search.shared.POLL_S", 0.02)


@pytest.mark.filterwarnings("ignore")  # threads do not share what is caught
def test_a_step_is_taken_by_one_worker_while_the_others_wait(home: StudyHome) -> None:
    workers = [Workers(home, Silent()) for _ in range(3)]
    taken: list[int] = []
    busy = threading.Event()

    def work(number: int) -> None:
        with workers[number].once("a") as mine:
            if mine:
                assert not busy.is_set()
                busy.set()
                time.sleep(0.3)
                workers[number].keep("a", "by", number)
                taken.append(number)
            assert len(taken) == 1, "the others come when it is done"

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == 1
    assert {worker.kept("a", "by") for worker in workers} == set(taken)
    assert workers[0].is_done("a")
    assert not workers[0].is_done("b")


def test_a_step_that_fails_is_left_to_the_next_worker(home: StudyHome) -> None:
    first, second = Workers(home, Silent()), Workers(home, Silent())
    with pytest.raises(ZeroDivisionError), first.once("a"):
        raise ZeroDivisionError
    with second.once("a") as mine:
        assert mine
    with first.once("a") as mine:
        assert not mine


def test_a_step_of_a_worker_that_is_gone_is_taken_over(
    home: StudyHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Workers(home, Silent())
    monkeypatch.setattr(
        autotune.search.workers, "this_worker", lambda: {"host": "x", "pid": 1, "started": 0}
    )
    gone._begin("a", {})
    monkeypatch.undo()
    monkeypatch.setattr(
        autotune.search.workers, "is_alive", lambda t: t.user_attrs["worker"]["pid"] != 1
    )
    with Workers(home, Silent()).once("a") as mine:
        assert mine


FACTS = {
    "device": {"kind": "cpu", "name": "A", "count": 2, "memory_gib": 23.5, "threads": 2},
    "sample": "ab",
}


def test_workers_that_would_measure_something_else_are_refused(home: StudyHome) -> None:
    Workers(home, Silent()).join(FACTS)
    again = FACTS | {"device": {**FACTS["device"], "memory_gib": 24.0, "torch": "9.9"}}
    Workers(home, Silent()).join(again)
    other = FACTS | {"device": {**FACTS["device"], "name": "B"}}
    with pytest.raises(UsageError, match=r"another device \(device cpu, A, 2.* there, cpu, B, 2"):
        Workers(home, Silent()).join(other)
    with pytest.raises(UsageError, match="another sample"):
        Workers(home, Silent()).join(FACTS | {"sample": "cd"})


def test_devices_are_the_same_by_the_rules_of_trust() -> None:
    device = Device(kind="cuda", name="T4", count=40, memory_gib=15.0, threads=2, driver="1")
    assert same_device(device, device.model_copy(update={"threads": 8, "driver": "2"}))
    assert not same_device(device, device.model_copy(update={"memory_gib": 20.0}))
    assert not same_device(device, device.model_copy(update={"name": None}))


def test_one_worker_at_a_time_is_on_a_device_and_it_is_said_when_another_waits(
    home: StudyHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []

    class Told(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    first, second = Workers(home, Silent()), Workers(home, Told())
    inside = threading.Event()

    def wait() -> None:
        with second.alone_on(torch.device("cpu")):
            inside.set()

    with first.alone_on(torch.device("cpu")):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not inside.wait(0.3)
    assert inside.wait(30)
    thread.join()
    assert said == ["Waiting for another worker that is timing on cpu."]


def test_a_study_is_shared_in_a_storage_and_joined_without_resume(tmp_path: Path) -> None:
    for storage, resume, reason in ((None, False, "--storage"), ("sqlite://", True, "--resume")):
        with (
            pytest.raises(UsageError, match=reason),
            study_home(tmp_path / "x.yaml", storage, resume=resume, study="s"),
        ):
            pass
    with study_home(
        tmp_path / "x.yaml", "sqlite:///x?password=secret", resume=False, study="s"
    ) as h:
        assert h.study == "s"
        assert "secret" not in h.label
    assert type(workers_of(StudyHome(tmp_path / "x.log", False, "x"), Silent())) is Alone
    with pytest.raises(SpectuneError, match="cannot be used") as caught:
        Workers(StudyHome("postgresql://me:secret@localhost:1/x", False, "x", "s"), Silent())
    assert "secret" not in str(caught.value)


# --- trees, with invented times -----------------------------------------------------------------


def shared(home: StudyHome) -> SharedStudy:
    return SharedStudy(
        Workers(home, Silent()),
        torch.device("cpu"),
        spaces=SPACES,
        predict=predict,
        storage=home.storage,
        name="shared",
        seed=0,
    )


@pytest.mark.filterwarnings("ignore")  # threads do not share what is caught
def test_workers_share_trees_and_all_know_them_all(
    home: StudyHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    objectives = [Objective(), Objective()]
    studies = [shared(home), shared(home)]
    results: dict[int, list[Candidate]] = {}

    def work(number: int) -> None:
        results[number] = studies[number].run(FIRST, objectives[number], 12)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    points = [{(c.draft, c.tree) for c in results[number]} for number in range(2)]
    assert points[0] == points[1]
    assert len(points[0]) == 12
    ran = [{key[1:] for key in o.runs if not key[2].is_plain} for o in objectives]
    assert not ran[0] & ran[1], "no tree on both"
    assert ran[0] | ran[1] == {(d, t) for d, t in points[0] if not t.is_plain}


def test_a_space_of_one_tree_ends_the_search_of_all(
    home: StudyHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("autotune.search.measured.MAX_REPEATS", 3)
    spaces = {"lookup": SearchSpace(1, 1, 1, 1)}
    study = SharedStudy(
        Workers(home, Silent()),
        torch.device("cpu"),
        spaces=spaces,
        predict=predict,
        storage=home.storage,
        name="shared",
        seed=0,
    )
    first = [
        Candidate("lookup", PLAIN, PLAIN_PREDICTION),
        Candidate("lookup", TreeConfig.chain(1), predict("lookup", TreeConfig.chain(1))),
    ]
    assert len(study.run(first, Objective(), 5)) == 2
