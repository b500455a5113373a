"""What passes over 8 tokens and draft steps cost beside a pass over 1 token."""

from collections.abc import Sequence

from autotune.bench.contest import flat
from autotune.bench.speeds import median_of
from engine.draft import Draft
from engine.pair import LoadedTarget
from engine.rounds import ProbeDraft, RoundTime, measure_rounds
from engine.trace import Trace
from profiles import GREEDY, TreeConfig

N_ROUNDS = 30
PASS_TOKENS = 8
STEPS = TreeConfig.chain(4)
"""The tree whose draft steps are timed: after the extend pass there are three more."""


def pass_figures(
    loaded: LoadedTarget, draft: Draft, texts: Sequence[Trace]
) -> dict[str, float | None]:
    """Return `pass_8_over_1` and `draft_step_share`, medians over rounds with their intervals.

    Plain rounds are timed in between; a round is divided by the 1-token pass of the nearest.
    """
    probes = _rounds(loaded, ProbeDraft(), texts, TreeConfig.chain(PASS_TOKENS - 1))
    ratios = [probe.verify_s / plain.verify_s for probe, plain in probes]
    figures = flat("pass_8_over_1", median_of(ratios))
    steps = _rounds(loaded, draft, texts, STEPS)
    shares = [step.levels_s / (STEPS.depth - 1) / plain.verify_s for step, plain in steps]
    return figures | flat("draft_step_share", median_of(shares))


def _rounds(
    loaded: LoadedTarget, draft: Draft, texts: Sequence[Trace], tree: TreeConfig
) -> list[tuple[RoundTime, RoundTime]]:
    """Return timed rounds, each with the plain round nearest in time."""
    times = measure_rounds(loaded.target, draft, texts, [tree], n_rounds=N_ROUNDS, sampling=GREEDY)
    plain = [i for i, time in enumerate(times) if time.tree.is_plain]
    timed = [i for i, time in enumerate(times) if time.tree == tree and not time.is_first]
    return [(times[i], times[min(plain, key=lambda at: abs(at - i))]) for i in timed]
