"""Recording a pass once and playing it back: CUDA graphs, and the same interface without them.

A pass over a few tokens is hundreds of small kernels, and on a fast device launching them takes
longer than running them. A graph is launched as one. What is recorded must read and write the
same memory every time, with the same shapes: see `engine.static`.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch

T = TypeVar("T")

N_WARM = 3
"""Runs before a pass is recorded: in the first ones libraries choose kernels and allocate."""


class Recorder(ABC):
    """Records passes.

    Attributes:
        n_recorded: Passes recorded so far, by all recorders: a timed run during which it grew was
            a warm-up.
    """

    n_recorded: ClassVar[int] = 0

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return a function that does the work again, on what its inputs hold by then.

        Its result is overwritten by its next call.
        """
        Recorder.n_recorded += 1
        return self._recorded(work)

    @abstractmethod
    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return the function that plays the work back."""


class CallAgain(Recorder):
    """Plays a pass back by calling it: to test, on any device, what is recorded on some."""

    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        return work


class CudaGraphs(Recorder):
    """Records passes as CUDA graphs.

    Each has memory of its own: graphs that share some must be played back in the order in which
    they were recorded, and rounds do not keep to any.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        """Record; what cannot be recorded is called again, after a warning."""
        try:
            with torch.cuda.device(self._device):
                return self._captured(work)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"a pass runs without a CUDA graph: {reason}", stacklevel=3)
            return work

    def _captured(self, work: Callable[[], T]) -> Callable[[], T]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(N_WARM):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            result = work()

        def play() -> T:
            graph.replay()
            return result

        return play


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records passes on a device; None where they run as they come."""
    return CudaGraphs(device) if device.type == "cuda" else None
