"""The least time a target needs on a machine: bytes over bandwidth, operations over matrix rate.

Both rates are measured here, with the threads that decode. No engine can be faster than this
floor with these weights, so the distance to it says what is left to gain (the roofline model,
Williams, Waterman and Patterson 2009).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from .target import Target
from .timing import TimedText
from .trace import Trace

N_BYTES = 2**31
"""Bytes streamed to measure the read bandwidth: far more than any cache holds."""

SIDE = 2048
"""Rows and columns of the matrices multiplied to measure the matrix rate."""

N_REPEATS = 5


@dataclass(frozen=True)
class MachineLimits:
    """What the device can do at most.

    Attributes:
        bytes_per_s: Read bandwidth of its memory.
        operations_per_s: Matrix rate; a multiplication and an addition are two operations.
    """

    bytes_per_s: float
    operations_per_s: float

    def or_better(self, other: "MachineLimits") -> "MachineLimits":
        """Return the better of two measurements: a limit is what was reached at best."""
        return MachineLimits(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.operations_per_s, other.operations_per_s),
        )


@torch.inference_mode()
def measure_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Measure the read bandwidth and the matrix rate of a device, with the threads set now."""
    return MachineLimits(_bytes_per_s(device), _operations_per_s(device, dtype))


def _bytes_per_s(device: torch.device) -> float:
    n_bytes = N_BYTES
    if device.type == "cpu":
        n_bytes = min(n_bytes, psutil.virtual_memory().available // 4)
    data = torch.ones(n_bytes // 4, device=device)
    return n_bytes / _best_s(device, data.sum)


def _operations_per_s(device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    return 2 * SIDE**3 / _best_s(device, lambda: left @ right)


def _best_s(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(N_REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


@dataclass(frozen=True)
class Work:
    """What one pass of a target must read and compute.

    Attributes:
        body_bytes: Bytes of the weights that every pass reads, the output layer excluded.
        head_bytes: Bytes of the output layer.
        cache_bytes: Bytes of the cache per token held.
        body_operations: Operations per token, the output layer excluded.
        head_operations: Operations per token whose logits are computed.
    """

    body_bytes: int
    head_bytes: int
    cache_bytes: int
    body_operations: int
    head_operations: int

    def pass_s(
        self, limits: MachineLimits, n_tokens: int, context: int, n_logits: int = 1
    ) -> float:
        """Return the least seconds of a pass over new tokens, `n_logits` of them with logits."""
        read = self.body_bytes + self.head_bytes + self.cache_bytes * (context + n_tokens)
        operations = self.body_operations * n_tokens + self.head_operations * n_logits
        return max(read / limits.bytes_per_s, operations / limits.operations_per_s)

    def plain_text(self, limits: MachineLimits, trace: Trace) -> TimedText:
        """Return the least time in which a text can be decoded plainly."""
        n_prompt, n_new = len(trace.prompt), len(trace.generated)
        prefill_s = self.pass_s(limits, n_prompt, 0)
        decode_s = sum(self.pass_s(limits, 1, n_prompt + i) for i in range(n_new - 1))
        return TimedText(prefill_s + decode_s, decode_s, tuple(trace.generated))


def work_of(target: Target) -> Work | None:
    """Count what a pass of a target reads and computes.

    The input embedding counts only where it is the output layer, too: of a table a pass reads
    single rows. None for mixtures of experts, of which a pass reads a part that depends on the
    text.
    """
    config = target.config
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts")):
        return None
    if getattr(config, "n_routed_experts", None):
        return None
    embedding = target.model.get_input_embeddings().weight
    head = target.model.get_output_embeddings().weight
    outside = {id(embedding), id(head)}
    body = [p for p in target.model.parameters() if id(p) not in outside]
    return Work(
        body_bytes=sum(p.numel() * p.element_size() for p in body),
        head_bytes=head.numel() * head.element_size(),
        cache_bytes=target.cache_bytes,
        body_operations=2 * sum(p.numel() for p in body),
        head_operations=2 * head.numel(),
    )
