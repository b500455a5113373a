"""Servers as processes: woken and put to sleep, asked and understood, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import autotune.serving_engines.server
from autotune.serving_engines.client import streamed_tokens, timed_stream
from autotune.serving_engines.interface import Deployment, Speculation
from autotune.serving_engines.metrics import Counts, read_counts
from autotune.serving_engines.process import ServerError, ServerProcess
from autotune.serving_engines.server import OpenAiServer
from autotune.serving_engines.vllm import Vllm
from engine.trace import Trace
from fake_vllm import VERSION, make_environment, pids
from profiles import DraftRef, Sampling
from profiles.errors import UsageError

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"

OWNER = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from autotune.serving_engines.process import ServerProcess, interrupt_on_signals
interrupt_on_signals()
with ExitStack() as stack:
    code = "import time; time.sleep(600)"
    server = ServerProcess([sys.executable, "-c", code], {}, Path(sys.argv[1]))
    stack.callback(server.stop)
    with server.awake():
        pass
    print(server.pid, flush=True)
    time.sleep(600)
"""

LOOKUP = DraftRef(kind="lookup", min_match=1, max_match=5)

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 12.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
vllm:generation_tokens_total{engine="0"} 400.0
"""


def process(code: str, tmp_path: Path, *, piped: bool = False) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", code], {}, tmp_path / "log", piped=piped)


def wait_for_status(pid: int, *wanted: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if psutil.Process(pid).status() in wanted:
            return
        time.sleep(0.01)
    raise AssertionError(f"{pid} is {psutil.Process(pid).status()}")


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; one that is nobody's child here stays a zombie."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_sleeping_process_and_its_children_stand_still_and_end_with_stop(
    tmp_path: Path,
) -> None:
    family = process(FAMILY, tmp_path, piped=True)
    try:
        child = int(family.read_line())
        with family.awake():
            wait_for_status(child, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
        for pid in (family.pid, child):
            wait_for_status(pid, psutil.STATUS_STOPPED)
    finally:
        family.stop()
    assert all(is_gone(pid) for pid in (family.pid, child))
    family.stop()  # a second time does nothing


def test_children_end_even_if_their_parent_has_ended_before(tmp_path: Path) -> None:
    family = process(FAMILY, tmp_path, piped=True)
    child = int(family.read_line())
    with family.awake():
        psutil.Process(family.pid).kill()
    family.stop()
    assert is_gone(child)


def test_lines_go_to_a_worker_and_back_only_while_it_runs(tmp_path: Path) -> None:
    worker = process(ECHO, tmp_path, piped=True)
    try:
        with worker.awake():
            assert worker.ask("abc", timeout_s=30).strip() == "cba"
        with pytest.raises(ServerError, match="no answer"):
            worker.ask("abc", timeout_s=0.05)
    finally:
        worker.stop()


def test_a_process_that_ends_is_reported_with_the_last_thing_it_said(tmp_path: Path) -> None:
    dying = process("import sys; print('out of luck', file=sys.stderr); sys.exit(3)", tmp_path)
    with pytest.raises(ServerError, match="code 3: out of luck"):
        dying.wait_until(lambda: False, timeout_s=30)
    dying.stop()
    slow = process("import time; time.sleep(600)", tmp_path)
    with pytest.raises(ServerError, match="not ready after 0 s"):
        slow.wait_until(lambda: False, timeout_s=0)
    slow.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_job_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    owner.send_signal(number)
    assert owner.wait(60) != 0
    owner.stdout.close()
    assert not psutil.pid_exists(server)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_environment(tmp_path / "environment")


def deployment(tmp_path: Path) -> Deployment:
    return Deployment(
        model=tmp_path, dtype="float32", threads=1, max_tokens=64, logs=tmp_path / "logs"
    )


@pytest.fixture
def server(python: Path, tmp_path: Path) -> Iterator[OpenAiServer]:
    speculation = Speculation("lookup", LOOKUP, 4)
    server = Vllm(python).server(deployment(tmp_path), speculation)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_a_server_answers_with_as_many_tokens_as_asked_and_counts_what_it_accepted(
    server: OpenAiServer,
) -> None:
    with server.awake():
        assert server.counts() == Counts(0, 0, 0, (0, 0, 0, 0))
        run = server.run(Trace("a", [1, 3], [0] * 12))
        assert run.n_tokens == 12
        assert run.token_ids[:2] == (34, 41)
        assert run.n_first == 1
        assert 0 < run.decode_s < run.total_s
        # 0, 4, 1 and 3 right in a row, and one token more in each round: 12 with the first.
        assert server.counts() == Counts(4, 16, 8, (3, 2, 2, 1))
        with pytest.raises(ServerError, match="400.*unlucky"):
            server.run(Trace("a", [13], [0]))


def test_a_sleeping_server_gives_no_answer(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.serving_engines.client.ANSWER_S", 0.2)
    with pytest.raises(ServerError, match="no answer"):
        server.run(Trace("a", [1], [0]))


def test_a_server_that_is_never_ready_is_given_up_and_ended(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune.serving_engines.server, "START_S", 0.0)
    monkeypatch.setattr(OpenAiServer, "_is_ready", lambda self: False)
    server = Vllm(python).server(deployment(tmp_path), None)
    with pytest.raises(ServerError, match="not ready"):
        server.start()
    server.stop()
    assert all(is_gone(pid) for pid in pids(python))


def test_where_memory_holds_one_engine_a_server_is_ended_between_its_turns(
    python: Path, tmp_path: Path
) -> None:
    engine = Vllm(python)
    engine.device_kind = "cuda"
    server = engine.server(deployment(tmp_path), None)
    server.start()
    assert all(is_gone(pid) for pid in pids(python))
    with server.awake():
        assert server.run(Trace("a", [1], [0] * 3)).n_tokens == 3
    assert len(pids(python)) == 2
    assert all(is_gone(pid) for pid in pids(python))


def test_the_version_comes_from_the_environment_and_one_without_vllm_is_refused(
    python: Path, tmp_path: Path
) -> None:
    engine = Vllm(python)
    assert (engine.version, engine.device_kind) == (f"{VERSION}+cpu", "cpu")
    for other in (tmp_path / "nothing", Path(sys.executable)):
        with pytest.raises(UsageError, match="--backend-python"):
            Vllm(other)


def test_sampling_is_passed_on(python: Path, tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9)
    drawn = Deployment(
        model=tmp_path,
        dtype="float32",
        threads=1,
        max_tokens=64,
        logs=tmp_path,
        sampling=sampling,
        seed=3,
    )
    body = Vllm(python).server(drawn, None).body([1], 5)
    assert {name: body[name] for name in ("temperature", "top_k", "top_p", "seed")} == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "seed": 3,
    }


def test_counters_are_read_from_the_metrics_page() -> None:
    counts = read_counts(PAGE, "vllm:spec_decode_num_")
    assert counts == Counts(12, 36, 17, (9, 5, 3))
    assert read_counts("vllm:generation_tokens_total 3.0", "vllm:spec_decode_num_") == Counts()
    assert counts - Counts(2, 6, 3, (2,)) == Counts(10, 30, 14, (7, 5, 3))
    assert counts + Counts() == counts


def test_a_stream_is_cut_into_tokens() -> None:
    lines = [
        b": ping\n",
        b'data: {"choices": [{"token_ids": [5, 6], "text": "x"}]}\n',
        b"\n",
        b'data: {"choices": [{"token_ids": []}]}\n',
        b'data: {"choices": [{"token_ids": [7]}]}\n',
        b"data: [DONE]\n",
        b'data: {"choices": [{"token_ids": [8]}]}\n',
    ]
    assert list(streamed_tokens(lines)) == [[5, 6], [], [7]]
    run = timed_stream(time.perf_counter(), streamed_tokens(lines))
    assert run.token_ids == (5, 6, 7)
    assert run.n_first == 2


@pytest.mark.parametrize(
    ("piece", "reason"),
    [({"error": {"message": "full"}}, "full"), ({"choices": [{"text": "x"}]}, "no token ids")],
)
def test_a_stream_without_tokens_is_refused(piece: dict[str, object], reason: str) -> None:
    with pytest.raises(ServerError, match=reason):
        list(streamed_tokens([b"data: " + json.dumps(piece).encode()]))
