"""Whole requests on forced text, timed end to end."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .decode import DecodeStats
from .decoder import SpeculativeDecoder
from .generate import run_generate
from .pair import LoadedTarget
from .timing import synchronize
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
    synchronize(decoder.loaded.target.device)
    started = time.perf_counter()
    for _ in decoder.run(request):
        pass
    synchronize(decoder.loaded.target.device)
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
