"""Seconds: of a whole answer, and by phase of a round."""

import time
from collections import defaultdict
from dataclasses import dataclass

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

    On an accelerator the queue is drained before each lap, which costs time itself: such laps
    are for measuring rounds, whole requests are timed without them (`detailed=False`).
    """

    def __init__(self, device: torch.device, detailed: bool = True) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._detailed = detailed or device.type == "cpu"
        self._synchronize = device.type != "cpu"
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._synchronize and self._detailed:
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
        self.seconds[phase] += now - self._last
        self._last = now


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
