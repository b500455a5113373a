"""The promise of the whole engine: the text is the same with and without speculation."""

import random

import pytest

from lossless_cases import DRAFTS, Verdict, judge, random_wanted

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
