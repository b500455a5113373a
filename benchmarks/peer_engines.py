"""How vLLM's CPU build, llama.cpp and OpenVINO GenAI are started, asked and understood.

Each runs in an environment of its own with the threads of ours, greedily, one request at a time,
the prompt as token ids, its end token ignored and prefix caches off, so that all do one task.
"""

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from peer_process import PeerError, PeerProcess

from engine.timing import TimedText
from engine.trace import Trace

START_S = 600.0
ANSWER_S = 300.0

N_DRAFT_TOKENS, MAX_MATCH = 4, 4
"""Of every n-gram mode: tokens drafted at once, and the longest n-gram looked for."""

N_SUFFIX_TOKENS = 8
"""Most tokens that vLLM's suffix mode drafts at once."""


class Peer:
    """An engine in one mode, as a process.

    Args:
        name: Its name in tables, beginning with the engine's.
        logs: Folder for its log.
    """

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self._log = logs / f"{name.replace(' ', '-')}.log"
        self._process: PeerProcess | None = None

    def start(self) -> None:
        """Start it, wait until it can answer, and let it sleep.

        Raises:
            PeerError: It did not start.
        """
        self._process = self._launch()
        self._process.wait_until(self._is_ready, START_S)
        with self.awake():
            self._greet()

    def run(self, trace: Trace) -> TimedText:
        """Answer a trace's prompt with as many tokens as the trace has."""
        raise NotImplementedError

    def awake(self) -> AbstractContextManager[None]:
        """Let it run inside the `with` block only."""
        return self._running.awake()

    def stop(self) -> None:
        """End it, if it was started."""
        if self._process is not None:
            self._process.stop()

    @property
    def _running(self) -> PeerProcess:
        if self._process is None:
            raise PeerError(f"{self.name} was not started")
        return self._process

    def _launch(self) -> PeerProcess:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _greet(self) -> None:
        """Check what it says when it is ready."""


class HttpPeer(Peer):
    """A server that says on `/health` when it is ready."""

    def __init__(self, name: str, logs: Path) -> None:
        super().__init__(name, logs)
        self._port = free_port()

    def _is_ready(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the lines of an answer as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise PeerError(f"it answered {response.status}: {response.read(300)!r}")
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"no answer ({error!r}): {self._running.last_line()}") from error
        finally:
            connection.close()


