"""The promise of the whole engine: the text is the same with and without speculation."""

import random

import pytest
import torch

from engine.model_draft import ModelDraft
from engine.target import Target
from lossless_cases import (
    DRAFTS,
    Verdict,
    Wanted,
    Way,
    first_difference,
    judge,
    plain_lead,
    random_wanted,
    run,
)
from profiles import GREEDY, TreeConfig
from tiny import VOCAB, tiny_model, twin_with_noise

N_CASES = 300


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """Decode random requests in every way, once for all tests here."""
    rng, verdict = random.Random(0), Verdict()
    while verdict.n_cases < N_CASES:
        judge(random_wanted(rng), rng, verdict)
    return verdict


def test_b04_b08_no_draft_and_no_tree_changes_the_text(verdict: Verdict) -> None:
    """Speculative ids are plain ids and those of `transformers.generate`, for random requests,
    drafts and trees, fixed, adaptive, guarded or left and taken up at random, and they end for
    the same reason. In float64 near-ties are very rare."""
    assert not verdict.differences
    assert verdict.near_ties <= 2


def test_every_draft_of_the_cases_is_tried_and_the_good_ones_are_accepted(
    verdict: Verdict,
) -> None:
    """A draft that is never right would test nothing but rejection."""
    assert set(verdict.n_accepted) == set(DRAFTS)
    for name in ("twin", "noisy twin", "noisier twin", "fitted head", "hybrid twin"):
        assert verdict.n_accepted[name] >= 10, name
    rare = ("lookup", "suffix", "other suffix", "hybrid head")
    assert sum(verdict.n_accepted[name] for name in rare) >= 40


def rounding(target: Target, ids: list[int]) -> float:
    """Return how far the logits of a text differ, token by token against all at once, relative
    to their spread: what this dtype cannot tell apart."""
    cache = target.new_cache(len(ids))
    single = torch.cat([target.forward([token], cache)[0] for token in ids])
    whole = target.forward(ids, target.new_cache(len(ids)))[0]
    return float((single.double() - whole.double()).abs().max() / whole.double().std())


def test_b08_bfloat16_differs_only_where_the_lead_is_within_its_rounding() -> None:
    """float32 gives plain's ids; in bfloat16 a first difference needs a lead that rounding can
    turn, a small share of the usual one, so that no wrong token is excused."""
    tree = TreeConfig(depth=4, width=3, top_k=3, nodes=12)
    for seed in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            model = tiny_model("llama", seed, dtype, num_hidden_layers=2)
            target, draft = Target(model), ModelDraft(twin_with_noise(model, 0.1), VOCAB)
            wanted = Wanted("llama", model, target, [5, 9, 7, 11], GREEDY, 0, 60)
            plain = run(wanted).generated
            found = run(wanted, Way("noisy twin", draft, tree)).generated
            if dtype == torch.float32:
                assert found == plain
            elif found != plain:
                noise = rounding(target, wanted.prompt + plain)
                assert plain_lead(wanted, first_difference(plain, found)) <= 2 * noise < 0.1
