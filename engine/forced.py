"""Whole requests, or batches of them, on forced text, timed end to end."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .batch import BatchRound
from .decode import DecodeStats
from .decoder import SpeculativeDecoder
from .generate import run_generate
from .graphs import Recorder
from .pair import LoadedTarget
from .timing import synchronize
from .trace import Trace

MOST_WARM_UPS = 3
"""Runs of a request that may be spent on recording its passes; see `engine.graphs`."""


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
    """Decode a trace's prompt on the path that serves requests, with its text forced.

    A run in which passes were recorded was a warm-up: then it is run again.
    """
    for _ in range(1 + MOST_WARM_UPS):
        n_recorded = Recorder.n_recorded
        run = _run_once(decoder, trace)
        if Recorder.n_recorded == n_recorded:
            break
    return run


def _run_once(decoder: SpeculativeDecoder, trace: Trace) -> ForcedRun:
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


@dataclass(frozen=True)
class ForcedBatch:
    """One timed batch.

    Attributes:
        total_s: Wall seconds, prefills included.
        decode_s: Wall seconds of the rounds; the draft's prefills are in here.
        n_tokens: Tokens generated, the prefills' included.
        n_round_tokens: Tokens emitted by rounds.
        n_rounds: Rounds, each of all rows in flight.
        n_row_rounds: Rounds counted once for each row in flight.
        n_nodes: Draft nodes verified.
    """

    total_s: float
    decode_s: float
    n_tokens: int
    n_round_tokens: int
    n_rounds: int
    n_row_rounds: int
    n_nodes: int

    @property
    def tau(self) -> float:
        """Tokens per round and row."""
        return self.n_round_tokens / self.n_row_rounds if self.n_row_rounds else 1.0


def run_forced_batch(
    decoder: SpeculativeDecoder, traces: Sequence[Trace], batch_size: int | None = None
) -> ForcedBatch:
    """Decode several prompts at a time, their texts forced.

    Args:
        decoder: Decodes them.
        traces: Prompts and texts.
        batch_size: Most prompts in flight; all of them if None. Where rows end and no prompt is
            waiting, the others go on without them.
    """
    requests = [
        decoder.request(trace.prompt, max_new_tokens=len(trace.generated), forced=trace.generated)
        for trace in traces
    ]
    rounds: list[tuple[BatchRound, float]] = []
    synchronize(decoder.loaded.target.device)
    started = time.perf_counter()
    decoder.run_many(requests, batch_size or len(requests), lambda *done: rounds.append(done))
    synchronize(decoder.loaded.target.device)
    return ForcedBatch(
        total_s=time.perf_counter() - started,
        decode_s=sum(seconds for _, seconds in rounds),
        n_tokens=sum(len(trace.generated) for trace in traces),
        n_round_tokens=sum(done.n_emitted for done, _ in rounds),
        n_rounds=len(rounds),
        n_row_rounds=sum(done.n_rows for done, _ in rounds),
        n_nodes=sum(done.n_nodes for done, _ in rounds),
    )


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
