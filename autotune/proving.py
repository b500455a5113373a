"""Step 6: the rungs, fixed before the holdout is seen, against plain on the holdout."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.decoder import SpeculativeDecoder
from engine.forced import ForcedRun, plain_over_generate, run_forced
from engine.pair import LoadedTarget
from profiles import Evidence, Noise, Serving, Speedup

from .candidates import Candidate, best_chain, best_shallow
from .holdout import (
    MAX_RUNGS,
    PairedTimes,
    Pairs,
    Verdict,
    first_proved,
    judge,
    measure_block,
    paired,
)
from .job import Job
from .progress import Silent, Tick
from .racing import is_ahead
from .steady import Steadily, measure_steadily, pace_of
from .tracing import Conversation, flatten

Block = list[tuple[list[ForcedRun], list[ForcedRun]]]
"""The runs on one prompt: by side, plain first, there and back, by turn."""

N_BASELINE_PROMPTS = 4
"""Prompts on which plain decoding is compared with transformers' generate."""


@dataclass(frozen=True)
class Proof:
    """What the holdout says.

    Attributes:
        rungs: The candidates, in the order fixed beforehand.
        times: Their times by prompt, next to plain.
        evidence: Their figures; none if no prompt was measured undisturbed.
        verdicts: The test's results.
        steadily: Seconds by prompt and run, and how steady the machine was.
    """

    rungs: tuple[Candidate, ...]
    times: tuple[PairedTimes, ...]
    evidence: tuple[Evidence, ...]
    verdicts: tuple[Verdict, ...]
    steadily: Steadily[Pairs]

    @property
    def winner(self) -> int | None:
        """Index of the first rung proved faster, or None."""
        return first_proved(self.verdicts)

    @property
    def closest(self) -> Verdict:
        """The winner's verdict, or that of the rung which the fewest prompts would settle."""
        if self.winner is not None:
            return self.verdicts[self.winner]
        return min(self.verdicts, key=lambda v: v.n_prompts_needed or math.inf)

    def noise(self, before: Noise) -> Noise:
        """Return how steady the machine was, the holdout included."""
        steadily = self.steadily
        seen = {"slowest": steadily.slowest, "remeasured": steadily.n_remeasured}
        return Noise(**before.model_dump() | seen | {"left_out": steadily.n_left_out})

    def run_noise(self, rung: int) -> float | None:
        """Return the deviation of a single run's log time, from the two of each prompt."""
        blocks = self.steadily.blocks.values()
        pairs = [block[side] for block in blocks for side in (0, 1 + rung)]
        if len(blocks) < 2:
            return None
        return statistics.stdev(math.log(there / back) for there, back in pairs) / math.sqrt(2)


def choose_rungs(measured: Sequence[Candidate]) -> list[Candidate]:
    """Return the leader of the measured trees, then a shallow tree and a chain.

    Only trees that were measured to the end and came out ahead of plain. The shallow tree is
    there in case that the leader fails: it is spared where the leader is ahead beyond doubt.
    """
    ahead = [c for c in measured if c.speedup is not None and c.speedup > 1]
    ahead.sort(key=lambda c: -(c.speedup or 0))
    chosen = [*ahead[:1], best_shallow(ahead), best_chain(ahead)]
    if ahead and is_ahead(ahead[0].ratios):
        del chosen[1]
    return list(dict.fromkeys(c for c in chosen if c is not None))[:MAX_RUNGS]


def prove(
    job: Job,
    rungs: Sequence[Candidate],
    servings: Sequence[Serving],
    conversations: Sequence[Conversation],
    progress: Silent,
) -> Proof:
    """Time every rung on the path that will serve, and judge it."""
    loaded, sampling = job.loaded, job.settings.sampling
    plain = SpeculativeDecoder(loaded, sampling=sampling)
    decoders = [
        SpeculativeDecoder(loaded, job.drafts[c.draft].draft, c.tree, sampling, serving)
        for c, serving in zip(rungs, servings, strict=True)
    ]
    n_runs = len(conversations) * 2 * (len(rungs) + 1)
    with progress.step("Proving on the holdout", n_runs) as tick:
        steadily = run_interleaved([plain, *decoders], conversations, job.plain_token_s, tick)
    if note := steadily.summary():
        progress.say(f"Warning: {note}")
    blocks = list(steadily.blocks.values())
    times = times_of(blocks, len(rungs))
    over_generate = plain_over_generate(loaded, flatten(conversations)[:N_BASELINE_PROMPTS])
    verdicts = [judge(pair, len(rungs)) for pair in times]
    evidence = [
        _evidence(loaded, verdict, pair, _runs(blocks, 0), _runs(blocks, 1 + rung), over_generate)
        for rung, (verdict, pair) in enumerate(zip(verdicts, times, strict=True))
        if blocks
    ]
    return Proof(
        tuple(rungs),
        tuple(times),
        tuple(evidence),
        tuple(verdicts),
        steadily.mapped(lambda block: [seconds_of(side) for side in block]),
    )


def run_interleaved(
    decoders: Sequence[SpeculativeDecoder],
    conversations: Sequence[Conversation],
    pass_s: float,
    tick: Tick,
) -> Steadily[Block]:
    """Run decoders on forced text, there and back on every prompt, at the machine's steady pace.

    Args:
        decoders: The plain one, then at least one other.
        conversations: What they are made to say.
        pass_s: Usual seconds of the fixed pass, from earlier in the job.
        tick: Called after each run.
    """

    def run(conversation: Conversation, decoder: SpeculativeDecoder) -> list[ForcedRun]:
        done = [run_forced(decoder, trace) for trace in conversation]
        tick()
        return done

    served: set[int] = set()

    def measure(prompt: int) -> Block:
        conversation = conversations[prompt]
        if prompt in served:  # measured anew: no draft may find the answer it is to guess
            for decoder in decoders:
                decoder.forget()
        block = measure_block(
            len(decoders) - 1, lambda rung: run(conversation, decoders[rung + 1])
        )
        for decoder in decoders:
            decoder.remember(conversation)
        served.add(prompt)
        return block

    target = decoders[0].loaded.target
    return measure_steadily(len(conversations), measure, lambda: pace_of(target, pass_s), pass_s)


def times_of(blocks: Sequence[Block], n_rungs: int) -> list[PairedTimes]:
    """Return total seconds by prompt of every rung against plain."""
    return paired([[seconds_of(side) for side in block] for block in blocks], n_rungs)


def seconds_of(side: tuple[list[ForcedRun], list[ForcedRun]]) -> tuple[float, float]:
    """Return the seconds of one side's two runs on a prompt, all turns together."""
    there, back = (sum(turn.total_s for turn in run) for run in side)
    return there, back


def _runs(blocks: Sequence[Block], side: int) -> list[ForcedRun]:
    return [turn for block in blocks for run in block[side] for turn in run]


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
        plain_first_token_ms=1e3 * sum(run.stats.prefill_s for run in plain) / len(plain),
        plain_over_transformers_generate=over_generate,
    )
