"""Seconds by phase of a round."""

import time
from collections import defaultdict

import torch


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
