"""Ways of decoding take turns: a block of requests each, asleep while others are timed.

Knows neither models nor servers.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engine.timing import TimedText
from engine.trace import Trace
from profiles.errors import SpectuneError

from ..progress import Tick
from ..tracing import Conversation
from .interface import Decoding
from .metrics import Counts

Unit = Sequence[Conversation]
"""Conversations that are sent at once, as many as the concurrency asked for; they are timed
together, as one unit of the statistics, since requests served at once wait for each other."""


@dataclass(frozen=True)
class UnitRun:
    """One run of a unit.

    Attributes:
        seconds: From the first request sent to the last one answered.
        texts: The answers.
    """

    seconds: float
    texts: list[TimedText]


@dataclass(frozen=True)
class Work:
    """What was decoded, added up.

    Attributes:
        counts: What was drafted and accepted.
        n_tokens: Tokens.
        n_decoded: Tokens after the first of every answer: those that rounds gave.
        decode_s: Seconds after the first tokens were there, over all requests.
        first_s: Seconds until they were, over all requests.
        n_texts: Answers.
    """

    counts: Counts = Counts()
    n_tokens: int = 0
    n_decoded: int = 0
    decode_s: float = 0.0
    first_s: float = 0.0
    n_texts: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.counts + other.counts,
            self.n_tokens + other.n_tokens,
            self.n_decoded + other.n_decoded,
            self.decode_s + other.decode_s,
            self.first_s + other.first_s,
            self.n_texts + other.n_texts,
        )

    @property
    def n_rounds(self) -> int:
        """Rounds, those in which nothing was drafted included: each gives a token of its own.

        Of an answer's last round, tokens that no longer fit it count as accepted, too; rounds are
        at least those in which something was drafted.
        """
        return max(1, self.counts.n_drafts, self.n_decoded - self.counts.n_accepted)

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return max(1.0, self.n_decoded / self.n_rounds)

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.decode_s / self.n_rounds


@dataclass(frozen=True)
class Turn:
    """What one way of decoding did while it was awake.

    Attributes:
        runs: The runs of the units, in order.
        work: All of them together.
        fixed_s: Seconds of a fixed text before them, which tell the machine's pace.
    """

    runs: list[UnitRun]
    work: Work = field(repr=False)
    fixed_s: float

    @property
    def seconds(self) -> list[float]:
        """Seconds by unit."""
        return [run.seconds for run in self.runs]


def take_turn(
    decoding: Decoding, units: Sequence[Unit], fixed: Trace, tick: Tick = lambda: None
) -> Turn:
    """Wake a way of decoding, let it run the units one after the other, and send it to sleep.

    Args:
        decoding: Who decodes.
        units: What is timed.
        fixed: A short text, run twice before: once to bring the weights back into the caches,
            once for the pace.
        tick: Called after each unit.
    """
    with decoding.awake():
        decoding.run(fixed)
        fixed_s = decoding.run(fixed).total_s
        before = decoding.counts()
        runs = []
        for unit in units:
            runs.append(run_unit(decoding, unit))
            tick()
        counts = decoding.counts() - before
    return Turn(runs, _work([text for run in runs for text in run.texts], counts), fixed_s)


def run_unit(decoding: Decoding, unit: Unit) -> UnitRun:
    """Send the conversations of a unit at once, the turns of each one after the other."""
    started = time.perf_counter()
    if len(unit) == 1:
        texts = _converse(decoding, unit[0])
    else:
        with ThreadPoolExecutor(len(unit)) as pool:
            done = list(pool.map(lambda conversation: _converse(decoding, conversation), unit))
        texts = [text for conversation in done for text in conversation]
    return UnitRun(time.perf_counter() - started, texts)


def units_of(conversations: Sequence[Conversation], concurrency: int) -> list[Unit]:
    """Cut conversations into units; those left over, too few for one, are left out."""
    whole = len(conversations) // concurrency * concurrency
    return [conversations[i : i + concurrency] for i in range(0, whole, concurrency)]


def _converse(decoding: Decoding, conversation: Conversation) -> list[TimedText]:
    texts = []
    for trace in conversation:
        text = decoding.run(trace)
        if text.n_tokens != len(trace.generated):
            raise SpectuneError(
                f"{decoding.name} must give {len(trace.generated)} tokens, but gave "
                f"{text.n_tokens}; look at its log"
            )
        texts.append(text)
    return texts


def _work(texts: Sequence[TimedText], counts: Counts) -> Work:
    return Work(
        counts=counts,
        n_tokens=sum(text.n_tokens for text in texts),
        n_decoded=sum(text.n_tokens - 1 for text in texts),
        decode_s=sum(text.decode_s for text in texts),
        first_s=sum(text.total_s - text.decode_s for text in texts),
        n_texts=len(texts),
    )
