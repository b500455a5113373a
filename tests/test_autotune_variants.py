"""Drafts with other knobs: scored by replay, and a part of the search."""

from dataclasses import replace

import pytest

from autotune.candidates import Candidate, leaders
from autotune.cost import Prediction
from autotune.cost.predicting import Predictor
from autotune.cost.timing import measure_costs
from autotune.job import Job, Models, prepare
from autotune.progress import Silent
from autotune.settings import Settings
from autotune.space import COARSE, WIDTH_AND_TOP_K, near
from autotune.variants import TRIED, with_variants
from engine.trace import Trace
from pairs import save_target, write_prompts
from profiles import TreeConfig

TINY = Settings(n_tune=3, n_holdout=1, max_nodes=6, max_lookup_depth=4, n_probe_rounds=1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    base = tmp_path_factory.mktemp("variants")
    models = Models(str(save_target(base / "target")), ["lookup"], "float32", "cpu")
    prompts = write_prompts(base / "prompts.jsonl")
    return with_variants(prepare(models, prompts, "x", TINY, Silent()))


def test_every_variant_says_its_knobs_and_has_them(job: Job) -> None:
    assert list(job.drafts)[0] == "lookup"
    assert len(job.drafts) == 1 + len(TRIED["lookup"]) == 1 + len(job.variant_of)
    for name, base in job.variant_of.items():
        assert base == "lookup"
        knob, value = name.removeprefix("lookup ").split("=")
        assert str(getattr(job.drafts[name].ref, knob)) == value
        assert job.drafts[name].ref != job.drafts[base].ref
        assert job.spaces[name] == job.spaces[base]


def test_a_variant_that_is_the_draft_itself_is_left_out(job: Job) -> None:
    own = replace(job, drafts={"lookup": job.drafts["lookup"].variant(max_match=3)}, variant_of={})
    assert "lookup max_match=3" not in with_variants(own).drafts


def test_variants_are_scored_at_the_draft_s_best_width_alone(job: Job) -> None:
    texts = [Trace(str(i), [1, 2, 3, 4], [5, 6, 5, 6, 5, 6, 5, 6, 5, 6]) for i in range(2)]
    costs = measure_costs(job, texts, Silent())
    predicted = Predictor(job, texts, costs).predict_all(Silent())
    scored = {name: {c.tree for c in predicted if c.draft == name} for name in job.drafts}
    assert all(scored.values())
    best = max((c for c in predicted if c.draft == "lookup"), key=decode_speedup).tree
    for name in job.variant_of:
        assert {(t.width, t.top_k) for t in scored[name]} == {(best.width, best.top_k)}
        assert costs.summary(name) == costs.summary("lookup")


def decode_speedup(candidate: Candidate) -> float:
    return candidate.prediction.decode_speedup


def test_a_tree_is_raced_with_the_best_of_a_draft_s_variants_alone() -> None:
    tree = TreeConfig.chain(3)
    alike = [Candidate(name, tree, Prediction(s, 1)) for name, s in (("a", 1.5), ("a k=1", 1.6))]
    other = Candidate("b", tree, Prediction(1.2, 1))
    assert leaders([*alike, other], 3, {"a k=1": "a"}) == [alike[1], other]


def test_the_pairs_near_a_coarse_one_surround_it() -> None:
    for pair in COARSE:
        assert pair not in near(*pair)
        assert set(near(*pair)) <= set(WIDTH_AND_TOP_K)
    assert near(4, 4) == [(2, 4), (3, 3), (3, 6), (6, 6)]
    assert near(2, 2) == [(1, 2), (2, 3), (2, 4), (3, 3)]
