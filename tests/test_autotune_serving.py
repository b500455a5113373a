"""How a rung will be served: the guard's least length, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.candidates import Candidate
from autotune.cost import Prediction
from autotune.serving import fixed_serving, limits_of, longest_context
from autotune.space import SearchSpace
from profiles import CostModelSummary, CostTable, TreeConfig
from profiles.prices import Prices

TREE = TreeConfig(depth=3, width=2, top_k=3, nodes=6)


def job(**sample: Any) -> Any:
    space = SearchSpace(max_depth=8, max_width=4, max_top_k=4, max_nodes=20)
    settings = SimpleNamespace(max_new_tokens=100)
    return SimpleNamespace(
        sample=SimpleNamespace(**sample), spaces={"head": space}, settings=settings
    )


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


def verify_at(context: float, nodes: float) -> CostTable:
    return CostTable(name="verify", at={"context": context}, x=[1.0, 6.0], relative=[nodes, nodes])


@pytest.mark.parametrize(("speedup", "most"), [(1.28, 280), (1.98, 980), (2.1, None), (0.9, None)])
def test_rounds_that_grow_dear_with_the_context_are_served_up_to_where_they_lose(
    speedup: float, most: int | None
) -> None:
    """A plain pass costs 1 whatever the context, a round 1 at none and 2 at 1,000 tokens: at
    c it costs 1 + c / 1000. A tree that gains by `speedup` behind 0 tokens loses from there on."""
    tables = [
        CostTable(name="plain", x=[0.0, 1000.0], relative=[1.0, 1.0]),
        *(verify_at(0.0, 1.0), verify_at(1000.0, 2.0)),
    ]
    summary = CostModelSummary(reference_ms=1.0, tables=tables, valid={"context": (0.0, 1000.0)})
    found = longest_context(TREE, Prediction(speedup, 1.0), Prices(summary), 0.0)
    assert found is None if most is None else found == pytest.approx(most, abs=1)


def test_a_context_beyond_what_was_measured_says_nothing() -> None:
    """No table of contexts, no limit."""
    summary = CostModelSummary(reference_ms=1.0, tables=[verify_at(0.0, 1.0)])
    assert longest_context(TREE, Prediction(1.5, 1.0), Prices(summary), 50.0) is None
