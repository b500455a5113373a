"""Seconds: of a whole answer, and by phase of a round."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TimedText:
    """One answer and the time it took.

    Attributes:
        total_s: Wall seconds from the prompt to the last token.
        decode_s: Those of them after the first tokens were there.
        token_ids: The answer.
        n_first: Tokens that came first, with the prefill; a speculating engine may hand over
            several at once.
    """

    total_s: float
    decode_s: float
    token_ids: tuple[int, ...]
    n_first: int = 1

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, end to end."""
        return self.n_tokens / self.total_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first ones; None if there were no others."""
        n = self.n_tokens - self.n_first
        return n / self.decode_s if n > 0 and self.decode_s > 0 else None


class PhaseClock:
    """A stopwatch with laps; every lap is added to the phase that it names.

    On CUDA a lap marks a place in the device's queue (an event) and waits for nothing; times are
    read when they are asked for. Other accelerators are drained before each lap, which costs time
    itself: there only measured rounds have laps (`detailed`).
    """

    def __init__(self, device: torch.device, detailed: bool = True) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._has_events = device.type == "cuda"
        self._detailed = detailed or device.type in ("cpu", "cuda")
        self._drains = device.type not in ("cpu", "cuda") and detailed
        self._marks: list[tuple[str, Any, Any]] = []
        self._last = self._now()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; on CUDA this waits for the last lap to be reached."""
        if self._marks:
            self._marks[-1][2].synchronize()
            for phase, start, end in self._marks:
                self._seconds[phase] += 1e-3 * start.elapsed_time(end)
            self._marks.clear()
        return self._seconds

    def _now(self) -> Any:
        """Return the time, or an event that will have it."""
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._drains:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def restart(self) -> None:
        """Start the next lap here."""
        self._last = self._now()

    def lap(self, phase: str) -> None:
        """End a lap and add it to `phase`."""
        if not self._detailed:
            return
        now = self._now()
        if self._has_events:
            self._marks.append((phase, self._last, now))
        else:
            self._seconds[phase] += now - self._last
        self._last = now


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
