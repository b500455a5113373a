"""Our own engine as the jobs for serving engines see it."""

from contextlib import AbstractContextManager, nullcontext

from engine.decode import DecodeStats
from engine.decoder import SpeculativeDecoder
from engine.forced import run_forced
from engine.timing import TimedText
from engine.trace import Trace

from .metrics import Counts


class OwnDecoding:
    """A decoder of ours, run on forced text, one request at a time.

    As in serving, a draft that looks back at earlier answers sees those of the run so far.

    Args:
        name: Its name in tables.
        decoder: The decoder.
    """

    def __init__(self, name: str, decoder: SpeculativeDecoder) -> None:
        self.name = name
        self._decoder = decoder
        self._counts = Counts()

    def awake(self) -> AbstractContextManager[None]:
        """Do nothing: it runs when it is called."""
        return nullcontext()

    def run(self, trace: Trace) -> TimedText:
        """Give a trace's tokens."""
        done = run_forced(self._decoder, trace)
        self._decoder.remember([trace])
        self._counts += _counts(done.stats)
        return TimedText(done.total_s, done.decode_s, tuple(trace.generated))

    def counts(self) -> Counts:
        """Return what was drafted and accepted so far."""
        return self._counts


def _counts(stats: DecodeStats) -> Counts:
    # Every round that accepted a node of some depth accepted one of each depth above it.
    by_depth = tuple(stats.accepted_by_depth)
    n_drafts = stats.n_rounds if stats.n_drafted else 0
    return Counts(n_drafts, stats.n_drafted, sum(by_depth), by_depth)
