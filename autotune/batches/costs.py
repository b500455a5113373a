"""What measured batches teach the cost model: how far its guess of a wider pass is off.

For any batch the model prices a round as one wider pass of all rows' tokens; the measured round
times give, at each batch size, a factor on that price, for plain and for speculative rounds.
"""

import math
import statistics
from collections.abc import Sequence

from engine.forced import ForcedBatch, ForcedRun
from profiles import CostModelSummary, CostTable, TreeConfig
from profiles.prices import Prices

from ..what_if.pricing import Anchor, Conditions, plain_price, round_parts
from ..what_if.scenario import Scenario
from .trying import SizeTimes


def with_batches(
    costs: CostModelSummary, sizes: Sequence[SizeTimes], prompt_tokens: float
) -> CostModelSummary:
    """Return a cost model that knows the measured batches; unchanged if there are none.

    Args:
        costs: The cost model of single prompts.
        sizes: The measured sizes, in order.
        prompt_tokens: Mean tokens of a prompt.
    """
    sizes = [times for times in sizes if times.plain]
    if not sizes:
        return costs
    prices = Prices(costs)
    factors = [_factors(prices, times, prompt_tokens) for times in sizes]
    x = [1.0, *(float(times.size) for times in sizes)]
    tables = [
        CostTable(name=name, x=x, relative=[1.0, *column])
        for name, column in zip(
            ("batch_plain", "batch_round"), zip(*factors, strict=True), strict=True
        )
    ]
    valid = dict(costs.valid) | {"batch": (1.0, x[-1])}
    return costs.model_copy(update={"tables": (*costs.tables, *tables), "valid": valid})


def _factors(prices: Prices, times: SizeTimes, prompt_tokens: float) -> tuple[float, float]:
    """Return measured over modelled time of a plain and of a speculative round."""
    output = round(statistics.fmean(run.n_tokens for run, _ in times.plain) / times.size)
    scenario = Scenario(batch=times.size)
    conditions = Conditions(prompt_tokens, output, prompt_tokens + output / 2, scenario)
    single_s = statistics.median(_single_round_s(run) for run in times.single)
    per_second = prices.plain(conditions.context) / single_s
    plain_s = statistics.median(_round_s(run, times.size) for pair in times.plain for run in pair)
    plain = per_second * plain_s / plain_price(prices, conditions)
    logs = [
        math.log(per_second * _round_s(run, times.size) / _modelled(prices, tree, run, conditions))
        for tree, runs in times.trees.items()
        for run in runs
    ]
    return plain, math.exp(statistics.fmean(logs)) if logs else 1.0


def _single_round_s(run: ForcedRun) -> float:
    return run.decode_s / run.stats.n_rounds


def _round_s(run: ForcedBatch, size: int) -> float:
    """Return the seconds of a round of a full batch, had the rows that ended early gone on."""
    return run.decode_s * size / run.n_row_rounds


def _modelled(prices: Prices, tree: TreeConfig, run: ForcedBatch, conditions: Conditions) -> float:
    fill = min(1.0, run.n_nodes / run.n_row_rounds / tree.nodes)
    return round_parts(prices, tree, run.tau, Anchor(fill=fill), conditions).total
