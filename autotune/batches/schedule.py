"""From measured batches to a schedule: proved trees up to a measured size each, then plain."""

from collections.abc import Sequence
from dataclasses import dataclass

from profiles import BatchRange, BatchRuns
from profiles.batches import FIRST_BATCH

from ..candidates import Candidate
from ..job import Job
from ..progress import Silent
from ..proving import Proof
from ..tracing import Conversation
from .proving import MIN_BATCHES, SizeProof, prove_sizes
from .trying import SizeTimes, measure_sizes


@dataclass(frozen=True)
class BatchResults:
    """What was found about batches.

    Attributes:
        sizes: Every size asked for, on tune prompts.
        proofs: The sizes judged on the holdout, up to the first that failed.
    """

    sizes: Sequence[SizeTimes] = ()
    proofs: Sequence[SizeProof] = ()

    @property
    def schedule(self) -> list[BatchRange]:
        """What every batch runs; empty if no size was asked for."""
        if not self.sizes:
            return []
        proved = [proof for proof in self.proofs if proof.is_faster]
        ranges, first = [], FIRST_BATCH
        for proof in proved:
            ranges.append(
                BatchRange(
                    batch=[first, proof.size],
                    decision="speculate",
                    reason=f"Faster than plain decoding: {proof.figures()}.",
                    tree=proof.tree,
                    evidence=proof.evidence,
                )
            )
            first = proof.size + 1
        return [
            *ranges,
            _plain_range(first, self.sizes[len(proved) :], self.proofs[len(proved) :]),
        ]

    @property
    def runs(self) -> list[BatchRuns]:
        """The times behind it."""
        tried = [
            BatchRuns(
                rows=times.size,
                tree=tree,
                prompts="tune",
                plain_ms=[1e3 * seconds for seconds in times.plain_s],
                speculative_ms=[1e3 * run.total_s for run in runs],
            )
            for times in self.sizes
            for tree, runs in times.trees.items()
        ]
        judged = [
            BatchRuns(
                rows=proof.size,
                tree=proof.tree,
                prompts="holdout",
                plain_ms=[1e3 * seconds for seconds in proof.times.plain_s],
                speculative_ms=[1e3 * seconds for seconds in proof.times.speculative_s],
            )
            for proof in self.proofs
        ]
        return tried + judged


def tune_batches(
    job: Job,
    measured: Sequence[Candidate],
    proof: Proof | None,
    texts: Sequence[Conversation],
    unseen: Sequence[Conversation],
    progress: Silent,
) -> BatchResults:
    """Choose trees for the batch sizes asked for and prove them.

    Nothing is measured where a single prompt is decoded plainly: batches are, too.
    """
    if proof is None or proof.winner is None:
        return BatchResults()
    leader = proof.rungs[proof.winner]
    sizes = measure_sizes(job, leader, measured, texts, progress)
    return BatchResults(sizes, prove_sizes(job, leader.draft, sizes, unseen, progress))


def _plain_range(
    first: int, sizes: Sequence[SizeTimes], proofs: Sequence[SizeProof]
) -> BatchRange:
    """Return the range that ends a schedule.

    Args:
        first: Its smallest batch.
        sizes: The sizes that are not proved.
        proofs: The judgement on the first of these, if there is one.
    """
    tried = evidence = None
    if not sizes:
        reason = "Larger batches were not measured."
    elif proofs:
        tried, evidence = proofs[0].tree, proofs[0].evidence
        reason = _not_proved(proofs[0])
    elif (n_fit := sizes[0].n_fit) < sizes[0].size:
        reason = f"Not measured: the memory holds {n_fit} prompts at a time, not {sizes[0].size}."
    elif (tried := sizes[0].best) is None:
        reason = f"Not measured: there are fewer than {sizes[0].size} tune prompts."
    elif (speedup := sizes[0].speedup(tried)) > 1:
        reason = f"Insufficient evidence: fewer than {sizes[0].size} prompts were held out."
    else:
        reason = f"No tree was faster on {sizes[0].size} tune prompts at a time: {speedup:.3f}x."
    return BatchRange(
        batch=[first, None], decision="plain", reason=reason, tried=tried, evidence=evidence
    )


def _not_proved(proof: SizeProof) -> str:
    if (n := len(proof.times.plain_s)) >= MIN_BATCHES:
        return f"Not proved faster than plain decoding: {proof.figures()}."
    return (
        f"Insufficient evidence: {n} batches of {proof.size} held-out prompts prove nothing; hold "
        f"out {MIN_BATCHES * proof.size} prompts (--holdout-prompts)."
    )
