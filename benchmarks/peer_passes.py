"""What the target's passes are made of: 8 tokens, draft steps and linear layers beside 1 token."""

from collections.abc import Sequence

import numpy as np
from torch.profiler import ProfilerActivity, profile

from autotune.bench.contest import flat
from autotune.bench.speeds import median_of
from engine.decoder import SpeculativeDecoder
from engine.draft import Draft
from engine.forced import run_forced
from engine.pair import LoadedTarget
from engine.rounds import ProbeDraft, RoundTime, measure_rounds
from engine.trace import Trace
from profiles import GREEDY, TreeConfig

N_ROUNDS = 30
PASS_TOKENS = 8
STEPS = TreeConfig.chain(4)
"""The tree whose draft steps are timed: after the extend pass there are three more."""
PACKED_CALL = "mkldnn::_linear_pointwise"
"""What the profiler calls a packed linear layer; see `engine.packed`."""


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


def linears_s(loaded: LoadedTarget, text: Trace) -> list[float]:
    """Return the seconds that each pass over 1 token spends in packed linear layers.

    By torch's profiler. Empty if such passes read the weights as they are; see `engine.packed`.

    Args:
        loaded: The target.
        text: At least three generated tokens, decoded plainly.
    """
    decoder = SpeculativeDecoder(loaded)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run_forced(decoder, text)
    calls = [
        event.self_cpu_time_total
        for event in profiler.events()
        if event.name == PACKED_CALL and event.input_shapes[0][0] == 1
    ]
    n_passes = len(text.generated) - 1
    calls = calls[len(calls) % n_passes :]  # the prefill's logits are those of one token, too
    by_pass = np.array(calls).reshape(n_passes, -1).sum(axis=1)  # microseconds
    return (by_pass / 1e6).tolist() if calls else []


def _rounds(
    loaded: LoadedTarget, draft: Draft, texts: Sequence[Trace], tree: TreeConfig
) -> list[tuple[RoundTime, RoundTime]]:
    """Return timed rounds, each with the plain round nearest in time."""
    times = measure_rounds(loaded.target, draft, texts, [tree], n_rounds=N_ROUNDS, sampling=GREEDY)
    plain = [i for i, time in enumerate(times) if time.tree.is_plain]
    timed = [i for i, time in enumerate(times) if time.tree == tree and not time.is_first]
    return [(times[i], times[min(plain, key=lambda at: abs(at - i))]) for i in timed]
