"""Whole requests on forced text, timed end to end."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .decode import DecodeStats
from .decoder import SpeculativeDecoder
from .generate import run_generate
from .pair import LoadedTarget
from .target import Target
from .trace import Trace


@dataclass(frozen=True)
class ForcedRun:
    """One timed request.

    Attributes:
        total_s: Wall seconds, prefill included.
        decode_s: Wall seconds after the target's prefill; the draft's prefill is in here.
        n_tokens: Tokens generated, the prefill's included.
        stats: Counts of the rounds.
    """

    total_s: float
    decode_s: float
    n_tokens: int
    stats: DecodeStats


def run_forced(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
    """Decode a trace's prompt on the path that serves requests, with its text forced."""
    request = decoder.request(
        trace.prompt, max_new_tokens=len(trace.generated), forced=trace.generated
    )
    _synchronize(decoder.loaded.target)
    started = time.perf_counter()
    for _ in decoder.run(request):
        pass
    _synchronize(decoder.loaded.target)
    total_s = time.perf_counter() - started
    stats = request.stats
    return ForcedRun(total_s, total_s - stats.prefill_s, len(trace.generated), stats)


def plain_over_generate(loaded: LoadedTarget, traces: Sequence[Trace]) -> float:
    """Return the speed of our plain decoding over transformers' `generate`, interleaved.

    Greedy, same weights, dtype, threads and number of tokens; the median over the traces.
    """
    plain = SpeculativeDecoder(loaded)
    run_generate(loaded, traces[0])  # warm-up, like that of the plain path before
    ratios = []
    for i, trace in enumerate(traces):
        if i % 2:
            theirs = run_generate(loaded, trace).total_s
            ours = run_forced(plain, trace).total_s
        else:
            ours = run_forced(plain, trace).total_s
            theirs = run_generate(loaded, trace).total_s
        ratios.append(theirs / ours)
    return statistics.median(ratios)


@torch.inference_mode()
def reference_times(target: Target, n_passes: int, context: int = 64) -> list[float]:
    """Return the seconds of a fixed 1-token pass, repeated; their spread tells the noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (context,), generator=generator).tolist()
    cache = target.new_cache(context + 1)
    target.forward(tokens, cache, last_only=True)
    times = []
    for _ in range(n_passes):
        _synchronize(target)
        started = time.perf_counter()
        target.forward(tokens[:1], cache)
        _synchronize(target)
        times.append(time.perf_counter() - started)
        cache.truncate(context)
    return times


def _synchronize(target: Target) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
