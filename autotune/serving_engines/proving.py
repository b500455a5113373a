"""Step 6 for a serving engine: servers that were never asked these prompts, against plain.

Blocks of units go to plain, the rungs, and the same backwards (A B B A), so that a server is woken
twice a block. The machine's pace is read in the plain server's turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.trace import Trace
from profiles import Evidence, Speedup

from ..candidates import Candidate
from ..holdout import Pairs, Verdict, judge, paired, run_order
from ..progress import Silent, Tick
from ..proving import Proof
from ..steady import Steadily, measure_steadily
from .interface import Decoding
from .turns import Turn, Unit, Work, take_turn

BLOCK = 8
"""Units of a turn."""


@dataclass(frozen=True)
class _Block:
    """A block's turns by side, plain first: there and back."""

    sides: list[tuple[Turn, Turn]]

    def pairs(self, unit: int) -> Pairs:
        return [(there.seconds[unit], back.seconds[unit]) for there, back in self.sides]

    def work(self, side: int) -> Work:
        there, back = self.sides[side]
        return there.work + back.work


def prove(
    plain: Decoding,
    sides: Sequence[Decoding],
    rungs: Sequence[Candidate],
    units: Sequence[Unit],
    fixed: Trace,
    baseline: str,
    progress: Silent,
) -> Proof:
    """Time every rung against plain decoding on units nobody has decoded, and judge it.

    Args:
        plain: Decodes without a draft.
        sides: Decode with the rungs' drafts, in their order.
        rungs: Candidates, fixed beforehand.
        units: The holdout.
        fixed: A text whose time tells the machine's pace.
        baseline: What plain decoding is, in words.
        progress: Told how far it is.
    """
    everybody = [plain, *sides]
    blocks = [units[i : i + BLOCK] for i in range(0, len(units), BLOCK)]
    with progress.step("Proving on the holdout", 2 * len(everybody) * len(units)) as tick:
        steadily = _measure(everybody, blocks, fixed, tick)
    kept = steadily.blocks
    by_unit = _by_unit(steadily, blocks)
    if note := by_unit.summary():
        progress.say(f"Warning: {note}")
    times = paired(list(by_unit.blocks.values()), len(rungs))
    verdicts = [judge(pair, len(rungs)) for pair in times]
    works = [
        _total([block.work(side) for block in kept.values()]) for side in range(len(everybody))
    ]
    evidence = [
        _evidence(verdict, works[0], works[1 + rung], sum(times[rung].plain_s), baseline)
        for rung, verdict in enumerate(verdicts)
        if kept
    ]
    return Proof(
        tuple(rungs),
        tuple(times),
        tuple(evidence),
        tuple(verdicts),
        by_unit,
    )


def _measure(
    everybody: Sequence[Decoding], blocks: Sequence[Sequence[Unit]], fixed: Trace, tick: Tick
) -> Steadily[_Block]:
    paces: list[float] = []

    def measure(number: int) -> _Block:
        turns: list[list[Turn]] = [[] for _ in everybody]
        for rung in run_order(len(everybody) - 1):
            turns[rung + 1].append(take_turn(everybody[rung + 1], blocks[number], fixed, tick))
        paces.extend(turn.fixed_s for turn in turns[0])
        return _Block([(there, back) for there, back in turns])

    def pace_s() -> float:
        return max(paces[-2:])

    usual = take_turn(everybody[0], [], fixed).fixed_s
    paces.append(usual)
    return measure_steadily(len(blocks), measure, pace_s, usual)


def _by_unit(steadily: Steadily[_Block], blocks: Sequence[Sequence[Unit]]) -> Steadily[Pairs]:
    """Return the same by unit instead of by block; counts of blocks become those of units."""
    numbers = [
        [number * BLOCK + i for i in range(len(block))] for number, block in enumerate(blocks)
    ]
    units = {
        unit: block.pairs(i)
        for number, block in steadily.blocks.items()
        for i, unit in enumerate(numbers[number])
    }
    n_units = sum(len(block) for block in blocks)
    return Steadily(
        units,
        steadily.slowest,
        min(n_units, steadily.n_remeasured * BLOCK),
        n_units - len(units),
    )


def _total(works: Sequence[Work]) -> Work:
    return sum(works, start=Work())


def _evidence(
    verdict: Verdict, plain: Work, speculative: Work, plain_s: float, baseline: str
) -> Evidence:
    break_even = speculative.round_s / plain.round_s
    return Evidence(
        baseline=baseline,
        speedup=Speedup(
            ratio=verdict.ratio,
            low=max(verdict.low, 1e-6),
            confidence=verdict.confidence,
            worst_prompt=verdict.worst_prompt,
            prompts=verdict.n_prompts,
        ),
        decode_speedup=speculative.tau / break_even,
        tau=speculative.tau,
        break_even_tau=break_even,
        plain_tokens_per_s=plain.n_tokens / plain_s,
        plain_first_token_ms=1e3 * plain.first_s / plain.n_texts,
    )
