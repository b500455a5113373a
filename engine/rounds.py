"""Timing rounds as they are served: forced text, random order, next to a plain reference."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from profiles import PLAIN, Sampling, TreeConfig

from .decode import Request
from .draft import Draft
from .sampling import Sampler
from .stopping import StopRules
from .target import Target
from .timing import PhaseClock
from .trace import Tick, Trace, no_tick

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

    Every pass over the trees is in a new random order and every tree is followed by a plain
    round, so that drift of the machine meets all of them alike. A tree may change from round to
    round since no tree changes the text.

    Returns:
        The timed rounds, the plain ones included, each with its reference.
    """
    rng = random.Random(seed)
    todo: list[TreeConfig] = []
    for _ in range(n_rounds):
        for tree in rng.sample(list(trees), len(trees)):
            todo += [tree, PLAIN]
    todo.reverse()
    times: list[RoundTime] = []
    while todo:
        trace = rng.choice(traces)
        request = Request(
            target,
            draft,
            trace.prompt,
            Sampler(sampling, seed),
            StopRules(len(trace.generated)),
            forced=trace.generated,
        )
        request.prefill()
        n_extend = request.n_new
        warm = False  # the first round's extend pass is the draft's prefill
        while todo and request.stop_reason is None:
            tree = todo[-1]
            if request.budget_left <= tree.depth + 1:
                break  # the tree would be cut short; keep it for the next text
            if not warm:
                request.step(tree)
                warm = True
                n_extend = request.stats.n_round_tokens
                continue
            todo.pop()
            time, n_emitted = _timed_step(request, tree, n_extend)
            n_extend = n_emitted if not tree.is_plain else n_extend + n_emitted
            times.append(time)
            tick()
    return _with_reference(times)


def _timed_step(request: Request, tree: TreeConfig, n_extend: int) -> tuple[RoundTime, int]:
    context, drafted = request.cache.length, request.stats.n_drafted
    request.clock = PhaseClock(request.target.device, detailed=True)
    emitted = request.step(tree)
    seconds = request.clock.seconds
    time = RoundTime(
        tree=tree,
        n_nodes=request.stats.n_drafted - drafted,
        n_extend=0 if tree.is_plain else n_extend,
        context=context,
        extend_s=seconds["extend"],
        levels_s=seconds["levels"],
        verify_s=seconds["verify"],
        commit_s=seconds["commit"],
        total_s=sum(seconds.values()),
    )
    return time, len(emitted)


def _with_reference(times: list[RoundTime]) -> list[RoundTime]:
    """Give every round the median of the plain rounds nearest to it in time."""
    plain = [(i, time.total_s) for i, time in enumerate(times) if time.tree.is_plain]
    result = []
    for i, time in enumerate(times):
        near = sorted(plain, key=lambda item: abs(item[0] - i))[:REFERENCE_WINDOW]
        reference = statistics.median(seconds for _, seconds in near)
        result.append(RoundTime(**{**vars(time), "reference_s": reference}))
    return result
