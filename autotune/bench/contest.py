"""Contenders decode the same prompts in turns, and what came of it.

Knows neither models nor servers: a contender is a name and a way to run one text.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from engine.timing import TimedText
from engine.trace import Trace
from profiles.errors import SpectuneError

from ..progress import Tick
from .speeds import Figure, median_of, ratio_of_totals

Runs = dict[str, list[TimedText]]
"""The runs of every contender by name, in the order of the prompts."""

FAILURES = (SpectuneError, RuntimeError, ValueError, NotImplementedError, OSError)
"""What a contender that cannot run here may raise; it is left out, the others go on."""


@dataclass(frozen=True)
class Contender:
    """Something that decodes a prompt.

    Attributes:
        name: Its name in tables.
        run: Answers a trace's prompt with as many tokens as the trace has.
        awake: Entered around its turns, for servers that sleep while others are timed.
        required: Whether its failure ends the contest; the others are left out instead.
    """

    name: str
    run: Callable[[Trace], TimedText]
    awake: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    required: bool = False


def warm_up(
    contenders: Sequence[Contender],
    trace: Trace,
    skipped: dict[str, str],
    tick: Tick = lambda: None,
) -> None:
    """Let every contender run one text untimed; note in `skipped` why one cannot."""
    for contender in contenders:
        _attempt(contender, [trace], {}, skipped)
        tick()


def compete(
    contenders: Sequence[Contender],
    traces: Sequence[Trace],
    *,
    block: int = 1,
    before: Trace | None = None,
    skipped: dict[str, str],
    tick: Tick = lambda: None,
) -> Runs:
    """Run every text once on every contender, in turns.

    A turn is a block of texts. The order of the contenders is reversed from block to block, so
    that linear drift of the machine meets all of them alike. Nobody runs a text twice: drafts
    that remember earlier answers would profit.

    Args:
        contenders: Who takes part; those in `skipped` do not.
        traces: The texts.
        block: Texts per turn; 1 where taking turns costs nothing.
        before: A short text run untimed at the start of every turn, which brings the weights
            back into the caches.
        skipped: Gains the name and the reason of every contender that fails.
        tick: Called after every text of every contender.

    Returns:
        The runs of all contenders that finished.
    """
    runs: Runs = {contender.name: [] for contender in contenders if contender.name not in skipped}
    for number, start in enumerate(range(0, len(traces), block)):
        turn = traces[start : start + block]
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.name not in skipped:
                _attempt(contender, turn, runs, skipped, before, tick)
    return {name: done for name, done in runs.items() if name not in skipped}


def _attempt(
    contender: Contender,
    turn: Sequence[Trace],
    runs: Runs,
    skipped: dict[str, str],
    before: Trace | None = None,
    tick: Tick = lambda: None,
) -> None:
    try:
        with contender.awake():
            if before is not None:
                contender.run(before)
            for trace in turn:
                run = contender.run(trace)
                if run.n_tokens != len(trace.generated):
                    raise SpectuneError(
                        f"it must give {len(trace.generated)} tokens, but gave {run.n_tokens}"
                    )
                runs.setdefault(contender.name, []).append(run)
                tick()
    except FAILURES as error:
        if contender.required:
            raise
        skipped[contender.name] = " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True)
class Standing:
    """What one contender reached.

    Attributes:
        name: The contender.
        tokens_per_s: End to end, median over the prompts.
        decode_tokens_per_s: After the first token; None if every answer was a single token.
        first_token_ms: Time to the first token, median.
        over: Speed over that of the reference: the ratio of total wall times.
        same_text: Mean share of the answer that agrees with the recorded one up to the first
            difference.
    """

    name: str
    tokens_per_s: Figure
    decode_tokens_per_s: Figure | None
    first_token_ms: float
    over: Figure
    same_text: float

    def as_json(self) -> dict[str, Any]:
        """Return plain data: every figure as `name`, `name_low` and `name_high`."""
        result: dict[str, Any] = {"name": self.name}
        for name in ("tokens_per_s", "decode_tokens_per_s", "over"):
            result |= flat(name, getattr(self, name))
        return result | {"first_token_ms": self.first_token_ms, "same_text": self.same_text}


def standings(
    runs: Mapping[str, Sequence[TimedText]], traces: Sequence[Trace], reference: str
) -> list[Standing]:
    """Sum up the runs of every contender against those of the reference."""
    theirs = [run.total_s for run in runs[reference]]
    result = []
    for name, done in runs.items():
        decode = [speed for run in done if (speed := run.decode_tokens_per_s) is not None]
        shares = [_same_share(run, trace) for run, trace in zip(done, traces, strict=True)]
        result.append(
            Standing(
                name=name,
                tokens_per_s=median_of([run.tokens_per_s for run in done]),
                decode_tokens_per_s=median_of(decode) if decode else None,
                first_token_ms=1e3 * statistics.median(r.total_s - r.decode_s for r in done),
                over=ratio_of_totals(theirs, [run.total_s for run in done]),
                same_text=statistics.mean(shares),
            )
        )
    return result


def flat(name: str, figure: Figure | None) -> dict[str, float | None]:
    """Return a figure under three keys; a bound that does not exist is None."""
    if figure is None:
        return {name: None}
    low, high = (None if bound != bound else bound for bound in (figure.low, figure.high))
    return {name: figure.value, f"{name}_low": low, f"{name}_high": high}


def _same_share(run: TimedText, trace: Trace) -> float:
    pairs = list(zip(run.token_ids, trace.generated, strict=True))
    n_same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return n_same / len(pairs)