class Vllm(HttpPeer):
    """vLLM's server.

    Args:
        mode: `plain`, `n-gram` or `suffix`.
        python: Python of its environment.
        model: Folder of the model.
        dtype: Such as `bfloat16`.
        threads: CPU threads.
        max_tokens: Longest prompt and answer together.
        logs: Folder for its log.
    """

    SPECULATION: dict[str, dict[str, Any]] = {
        "n-gram": {
            "method": "ngram",
            "num_speculative_tokens": N_DRAFT_TOKENS,
            "prompt_lookup_max": MAX_MATCH,
            "prompt_lookup_min": 2,
        },
        "suffix": {"method": "suffix", "num_speculative_tokens": N_SUFFIX_TOKENS},
    }

    def __init__(
        self,
        mode: str,
        *,
        python: Path,
        model: Path,
        dtype: str,
        threads: int,
        max_tokens: int,
        logs: Path,
    ) -> None:
        super().__init__(f"vLLM {mode}", logs)
        self._environment = self.environment(python, threads)
        self._command: list[str | Path] = [python, "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", model, "--served-model-name", "target", "--dtype", dtype]
        self._command += ["--max-model-len", str(max_tokens), "--no-enable-prefix-caching"]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port)]
        if mode in self.SPECULATION:
            self._command += ["--speculative-config", json.dumps(self.SPECULATION[mode])]

    @staticmethod
    def modes(python: Path) -> list[str]:
        """Return the modes an environment offers: suffix needs the package arctic-inference."""
        suffix = list(python.parent.parent.glob("lib/python*/site-packages/arctic_inference"))
        return ["plain", "n-gram", *(["suffix"] if suffix else [])]

    @staticmethod
    def environment(python: Path, threads: int) -> dict[str, str]:
        """Return its variables; without Intel's OpenMP n-gram drafts are many times slower."""
        libraries = [
            *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
            python.parent.parent / "lib" / "libiomp5.so",
        ]
        return {
            "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
            "KMP_BLOCKTIME": "1",
            "OMP_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        }

    def run(self, trace: Trace) -> TimedText:
        body = {
            "model": "target",
            "prompt": trace.prompt,
            "max_tokens": len(trace.generated),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        started = time.perf_counter()
        return timed_stream(started, streamed_tokens(self._post("/v1/completions", body)))

    def _launch(self) -> PeerProcess:
        return PeerProcess(self._command, self._environment, self._log)


class LlamaCpp(HttpPeer):
    """llama.cpp's server.

    Args:
        mode: `plain` or `n-gram`.
        server: The program `llama-server`.
        model: The model as a GGUF file.
        threads: CPU threads.
        max_tokens: Longest prompt and answer together.
        logs: Folder for its log.
    """

    N_GRAM = (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"),
        *("--spec-ngram-simple-size-m", str(N_DRAFT_TOKENS)),
        *("--spec-draft-n-max", str(N_DRAFT_TOKENS)),
    )

    def __init__(
        self, mode: str, *, server: Path, model: Path, threads: int, max_tokens: int, logs: Path
    ) -> None:
        super().__init__(f"llama.cpp {mode}", logs)
        self._command: list[str | Path] = [server, "-m", model, "-c", str(max_tokens), "-np", "1"]
        self._command += ["-t", str(threads), "-tb", str(threads), "--no-webui", "--offline"]
        self._command += ["--host", "127.0.0.1", "--port", str(self._port)]
        if mode == "n-gram":
            self._command += self.N_GRAM

    def run(self, trace: Trace) -> TimedText:
        body = {
            "prompt": trace.prompt,
            "n_predict": len(trace.generated),
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        started = time.perf_counter()
        # Not streamed: a stream leaves out tokens that end within a character.
        answer = b"".join(self._post("/completion", body))
        return llama_answer(json.loads(answer), time.perf_counter() - started)

    def _launch(self) -> PeerProcess:
        return PeerProcess(self._command, {}, self._log)


class OpenVino(Peer):
    """OpenVINO GenAI, driven by `openvino_worker.py`.

    Args:
        mode: `plain` or `n-gram`.
        python: Python of its environment.
        model: Folder of the exported model.
        dtype: Such as `bfloat16`.
        threads: CPU threads.
        logs: Folder for its log.
    """

    PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

    def __init__(
        self, mode: str, *, python: Path, model: Path, dtype: str, threads: int, logs: Path
    ) -> None:
        super().__init__(f"OpenVINO {mode}", logs)
        n_draft = N_DRAFT_TOKENS if mode == "n-gram" else 0
        worker = Path(__file__).with_name("openvino_worker.py")
        self._command: list[str | Path] = [python, worker, model, self.PRECISION[dtype]]
        self._command += [str(number) for number in (threads, n_draft, MAX_MATCH)]

    def _greet(self) -> None:
        if (said := self._running.read_line().strip()) != "ready":
            raise PeerError(f"it said {said[:100]!r} instead of being ready")

    def run(self, trace: Trace) -> TimedText:
        request = json.dumps({"prompt": trace.prompt, "n": len(trace.generated)})
        answer = json.loads(self._running.ask(request, ANSWER_S))
        return TimedText(
            answer["total_s"], answer["decode_s"], tuple(answer["tokens"]), answer["n_first"]
        )

    def _launch(self) -> PeerProcess:
        return PeerProcess(self._command, {"PYTHONPATH": ""}, self._log, piped=True)

    def _is_ready(self) -> bool:
        return self._running.has_line()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def streamed_tokens(lines: Iterable[bytes]) -> Iterator[list[int]]:
    """Yield the token ids of every piece of a streamed completion.

    Raises:
        PeerError: The stream holds an error, or no token ids.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        piece = json.loads(data)
        if "error" in piece:
            raise PeerError(f"it answered {piece['error']}")
        for choice in piece["choices"]:
            if choice.get("token_ids") is None:
                raise PeerError(
                    "it sends no token ids; take a version that knows return_token_ids"
                )
            yield choice["token_ids"]


def timed_stream(started: float, pieces: Iterable[Sequence[int]]) -> TimedText:
    """Read a stream of token ids to its end, with the times of the first and the last ones."""
    tokens: list[int] = []
    first = last = started
    n_first = 0
    for piece in pieces:
        if not piece:
            continue
        last = time.perf_counter()
        if not tokens:
            first, n_first = last, len(piece)
        tokens += piece
    return TimedText(last - started, last - first, tuple(tokens), n_first)


def llama_answer(answer: dict[str, Any], total_s: float) -> TimedText:
    """Read llama.cpp's answer: its own clock knows when the first token was there."""
    decode_s = answer["timings"]["predicted_ms"] / 1e3
    return TimedText(total_s, min(decode_s, total_s), tuple(answer["tokens"]))
