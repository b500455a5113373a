"""What trees other engines can run."""

import pytest

from profiles import PLAIN, TreeConfig
from profiles.engine_spaces import ENGINE_SPACES, can_run, why_not

BUSHY = TreeConfig(depth=3, width=4, top_k=4, nodes=20)
SLIM = TreeConfig(depth=3, width=4, top_k=4, nodes=8)
OWN_WIDTH = TreeConfig(depth=3, width=2, top_k=4, nodes=8)


@pytest.mark.parametrize("engine", ENGINE_SPACES)
@pytest.mark.parametrize("kind", ["eagle3", "model", "lookup"])
def test_every_engine_runs_plain_and_chains(engine: str, kind: str) -> None:
    assert can_run(engine, PLAIN, kind)
    assert can_run(engine, TreeConfig.chain(1), kind)
    assert can_run(engine, TreeConfig.chain(5), kind)


@pytest.mark.parametrize("engine", ENGINE_SPACES)
def test_no_engine_runs_a_width_of_its_own(engine: str) -> None:
    assert not can_run(engine, OWN_WIDTH, "eagle3")


def test_vllm_runs_chains_only() -> None:
    assert why_not("vllm", SLIM, "eagle3") == (
        "vLLM drafts with kind eagle3 in a chain only (width 1, top_k 1)"
    )


def test_only_tensorrt_llm_limits_the_nodes_by_level() -> None:
    assert can_run("tensorrt-llm", SLIM, "eagle3")
    assert why_not("tensorrt-llm", BUSHY, "eagle3") == (
        "TensorRT-LLM verifies at most top_k x depth = 12 nodes"
    )
    assert can_run("sglang", BUSHY, "eagle3")
    assert can_run("openvino", BUSHY, "eagle3")


def test_small_models_branch_in_sglang_alone() -> None:
    assert [e for e in ENGINE_SPACES if can_run(e, SLIM, "model")] == ["sglang"]


def test_lookup_trees_are_chains_everywhere() -> None:
    assert not any(can_run(engine, SLIM, "lookup") for engine in ENGINE_SPACES)


def test_trees_that_are_equal_are_judged_alike() -> None:
    """A single level has no width, and a top_k beyond its nodes proposes what is dropped."""
    single_level = TreeConfig(depth=1, width=1, top_k=8, nodes=4)
    assert can_run("tensorrt-llm", single_level, "eagle3")
    assert can_run("vllm", TreeConfig(depth=1, width=1, top_k=8, nodes=1), "eagle3")
