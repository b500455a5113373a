"""How vLLM's CPU build, llama.cpp and OpenVINO GenAI are started, asked and understood.

Each runs in an environment of its own with the threads of ours, greedily, one request at a time,
the prompt as token ids, its end token ignored and prefix caches off, so that all do one task.
"""

import json
import time
from pathlib import Path
from typing import Any

from autotune.serving_engines.interface import Deployment, Speculation
from autotune.serving_engines.process import ServerError, ServerProcess
from autotune.serving_engines.server import HttpServer, OpenAiServer, Server
from autotune.serving_engines.vllm import Vllm
from engine.timing import TimedText
from engine.trace import Trace
from profiles import DraftRef

ANSWER_S = 300.0

N_DRAFT_TOKENS, MAX_MATCH = 4, 4
"""Of every n-gram mode: tokens drafted at once, and the longest n-gram looked for."""

N_SUFFIX_TOKENS = 8
"""Most tokens that vLLM's suffix mode drafts at once."""

VLLM_MODES = {
    "n-gram": (DraftRef(kind="lookup", min_match=2, max_match=MAX_MATCH), N_DRAFT_TOKENS),
    # A history: like our own drafts it looks in the answers of the run so far, as by default.
    "suffix": (DraftRef(kind="suffix", min_match=1, max_match=24, history=10**6), N_SUFFIX_TOKENS),
}
"""vLLM's modes with a draft: the draft, and the tokens it drafts at once."""


def vllm_servers(python: Path, deployment: Deployment) -> list[OpenAiServer]:
    """Return vLLM's servers: plain, n-gram, and suffix where the package it needs is there."""
    engine = Vllm(python)
    servers = [engine.server(deployment, None)]
    for mode, (draft, depth) in VLLM_MODES.items():
        if mode != "suffix" or engine.has_suffix:
            servers.append(engine.server(deployment, Speculation(mode, draft, depth)))
            servers[-1].name = f"vLLM {mode}"
    return servers


class LlamaCpp(HttpServer):
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
        """Answer a trace's prompt with as many tokens as the trace has."""
        body = {
            "prompt": trace.prompt,
            "n_predict": len(trace.generated),
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        with self._explained():
            started = time.perf_counter()
            # Not streamed: a stream leaves out tokens that end within a character.
            answer = b"".join(self._client.post("/completion", body))
            return llama_answer(json.loads(answer), time.perf_counter() - started)

    def _launch(self) -> ServerProcess:
        return ServerProcess(self._command, {}, self._log)


class OpenVino(Server):
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
            raise ServerError(f"it said {said[:100]!r} instead of being ready")

    def run(self, trace: Trace) -> TimedText:
        """Answer a trace's prompt with as many tokens as the trace has."""
        request = json.dumps({"prompt": trace.prompt, "n": len(trace.generated)})
        answer = json.loads(self._running.ask(request, ANSWER_S))
        return TimedText(
            answer["total_s"], answer["decode_s"], tuple(answer["tokens"]), answer["n_first"]
        )

    def _launch(self) -> ServerProcess:
        return ServerProcess(self._command, {"PYTHONPATH": ""}, self._log, piped=True)

    def _is_ready(self) -> bool:
        return self._running.has_line()


def llama_answer(answer: dict[str, Any], total_s: float) -> TimedText:
    """Read llama.cpp's answer: its own clock knows when the first token was there."""
    decode_s = answer["timings"]["predicted_ms"] / 1e3
    return TimedText(total_s, min(decode_s, total_s), tuple(answer["tokens"]))
