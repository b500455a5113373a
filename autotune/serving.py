"""Between search and holdout: how each rung will be served, chosen on tune prompts.

The guard's limits follow from the cost model; whether the leader's tree is fitted to every round
is tried on the device. The holdout then judges what was chosen, on the path that will serve.
"""

import math
from collections.abc import Sequence

from engine.adaptive_replay import AdaptiveReplay
from engine.decoder import SpeculativeDecoder
from engine.trace import Trace
from profiles import Calibration, CostModelSummary, GuardSettings, Serving, TreeConfig
from profiles.prices import Prices

from .calibrating import calibrate
from .candidates import Candidate
from .cost import CostModel, Prediction
from .job import Job
from .progress import Silent
from .proving import run_interleaved, times_of
from .tracing import Conversation

WORTH_TRYING = 1.01
"""Predicted gain of adaptive drafting over the fixed tree below which it is not measured."""

OTHER_SHAPE = 4
"""Width and top-k of the limits tried beside the leader's own."""


def choose_serving(
    job: Job,
    rungs: Sequence[Candidate],
    costs: CostModel,
    known: Sequence[Trace],
    texts: Sequence[Conversation],
    progress: Silent,
) -> list[Serving]:
    """Return how each rung is served: the leader perhaps adaptively, the others fixed.

    Args:
        job: The job.
        rungs: The leader first.
        costs: The cost model.
        known: Texts to calibrate on.
        texts: Texts to time both ways on.
        progress: Told what is being done.
    """
    servings = [fixed_serving(job, rung, costs.summary(rung.draft)) for rung in rungs]
    if rungs:
        calibration = promising(job, rungs[0], servings[0].cost_model, known)
        if calibration is not None:
            fixed = servings[0]
            adaptive = Serving(fixed.cost_model, fixed.guard, calibration)
            if is_faster(job, rungs[0], adaptive, fixed, texts, progress):
                servings[0] = adaptive
    return servings


def fixed_serving(job: Job, rung: Candidate, cost_model: CostModelSummary) -> Serving:
    """Return the serving of a fixed tree: where it is worth it, by length of answer and context.

    Short answers do not earn the draft's prefill back, and long contexts may make rounds too dear.
    """
    prices = Prices(cost_model)
    prefill = prices.prefill(job.sample.mean_prompt_tokens)
    gain = 1 - 1 / max(rung.prediction.decode_speedup, rung.speedup or 1.0)
    n_least = math.ceil(prefill / gain) + 1 if gain > 0 else 0
    usual = job.sample.mean_prompt_tokens + job.settings.max_new_tokens / 2
    most = longest_context(rung.tree, rung.prediction, prices, usual)
    return Serving(cost_model, GuardSettings(min_new_tokens=n_least, max_context=most))


def longest_context(
    tree: TreeConfig, prediction: Prediction, prices: Prices, usual: float
) -> int | None:
    """Return the context from which on a tree loses; None if it does not where it was measured.

    What was predicted for the usual context grows dearer as a round does against a plain token;
    tau is taken to stay.

    Args:
        tree: The tree.
        prediction: Its figures on the tune prompts.
        prices: What rounds cost.
        usual: Tokens of context that the prediction stands for.
    """

    def price(context: float) -> float:
        round_price = prices.round(tree, prediction.tau, tree.nodes, context).total
        return round_price / prices.plain(context)

    affordable = prediction.decode_speedup * price(usual)
    low, high = max(1, math.floor(usual)), math.floor(prices.longest_context)
    if high <= low or price(low) >= affordable or price(high) < affordable:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if price(middle) < affordable else (low, middle)
    return low


def promising(
    job: Job, rung: Candidate, cost_model: CostModelSummary, known: Sequence[Trace]
) -> Calibration | None:
    """Return the calibration with the best prediction, None if no better than the fixed tree."""
    draft, prices = job.drafts[rung.draft].draft, Prices(cost_model)
    best, least = None, WORTH_TRYING * rung.prediction.decode_speedup
    for limits in limits_of(job, rung):
        replay = AdaptiveReplay(job.loaded.target, draft, known, limits)
        on_cpu = job.loaded.target.device.type == "cpu"
        calibration, prediction = calibrate(replay, limits, prices, known, on_cpu)
        if prediction.decode_speedup > least:
            best, least = calibration, prediction.decode_speedup
    return best


def limits_of(job: Job, rung: Candidate) -> list[TreeConfig]:
    """Return the largest trees to try: as deep and as many nodes as were searched."""
    space, tree = job.spaces[rung.draft], rung.tree
    depth = min(space.max_depth, space.max_nodes)
    shapes = [(tree.width, tree.top_k), (OTHER_SHAPE, OTHER_SHAPE)]
    trees = (space.tree(depth, max(1, width), max(1, top_k), 1.0) for width, top_k in shapes)
    return [limits for limits in dict.fromkeys(trees) if space.contains(limits)]


def is_faster(
    job: Job,
    rung: Candidate,
    serving: Serving,
    over: Serving,
    texts: Sequence[Conversation],
    progress: Silent,
) -> bool:
    """Tell whether one way to serve a tree takes less time than another on the same texts."""
    decoders = [
        SpeculativeDecoder(
            job.loaded, job.drafts[rung.draft].draft, rung.tree, job.settings.sampling, way
        )
        for way in (over, serving)
    ]
    with progress.step("Fixed or adaptive", 4 * len(texts)) as tick:
        steadily = run_interleaved(decoders, texts, job.plain_token_s, tick)
    (times,) = times_of(list(steadily.blocks.values()), 1)
    return sum(times.speculative_s) < sum(times.plain_s)
