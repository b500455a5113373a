"""The proof that a tree pays with several prompts at a time, on prompts the search never saw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedBatch, run_forced_batch
from engine.trace import Trace
from profiles import PLAIN, BatchEvidence, TreeConfig

from ..holdout import MIN_PROMPTS, PairedTimes, Verdict, judge, measure_block, paired
from ..job import Job
from ..progress import Silent, Tick
from ..steady import measure_steadily, pace_of
from ..tracing import Conversation
from .blocks import batch_decoder, batches_of
from .trying import SizeTimes

MIN_BATCHES = 3
"""Held-out batches below which nothing is proved."""


@dataclass(frozen=True)
class SizeProof:
    """What the holdout says of one batch size.

    Attributes:
        size: Prompts in flight.
        tree: The tree that was judged.
        times: Seconds by batch.
        verdict: The test's result; what it calls prompts are batches here.
        evidence: The figures; None if no batch was measured undisturbed.
    """

    size: int
    tree: TreeConfig
    times: PairedTimes
    verdict: Verdict
    evidence: BatchEvidence | None

    @property
    def is_faster(self) -> bool:
        """Whether the tree is proved faster than plain decoding."""
        n = len(self.times.plain_s)
        enough = n >= MIN_BATCHES and n * self.size >= MIN_PROMPTS
        return enough and self.evidence is not None and self.evidence.is_proved

    def figures(self) -> str:
        """Return what was found, in words."""
        verdict, n = self.verdict, len(self.times.plain_s)
        if not n:
            return f"no batch of {self.size} held-out prompts was measured undisturbed"
        return (
            f"{verdict.ratio:.3f}x in total, at least {verdict.low:.3f}x at "
            f"{100 * verdict.confidence:.0f} % confidence on {n} batches of {self.size} held-out "
            "prompts"
        )


def prove_sizes(
    job: Job,
    draft: str,
    sizes: Sequence[SizeTimes],
    conversations: Sequence[Conversation],
    progress: Silent,
) -> list[SizeProof]:
    """Judge the tree chosen for each size on the holdout, from small batches to large ones.

    The order is fixed beforehand and the first size that is not proved ends it: a fixed sequence
    of tests, each at the full level, keeps that level over all of them (Maurer, Hothorn and
    Lehmacher 1995). The proof for a single prompt is the first of the sequence.
    """
    proofs: list[SizeProof] = []
    for times in sizes:
        tree, batches = times.best, batches_of(conversations, times.size)
        if tree is None or times.speedup(tree) <= 1 or not batches:
            break
        proofs.append(_prove_size(job, draft, times.size, tree, batches, progress))
        if not proofs[-1].is_faster:
            break
    return proofs


def _prove_size(
    job: Job,
    draft: str,
    size: int,
    tree: TreeConfig,
    batches: Sequence[Sequence[Trace]],
    progress: Silent,
) -> SizeProof:
    sides = [batch_decoder(job, draft, PLAIN), batch_decoder(job, draft, tree)]
    target, pass_s = job.loaded.target, job.plain_token_s
    with progress.step(f"Proving batches of {size}", 4 * len(batches)) as tick:
        steadily = measure_steadily(
            len(batches),
            lambda number: measure_block(1, _runner(sides, batches[number], tick)),
            lambda: pace_of(target, pass_s),
            pass_s,
        )
    if note := steadily.summary():
        progress.say(f"Warning, batches of {size}: {note}")
    return judged(size, tree, list(steadily.blocks.values()))


def _runner(
    sides: Sequence[SpeculativeDecoder], batch: Sequence[Trace], tick: Tick
) -> Callable[[int], ForcedBatch]:
    def run(rung: int) -> ForcedBatch:
        done = run_forced_batch(sides[rung + 1], batch)
        tick()
        return done

    return run


def judged(
    size: int, tree: TreeConfig, blocks: Sequence[list[tuple[ForcedBatch, ForcedBatch]]]
) -> SizeProof:
    """Return the judgement on one size.

    Args:
        size: Prompts in flight.
        tree: The tree.
        blocks: The runs by batch and side, plain first, there and back.
    """
    seconds = [[(there.total_s, back.total_s) for there, back in block] for block in blocks]
    (times,) = paired(seconds, 1)
    verdict = judge(times, 1)
    if not blocks:
        return SizeProof(size, tree, times, verdict, None)
    plain, trees = ([run for block in blocks for run in block[side]] for side in (0, 1))
    evidence = BatchEvidence(
        baseline="plain decoding of the same batches on this engine, same dtype and device",
        rows=size,
        ratio=verdict.ratio,
        low=verdict.low,
        confidence=verdict.confidence,
        worst_batch=verdict.worst_prompt,
        batches=len(blocks),
        tau=sum(run.n_round_tokens for run in trees) / sum(run.n_row_rounds for run in trees),
        plain_tokens_per_s=sum(run.n_tokens for run in plain) / sum(run.total_s for run in plain),
    )
    return SizeProof(size, tree, times, verdict, evidence)
