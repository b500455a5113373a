"""Decoding several requests at a time: rounds over all rows in flight, and a queue behind them.

Every row is a `Request` with its own sampler, stopping rules and draft; rows share the passes of
target and draft and nothing else, so each says what it says alone, whatever its neighbours are.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from profiles import PLAIN, TreeConfig

from .batch_beam import BeamRows
from .beam import BeamSession
from .decode import Drafted, Request
from .draft import DraftSession
from .guard import BEHIND
from .hybrid import HybridSession
from .target import Target
from .timing import PhaseClock
from .tree import ROOT_ONLY

TreeOfBatch = Callable[[int], TreeConfig]
"""Chooses the tree of a round by the number of rows in flight."""


@dataclass(frozen=True)
class BatchRound:
    """What one round of a batch was.

    Attributes:
        tree: What was asked for; rows near their end may have had less.
        n_rows: Rows in flight.
        n_nodes: Draft nodes verified, over all rows.
        n_emitted: Tokens emitted, over all rows.
    """

    tree: TreeConfig
    n_rows: int
    n_nodes: int
    n_emitted: int


BatchObserver = Callable[[BatchRound, float], None]
"""Is told every round and the seconds it took."""


class Batch:
    """Rows in flight.

    Args:
        target: The target of all of them.
        n_slots: Most rows at a time.
        min_left: Tokens a request must have room for to bring a draft up to date that is behind.
    """

    def __init__(self, target: Target, n_slots: int, min_left: int = 0) -> None:
        self.target = target
        self.n_slots = n_slots
        self.min_left = min_left
        self.requests: list[Request] = []
        self.clock = PhaseClock(target.device, detailed=False)
        self._cache = target.new_batch_cache(n_slots)
        self._beams: BeamRows | None = None
        self._started: list[float] = []

    @property
    def n_rows(self) -> int:
        """Rows in flight."""
        return len(self.requests)

    @torch.inference_mode()
    def join(self, request: Request) -> bool:
        """Run a request's prompt and give it a row, unless it has ended with its first token."""
        started = time.perf_counter()
        request.prefill(room=0)
        if request.stop_reason is not None:
            _end(request, started)
            return False
        self._cache.join(request.cache)
        del request.cache
        request.clock = self.clock
        request.shaper = None  # what it knows are prices of rounds with a single row
        self.requests.append(request)
        self._started.append(started)
        return True

    @torch.inference_mode()
    def step(self, tree: TreeConfig) -> BatchRound:
        """Run one round of every row."""
        self.clock.restart()
        drafted = self._draft(tree)
        trees = [each.tree for each in drafted]
        tokens: list[int] = []
        positions: list[int] = []
        for request, each in zip(self.requests, trees, strict=True):
            tokens += [request.tokens[-1], *each.tokens]
            positions += [len(request.tokens) - 1 + depth for depth in each.depths]
        logits, features = self.target.forward_rows(
            torch.tensor(tokens),
            torch.tensor(positions),
            [each.mask() for each in trees],
            self._cache,
            feature_layers=next((r.feature_layers for r in self.requests if r.feature_layers), ()),
        )
        sizes = [each.n_nodes + 1 for each in trees]
        paths = [
            request.accept(each, of_row)
            for request, each, of_row in zip(
                self.requests, drafted, logits.split(sizes), strict=True
            )
        ]
        self.clock.lap("verify")
        self._cache.keep_paths(paths)
        if features is not None:
            for request, of_row, path in zip(
                self.requests, features.split(sizes), paths, strict=True
            ):
                request.keep_features(of_row if request.feature_layers else None, path)
        self.clock.lap("commit")
        return BatchRound(tree, self.n_rows, sum(sizes) - len(sizes), sum(map(len, paths)))

    def _draft(self, tree: TreeConfig) -> list[Drafted]:
        """Return the rounds of all rows; trees of a neural draft are grown together."""
        rounds: dict[int, Drafted] = {}
        asking: dict[int, tuple[BeamSession, TreeConfig]] = {}
        for row, request in enumerate(self.requests):
            asked = request.feasible(tree)
            late = request.n_behind > BEHIND and request.budget_left < self.min_left
            if asked.is_plain or late:
                rounds[row] = Drafted(PLAIN, ROOT_ONLY, 0)
                continue
            session = request.told_session()
            free = session.matched(self.clock) if isinstance(session, HybridSession) else None
            neural = _neural(session)
            if free is not None:
                rounds[row] = request.drafted(asked, free)
            elif neural is not None:
                asking[row] = (neural, asked)
            else:
                rounds[row] = request.drafted(asked, session.propose(asked, self.clock))
        if asking:
            sessions, trees = zip(*asking.values(), strict=True)
            if self._beams is None:
                self._beams = BeamRows(sessions[0].draft, self.n_slots, self.target.device)
            found = self._beams.propose(sessions, trees, self.clock)
            for (row, (_, asked)), grown in zip(asking.items(), found, strict=True):
                rounds[row] = self.requests[row].drafted(asked, grown)
        return [rounds[row] for row in range(self.n_rows)]

    @torch.inference_mode()
    def leave(self) -> list[Request]:
        """Take the requests that have ended out of their rows."""
        ended = []
        for row in reversed(range(self.n_rows)):
            request = self.requests[row]
            if request.stop_reason is None:
                continue
            self._cache.drop(row)
            neural = _neural(request.session)
            if self._beams is not None and neural is not None:
                self._beams.drop(neural)
            _end(request, self._started[row])
            self.requests[row] = self.requests[-1]
            self._started[row] = self._started[-1]
            self.requests.pop()
            self._started.pop()
            ended.append(request)
        return ended


def _neural(session: DraftSession | None) -> BeamSession | None:
    """Return the session of a head or a small model, of a hybrid that of its head."""
    head = session.head if isinstance(session, HybridSession) else session
    return head if isinstance(head, BeamSession) else None


def _end(request: Request, started: float) -> None:
    """Note how long a request was under way, and let go of what it needed for that."""
    request.stats.total_s = time.perf_counter() - started
    request.release()


def decode_many(
    target: Target,
    requests: Iterable[Request],
    batch_size: int,
    tree_of: TreeOfBatch,
    observe: BatchObserver | None = None,
    min_left: int = 0,
) -> Iterator[Request]:
    """Decode requests, at most `batch_size` at a time, and yield each when it has ended.

    A row that ends is taken over by the next request, whose prompt runs alone between two rounds.

    Args:
        target: The target of all requests.
        requests: Requests that have not begun, of one draft or none; read when a row is free.
        batch_size: Most rows in flight.
        tree_of: Chooses the tree of every round.
        observe: Told every round.
        min_left: Tokens a request must have room for to bring a draft up to date that is behind.
    """
    waiting = iter(requests)
    batch = Batch(target, batch_size, min_left)
    while True:
        while batch.n_rows < batch_size and (request := next(waiting, None)) is not None:
            if not batch.join(request):
                yield request
        if not batch.n_rows:
            return
        tree = tree_of(batch.n_rows)
        started = time.perf_counter()
        done = batch.step(tree)
        if observe is not None:
            observe(done, time.perf_counter() - started)
        yield from batch.leave()
