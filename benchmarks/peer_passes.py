"""What a target pass of 8 tokens and a draft step cost, in 1-token passes of the target."""

from collections.abc import Sequence

from autotune.contest import flat
from autotune.speeds import median_of
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

    Every round is followed by a plain one, whose verify pass is the 1-token pass it is divided
    by.
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
    """Return timed rounds, each with the plain round after it."""
    times = measure_rounds(loaded.target, draft, texts, [tree], n_rounds=N_ROUNDS, sampling=GREEDY)
    return list(zip(times[::2], times[1::2], strict=True))
