"""Timing rounds as they are served: forced text, random order, next to a plain reference."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from torch import Tensor

from profiles import PLAIN, Sampling, TreeConfig

from .adaptive import Shaper
from .decode import Request
from .draft import Draft
from .sampling import Sampler
from .stopping import StopRules
from .target import Target
from .timing import PhaseClock
from .trace import Tick, Trace, no_tick
from .tree import DraftTree, Pool

VERIFY_PROBES = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 31, 32, 48, 64)
"""Draft nodes at which verify passes are timed: root and nodes at and just above 16 and 32, where
kernels that work on tiles make steps, and sizes between which there are none."""

FIRST = TreeConfig.chain(1)
"""The tree of a text's first round, whose extend pass is the draft's prefill."""

PLAIN_EVERY = 2
"""Trees per plain round; at least 2, since only after another tree is an extend pass short."""

REFERENCE_WINDOW = 6
"""Plain rounds, nearest in time, whose median is the reference of a round."""


@dataclass(frozen=True)
class RoundTime:
    """One timed round.

    Attributes:
        tree: What was asked for; plain for a reference round.
        n_nodes: Draft nodes verified.
        n_extend: Tokens the draft's extend pass ran over.
        context: Tokens in the target's cache before the round.
        extend_s, levels_s, verify_s, commit_s: Seconds by part.
        total_s: Seconds of the whole round.
        reference_s: Seconds of a plain round at the same time.
        is_first: Whether the extend pass was the draft's prefill, over the whole prompt.
        match_s: Seconds in which a hybrid looked for a model-free tree.
    """

    tree: TreeConfig
    n_nodes: int
    n_extend: int
    context: int
    extend_s: float
    levels_s: float
    verify_s: float
    commit_s: float
    total_s: float
    reference_s: float = float("nan")
    is_first: bool = False
    match_s: float = 0.0


class ProbeDraft:
    """Proposes a chain of arbitrary tokens: rounds that verify any number of nodes, for timing."""

    kind = "probe"
    feature_layers: tuple[int, ...] = ()
    max_top_k = 1
    max_positions = None

    def open(self, prompt: list[int], n_max: int) -> "ProbeDraft":
        """Keep no state."""
        return self

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """Keep no state."""

    def propose(
        self, tree: TreeConfig, clock: PhaseClock, shaper: Shaper | None = None
    ) -> DraftTree:
        """Return a chain of `tree.nodes` nodes."""
        clock.lap("levels")
        return DraftTree(tokens=[0] * tree.nodes, parents=list(range(tree.nodes)))

    def pools(
        self, tokens: list[int], features: Tensor | None, roots: list[int], tree: TreeConfig
    ) -> list[Pool]:
        """Propose nothing worth replaying."""
        raise NotImplementedError("a probe is timed, never replayed")


def measure_rounds(
    target: Target,
    draft: Draft,
    traces: Sequence[Trace],
    trees: Sequence[TreeConfig],
    *,
    n_rounds: int,
    sampling: Sampling,
    seed: int = 0,
    tick: Tick = no_tick,
) -> list[RoundTime]:
    """Time `n_rounds` rounds of every tree over recorded text.

    Every pass over the trees is in a new random order and every second tree follows a plain
    round, so that drift of the machine meets all of them alike. A tree may change from round to
    round since no tree changes the text. Trees deeper than every text is long are left out. The
    texts are taken in turn.

    Returns:
        The timed rounds, the plain ones and the first ones of the texts included, each with its
        reference.
    """
    rng = random.Random(seed)
    longest = max(len(trace.generated) for trace in traces)
    trees = [tree for tree in trees if tree.depth + 5 <= longest]
    todo: list[TreeConfig] = []
    for _ in range(n_rounds):
        for i, tree in enumerate(rng.sample(list(trees), len(trees))):
            todo += [PLAIN, tree] if i % PLAIN_EVERY == 0 else [tree]
        todo.append(PLAIN)
    todo.reverse()
    times: list[RoundTime] = []
    order = cycle(rng.sample(list(traces), len(traces)))
    while todo:
        trace = next(order)
        request = Request(
            target,
            draft,
            trace.prompt,
            Sampler(sampling, seed),
            StopRules(len(trace.generated)),
            forced=trace.generated,
        )
        request.prefill()
        n_extend = 0
        if request.budget_left > FIRST.depth + 1:
            first, n_extend = _timed_step(request, FIRST, request.n_prompt)
            times.append(replace(first, is_first=True))
        while todo and request.stop_reason is None:
            tree = todo[-1]
            if request.budget_left <= tree.depth + 1:
                break  # the tree would be cut short; keep it for the next text
            todo.pop()
            timed, n_emitted = _timed_step(request, tree, n_extend)
            n_extend = n_emitted if not tree.is_plain else n_extend + n_emitted
            times.append(timed)
            tick()
    return _with_reference(times)


def _timed_step(request: Request, tree: TreeConfig, n_extend: int) -> tuple[RoundTime, int]:
    context, drafted = request.cache.length, request.stats.n_drafted
    request.clock = PhaseClock(request.target.device, detailed=True)
    emitted = request.step(tree)
    seconds = request.clock.seconds
    timed = RoundTime(
        tree=tree,
        n_nodes=request.stats.n_drafted - drafted,
        n_extend=0 if tree.is_plain else n_extend,
        context=context,
        extend_s=seconds["extend"],
        levels_s=seconds["levels"],
        verify_s=seconds["verify"],
        commit_s=seconds["commit"],
        total_s=sum(seconds.values()),
        match_s=seconds["match"],
    )
    return timed, len(emitted)


def _with_reference(times: list[RoundTime]) -> list[RoundTime]:
    """Give every round the median of the plain rounds nearest to it in time."""
    plain = [(i, timed.total_s) for i, timed in enumerate(times) if timed.tree.is_plain]
    result = []
    for i, timed in enumerate(times):
        near = sorted(plain, key=lambda item: abs(item[0] - i))[:REFERENCE_WINDOW]
        reference = statistics.median(seconds for _, seconds in near)
        result.append(replace(timed, reference_s=reference))
    return result
