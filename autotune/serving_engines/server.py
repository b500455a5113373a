"""An engine as a process in one setting: started, asleep while others are timed, and ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.timing import TimedText
from engine.trace import Trace
from profiles import Sampling

from .client import Client, free_port, streamed_tokens, timed_stream
from .metrics import Counts, read_counts
from .process import ServerError, ServerProcess

START_S = 600.0
"""Seconds a server gets to be ready."""

MODEL = "target"
"""How a server calls the model it serves."""


class Server:
    """A process that decodes.

    Args:
        name: Its name in tables and in the name of its log.
        logs: Folder for its log.
        pauses: Whether it is stopped by a signal while others are timed. Otherwise it is ended and
            started again, for devices whose memory holds one engine at a time.

    Attributes:
        name: Its name.
        start_s: Seconds its last start took.
    """

    def __init__(self, name: str, logs: Path, *, pauses: bool = True) -> None:
        self.name = name
        self.start_s = 0.0
        self._log = logs / f"{name.replace(' ', '-').replace('/', '-')[-120:]}.log"
        self._pauses = pauses
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """Start it, wait until it can answer, and let it sleep.

        Raises:
            ServerError: It did not start.
        """
        self._launch_and_wait()
        if self._pauses:
            with self._running.awake():
                self._greet()
        else:
            self.stop()

    def run(self, trace: Trace) -> TimedText:
        """Answer a trace's prompt with as many tokens as the trace has."""
        raise NotImplementedError

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run inside the `with` block only."""
        if self._pauses:
            with self._running.awake():
                yield
            return
        self._launch_and_wait()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """End it and all its children, if it was started."""
        if self._process is not None:
            self._process.stop()

    @property
    def _running(self) -> ServerProcess:
        if self._process is None:
            raise ServerError(f"{self.name} was not started")
        return self._process

    def _launch_and_wait(self) -> None:
        started = time.monotonic()
        self._process = self._launch()
        self._process.wait_until(self._is_ready, START_S)
        self.start_s = time.monotonic() - started

    def _launch(self) -> ServerProcess:
        raise NotImplementedError

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _greet(self) -> None:
        """Check what it says when it is ready."""


class HttpServer(Server):
    """A server that says on `/health` when it is ready."""

    def __init__(self, name: str, logs: Path, *, pauses: bool = True) -> None:
        super().__init__(name, logs, pauses=pauses)
        self._port = free_port()
        self._client = Client(self._port)

    def _is_ready(self) -> bool:
        return self._client.is_healthy()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the last thing the server said to what went wrong with a request."""
        try:
            yield
        except ServerError as error:
            raise ServerError(
                f"{error}; its log ends with: {self._running.last_line()}"
            ) from error


class OpenAiServer(HttpServer):
    """A server with OpenAI's completions, streamed as token ids, and Prometheus' counters.

    Args:
        name: Its name.
        command: What to run, without host and port.
        environment: Variables beside those of this process.
        counters: What the names of its counters of speculation begin with.
        sampling: How tokens are drawn.
        seed: Of sampling.
        logs: Folder for its log.
        pauses: As for every server.
    """

    def __init__(
        self,
        name: str,
        *,
        command: list[str],
        environment: dict[str, str],
        counters: str,
        sampling: Sampling,
        seed: int,
        logs: Path,
        pauses: bool = True,
    ) -> None:
        super().__init__(name, logs, pauses=pauses)
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self._port)]
        self._environment = environment
        self._counters = counters
        self._drawing = _drawing(sampling, seed)

    def run(self, trace: Trace) -> TimedText:
        """Answer a trace's prompt with as many tokens as the trace has, the end token ignored."""
        return self._complete(trace.prompt, len(trace.generated), {"ignore_eos": True})

    def answer(self, prompt: list[int], max_new_tokens: int) -> TimedText:
        """Answer a prompt until it ends or the budget does."""
        return self._complete(prompt, max_new_tokens, {})

    def counts(self) -> Counts:
        """Return what it has drafted and accepted since it was started."""
        with self._explained():
            return read_counts(self._client.get("/metrics"), self._counters)

    def body(self, prompt: list[int], n_tokens: int) -> dict[str, Any]:
        """Return what is sent to have a prompt completed."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": n_tokens}
        return body | {"stream": True, "return_token_ids": True} | self._drawing

    def _complete(self, prompt: list[int], n_tokens: int, more: dict[str, Any]) -> TimedText:
        body = self.body(prompt, n_tokens) | more
        with self._explained():
            started = time.perf_counter()
            lines = self._client.post("/v1/completions", body)
            return timed_stream(started, streamed_tokens(lines))

    def _launch(self) -> ServerProcess:
        return ServerProcess(self._command, self._environment, self._log)


def _drawing(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return how tokens are drawn, in OpenAI's words and the usual additions to them."""
    if sampling.is_greedy:
        return {"temperature": 0.0}
    drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    return drawing | ({"top_k": sampling.top_k} if sampling.top_k else {})
