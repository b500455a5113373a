"""The peers of the benchmark: their processes, their answers, and the figures made of them."""

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
from peer_engines import HttpPeer, OpenVino, Vllm, llama_answer, streamed_tokens, timed_stream
from peer_figures import SPECULATIVE, domain_figures, overall_figures, pool, speed_cell
from peer_passes import pass_figures
from peer_process import PeerError, PeerProcess
from peer_records import PeerRecords
from peer_tables import tables

from autotune.bench.contenders import GENERATE, PLAIN_NAME
from autotune.bench.contest import Runs
from autotune.bench.measuring import FLOOR
from engine.pair import load_draft, load_target
from engine.timing import TimedText
from engine.trace import Trace
from pairs import save_noisy_copy, save_target

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
from peer_process import PeerProcess, exit_on_signals
exit_on_signals()
with ExitStack() as stack:
    code = "import time; time.sleep(600)"
    peer = PeerProcess([sys.executable, "-c", code], {}, Path(sys.argv[1]))
    stack.callback(peer.stop)
    with peer.awake():
        pass
    print(peer.pid, flush=True)
    time.sleep(600)
"""

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [13]:
            self.send_response(400); self.end_headers(); self.wfile.write(b"unlucky"); return
        self.send_response(200); self.end_headers()
        for i in range(body["max_tokens"]):
            piece = {"choices": [{"token_ids": [100 + i]}]}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + bytes([10, 10]))
        self.wfile.write(b"data: [DONE]")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def process(code: str, tmp_path: Path, *, piped: bool = False) -> PeerProcess:
    return PeerProcess([sys.executable, "-c", code], {}, tmp_path / "log", piped=piped)


def wait_for_status(pid: int, *wanted: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if psutil.Process(pid).status() in wanted:
            return
        time.sleep(0.01)
    raise AssertionError(f"{pid} is {psutil.Process(pid).status()}")


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
    for pid in (family.pid, child):
        assert not psutil.pid_exists(pid) or (
            psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody's child here
        )
    family.stop()  # a second time does nothing


def test_children_end_even_if_their_parent_has_ended_before(tmp_path: Path) -> None:
    family = process(FAMILY, tmp_path, piped=True)
    child = int(family.read_line())
    with family.awake():
        psutil.Process(family.pid).kill()
    family.stop()
    assert not psutil.pid_exists(child) or (psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_lines_go_to_a_worker_and_back_only_while_it_runs(tmp_path: Path) -> None:
    worker = process(ECHO, tmp_path, piped=True)
    try:
        with worker.awake():
            assert worker.ask("abc", timeout_s=30).strip() == "cba"
        with pytest.raises(PeerError, match="no answer"):
            worker.ask("abc", timeout_s=0.05)
    finally:
        worker.stop()


def test_a_process_that_ends_is_reported_with_the_last_thing_it_said(tmp_path: Path) -> None:
    dying = process("import sys; print('out of luck', file=sys.stderr); sys.exit(3)", tmp_path)
    with pytest.raises(PeerError, match="code 3: out of luck"):
        dying.wait_until(lambda: False, timeout_s=30)
    dying.stop()
    slow = process("import time; time.sleep(600)", tmp_path)
    with pytest.raises(PeerError, match="not ready after 0 s"):
        slow.wait_until(lambda: False, timeout_s=0)
    slow.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_benchmark_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    peer = int(owner.stdout.readline())
    owner.send_signal(number)
    assert owner.wait(60) != 0
    owner.stdout.close()
    assert not psutil.pid_exists(peer)


class FakeServer(Vllm):
    """A server in this Python that answers as vLLM does."""

    def _launch(self) -> PeerProcess:
        command = [sys.executable, "-c", SERVER, str(self._port)]
        return PeerProcess(command, {}, self._log)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpPeer]:
    peer = FakeServer(
        "plain",
        python=Path(sys.executable),
        model=tmp_path,
        dtype="bfloat16",
        threads=1,
        max_tokens=64,
        logs=tmp_path,
    )
    try:
        peer.start()
        yield peer
    finally:
        peer.stop()


def test_a_server_answers_with_as_many_tokens_as_asked_and_its_errors_are_told(
    server: HttpPeer,
) -> None:
    with server.awake():
        run = server.run(Trace("a", [1, 2], [0] * 3))
        assert run.token_ids == (100, 101, 102)
        assert run.n_first == 1
        assert 0 < run.decode_s < run.total_s
        with pytest.raises(PeerError, match="400.*unlucky"):
            server.run(Trace("a", [13], [0]))


def test_a_peer_that_cannot_start_can_be_stopped(tmp_path: Path) -> None:
    peer = OpenVino(
        "plain",
        python=Path(sys.executable),
        model=tmp_path,
        dtype="bfloat16",
        threads=1,
        logs=tmp_path,
    )
    with pytest.raises(PeerError, match="openvino|ended"):
        peer.start()
    peer.stop()


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
    with pytest.raises(PeerError, match=reason):
        list(streamed_tokens([b"data: " + json.dumps(piece).encode()]))


def test_llama_cpp_tells_when_the_first_token_was_there() -> None:
    answer = {"tokens": [4, 5, 6], "timings": {"prompt_ms": 40.0, "predicted_ms": 60.0}}
    run = llama_answer(answer, total_s=0.11)
    assert run.token_ids == (4, 5, 6)
    assert run.decode_s == pytest.approx(0.06)
    assert run.decode_tokens_per_s == pytest.approx(2 / 0.06)


def runs(**seconds: float) -> Runs:
    """Return two runs of four tokens per contender, of the given total seconds each."""
    return {
        name.replace("_", " "): [TimedText(s, s / 2, (1, 2, 3, 4)), TimedText(s, s / 2, (1,) * 4)]
        for name, s in seconds.items()
    }


def named(plain: float, speculative: float, generate: float, floor: float, **more: float) -> Runs:
    ours = {PLAIN_NAME: plain, SPECULATIVE: speculative, GENERATE: generate, FLOOR: floor}
    return {
        name: done for key, s in ours.items() for name, done in ((key, runs(x=s)["x"]),)
    } | runs(**more)


def test_figures_compare_with_the_best_mode_of_each_engine() -> None:
    here = named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0, vLLM_suffix=1.5, OpenVINO_plain=0.8)
    figures = domain_figures(here)
    assert figures["speculative_over_plain"] == pytest.approx(2.0)
    assert figures["speculative_over_vllm"] == pytest.approx(1.5)
    assert figures["speculative_over_vllm_against"] == "vLLM suffix"
    assert figures["speculative_over_best_peer"] == pytest.approx(0.8)
    assert figures["speculative_over_best_peer_against"] == "OpenVINO plain"
    alone = domain_figures(named(2.0, 1.0, 4.0, 0.5))
    assert "speculative_over_vllm" not in alone
    assert alone["speculative_over_best_peer_against"] == GENERATE


def test_overall_figures_pool_the_domains_and_leave_out_who_missed_one() -> None:
    domains = {
        "code": named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0),
        "chat": named(2.0, 2.0, 2.0, 0.5),
    }
    figures = overall_figures(domains)
    assert figures["plain_over_transformers"] == pytest.approx(6.0 / 4.0)
    assert figures["plain_over_floor"] == pytest.approx(4.0)
    assert "vLLM plain" not in pool(domains)
    assert len(pool(domains)[PLAIN_NAME]) == 4


def test_tables_show_every_contender_and_every_figure() -> None:
    domains = {"code": named(2.0, 1.0, 4.0, 0.5, vLLM_plain=3.0), "chat": named(2.0, 2, 2, 0.5)}
    figures = overall_figures(domains) | {n: domain_figures(r) for n, r in domains.items()}
    speeds, ratios = tables(domains, figures)
    assert list(speeds.columns[0].cells)[-1] == "vLLM plain"
    assert speed_cell(domains["code"], PLAIN_NAME) == "2 (3)"
    assert speed_cell(domains["chat"], "vLLM plain") == ""
    assert "speculative_over_vllm" in list(ratios.columns[1].cells)


def test_finished_domains_are_kept_for_the_same_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.json"
    records = PeerRecords(path, {"threads": 2})
    assert records.get("code") is None
    kept = named(2.0, 1.0, 4.0, 0.5)
    records.put("code", kept)
    assert PeerRecords(path, {"threads": 2}).get("code") == kept
    assert PeerRecords(path, {"threads": 1}).get("code") is None


def test_passes_and_draft_steps_are_timed_beside_plain_rounds(tmp_path: Path) -> None:
    target = load_target(str(save_target(tmp_path / "target")), dtype="float32", device="cpu")
    draft = load_draft(str(save_noisy_copy(tmp_path / "target", tmp_path / "draft")), target)
    texts = [Trace("a", [5, 6, 7], list(range(10, 40)))]
    figures = pass_figures(target, draft.draft, texts)
    for name in ("pass_8_over_1", "draft_step_share"):
        value, low, high = figures[name], figures[f"{name}_low"], figures[f"{name}_high"]
        assert value is not None and low is not None and high is not None
        assert 0 < low <= value <= high
