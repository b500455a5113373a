"""How a rung will be served: the guard's least length, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cost_model import Prediction
from autotune.search import Candidate
from autotune.serving import fixed_serving, limits_of
from autotune.space import SearchSpace
from profiles import CostModelSummary, CostTable, TreeConfig

TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=6)


def job(**sample: Any) -> Any:
    space = SearchSpace(max_depth=8, max_width=4, max_top_k=4, max_nodes=20)
    return SimpleNamespace(sample=SimpleNamespace(**sample), spaces={"head": space})


@pytest.mark.parametrize(("speedup", "least"), [(1.28, 11), (2.0, 5), (0.9, 0)])
def test_an_answer_must_be_long_enough_to_earn_the_drafts_prefill_back(
    speedup: float, least: int
) -> None:
    """The prefill of 150 tokens costs 2 plain tokens' time; at 1.28x each token earns 0.22."""
    prefill = CostTable(name="prefill", x=[50.0, 250.0], relative=[1.0, 3.0])
    cost_model = CostModelSummary(reference_ms=10.0, tables=[prefill])
    rung = Candidate("head", TREE, Prediction(speedup, 1.0))
    serving = fixed_serving(job(mean_prompt_tokens=150.0), rung, cost_model)
    assert serving.guard.min_new_tokens == least
    assert serving.calibration is None


def test_adaptive_drafting_may_grow_as_far_as_was_searched() -> None:
    rung = Candidate("head", TREE, Prediction(2.0, 1.0))
    own, other = limits_of(job(), rung)
    assert (own.depth, own.width, own.top_k, own.nodes) == (8, 2, 3, 20)
    assert (other.depth, other.width, other.top_k, other.nodes) == (8, 4, 4, 20)
    chain = Candidate("head", TreeConfig.chain(2), Prediction(2.0, 1.0))
    assert limits_of(job(), chain)[0] == TreeConfig.chain(8)
