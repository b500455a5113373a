"""Step 6: the rungs, fixed before the holdout is seen, against plain on the holdout."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, plain_over_generate, run_forced
from engine.pair import LoadedTarget
from profiles import Evidence, Speedup

from .holdout import MAX_RUNGS, PairedTimes, Verdict, first_proved, judge, measure_pairs
from .job import Job
from .progress import Silent
from .search import Candidate, best_chain, best_shallow
from .tracing import Conversation, flatten

N_BASELINE_PROMPTS = 4
"""Prompts on which plain decoding is compared with transformers' generate."""


@dataclass(frozen=True)
class Proof:
    """What the holdout says.

    Attributes:
        rungs: The candidates, in the order fixed beforehand.
        times: Their times by prompt, next to plain.
        evidence: Their figures.
        verdicts: The test's results.
        winner: Index of the first rung proved faster, or None.
    """

    rungs: tuple[Candidate, ...]
    times: tuple[PairedTimes, ...]
    evidence: tuple[Evidence, ...]
    verdicts: tuple[Verdict, ...]
    winner: int | None


def choose_rungs(measured: Sequence[Candidate]) -> list[Candidate]:
    """Return the leader of the measured trees, then a shallow tree and a chain as fallbacks.

    Only trees that were measured on every tune prompt and came out ahead of plain.
    """
    ahead = [c for c in measured if c.speedup is not None and c.speedup > 1]
    ahead.sort(key=lambda c: -(c.speedup or 0))
    chosen = [*ahead[:1], best_shallow(ahead), best_chain(ahead)]
    return list(dict.fromkeys(c for c in chosen if c is not None))[:MAX_RUNGS]


def prove(
    job: Job, rungs: Sequence[Candidate], conversations: Sequence[Conversation], progress: Silent
) -> Proof:
    """Time every rung on the path that will serve, and judge it."""
    loaded, sampling = job.loaded, job.settings.sampling
    plain = SpeculativeDecoder(loaded, sampling=sampling)
    decoders = [
        SpeculativeDecoder(loaded, job.drafts[c.draft].draft, c.tree, sampling) for c in rungs
    ]
    runs: dict[int, list[ForcedRun]] = {rung: [] for rung in range(-1, len(rungs))}
    n_runs = len(conversations) * 2 * (len(rungs) + 1)
    with progress.step("Proving on the holdout", n_runs) as tick:

        def run_s(prompt: int, rung: int) -> float:
            decoder = plain if rung < 0 else decoders[rung]
            done = [run_forced(decoder, trace) for trace in conversations[prompt]]
            runs[rung] += done
            tick()
            return sum(run.total_s for run in done)

        times = measure_pairs(len(conversations), len(rungs), run_s)
    over_generate = plain_over_generate(loaded, flatten(conversations)[:N_BASELINE_PROMPTS])
    verdicts = [judge(pair, len(rungs)) for pair in times]
    evidence = [
        _evidence(loaded, verdict, pair, runs[-1], runs[rung], over_generate)
        for rung, (verdict, pair) in enumerate(zip(verdicts, times, strict=True))
    ]
    return Proof(
        tuple(rungs), tuple(times), tuple(evidence), tuple(verdicts), first_proved(verdicts)
    )


def _evidence(
    loaded: LoadedTarget,
    verdict: Verdict,
    times: PairedTimes,
    plain: Sequence[ForcedRun],
    speculative: Sequence[ForcedRun],
    over_generate: float,
) -> Evidence:
    n_rounds = sum(run.stats.n_rounds for run in speculative)
    n_round_tokens = sum(run.stats.n_round_tokens for run in speculative)
    plain_rounds = sum(run.stats.n_rounds for run in plain)
    tau = break_even = 1.0
    if n_rounds and plain_rounds:  # else every answer is the prefill's single token
        tau = n_round_tokens / n_rounds
        plain_token_s = sum(run.decode_s for run in plain) / plain_rounds
        break_even = sum(run.decode_s for run in speculative) / n_rounds / plain_token_s
    device = "same threads" if loaded.target.device.type == "cpu" else "same device"
    return Evidence(
        baseline=f"plain decoding on this engine, same dtype, {device}",
        speedup=Speedup(
            ratio=verdict.ratio,
            low=max(verdict.low, 1e-6),
            confidence=verdict.confidence,
            worst_prompt=verdict.worst_prompt,
            prompts=verdict.n_prompts,
        ),
        decode_speedup=tau / break_even,
        tau=tau,
        break_even_tau=break_even,
        plain_tokens_per_s=sum(run.n_tokens for run in plain) / sum(times.plain_s),
        plain_over_transformers_generate=over_generate,
    )
