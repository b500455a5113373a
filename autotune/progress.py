"""Telling people what a long job is doing; everything goes to stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .console import LiteralConsole

Tick = Callable[[], None]


class Silent:
    """Says nothing: the progress of library calls."""

    def say(self, text: str) -> None:
        """Take a message and drop it."""

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Tick]:
        """Run a step of `total` units without showing it."""
        yield lambda: None


class OnTerminal(Silent):
    """Shows messages, and a bar with the time left for every step."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or LiteralConsole(stderr=True)

    def say(self, text: str) -> None:
        """Print a message."""
        self._console.print(text)

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Tick]:
        """Show a bar of `total` units while the step runs."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as bars:
            task = bars.add_task(title, total=total)
            yield lambda: bars.advance(task)
