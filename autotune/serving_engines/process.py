"""A server or worker process that can sleep while others are timed, and is gone afterwards."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from profiles.errors import SpectuneError

STOP_S = 10.0
"""Seconds a process gets to end before it is killed."""


class ServerError(SpectuneError):
    """A server could not be started, or did not answer."""


def interrupt_on_signals() -> None:
    """Turn signals that end a process into KeyboardInterrupt, so that all its servers are ended.

    SIGINT is among them, as a job started in the background ignores it otherwise.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


class ServerProcess:
    """A process and its children.

    They stay in the process group of this job, so that whoever pauses every other group to
    measure in peace does not pause them.

    Args:
        command: What to run.
        environment: Variables beside those of this process.
        log: File that takes what it prints.
        piped: Whether stdin and stdout are pipes for lines of text; else only the log is written.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        log: Path,
        *,
        piped: bool = False,
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._popen = subprocess.Popen(
                [str(part) for part in command],
                env=os.environ | environment,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else errors,
                stderr=errors,
                bufsize=0,
            )
        self.pid = self._popen.pid
        self._leader = psutil.Process(self.pid)
        self._family = {self._leader}

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run inside the `with` block, and sleep after it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until it is ready.

        Raises:
            ServerError: It ended before, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._popen.poll() is not None:
                raise self._ended()
            if time.monotonic() > deadline:
                raise ServerError(f"it was not ready after {timeout_s:.0f} s: {self.last_line()}")
            time.sleep(0.2)

    def has_line(self) -> bool:
        """Tell whether a line can be read from a piped process, or that it has ended."""
        assert self._popen.stdout is not None  # noqa: S101 - piped
        return bool(select.select([self._popen.stdout], [], [], 0)[0])

    def ask(self, line: str, timeout_s: float) -> str:
        """Write a line to a piped process and return the line it answers.

        Raises:
            ServerError: It ended, or took too long.
        """
        assert self._popen.stdin is not None  # noqa: S101 - piped
        assert self._popen.stdout is not None  # noqa: S101 - piped
        try:
            self._popen.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        if not select.select([self._popen.stdout], [], [], timeout_s)[0]:
            raise ServerError(f"it gave no answer in {timeout_s:.0f} s: {self.last_line()}")
        return self.read_line()

    def read_line(self) -> str:
        """Read a line from a piped process."""
        assert self._popen.stdout is not None  # noqa: S101 - piped
        line = self._popen.stdout.readline()
        if not line:
            raise self._ended()
        return line.decode()

    def last_line(self) -> str:
        """Return the last line of the log that says something."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no message")

    def stop(self) -> None:
        """End the process and all its children, whatever state they are in."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_S)
        self._signal(signal.SIGKILL)  # children may have outlived it
        self._popen.wait()
        psutil.wait_procs(self._family, STOP_S)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()

    def _ended(self) -> ServerError:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_S)
        return ServerError(f"it ended with code {self._popen.returncode}: {self.last_line()}")

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, its children, and those that have outlived it."""
        with suppress(psutil.NoSuchProcess):
            self._family |= {*self._leader.children(recursive=True)}
        for process in self._family:
            with suppress(psutil.NoSuchProcess):  # it has ended
                process.send_signal(number)
