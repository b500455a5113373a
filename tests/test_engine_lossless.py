"""The promise of the whole engine: the text is the same with and without speculation."""

import random

import pytest
from lossless_cases import DRAFTS, Verdict, judge, random_wanted


def run_cases(seed: int, n_cases: int) -> Verdict:
    rng, verdict = random.Random(seed), Verdict()
    while verdict.n_cases < n_cases:
        judge(random_wanted(rng), rng, verdict)
    return verdict


@pytest.mark.parametrize("seed", range(5))
def test_b04_b08_no_draft_and_no_tree_changes_the_text(seed: int) -> None:
    """Speculative ids are plain ids and those of `transformers.generate`, for random requests,
    drafts and trees, and they end for the same reason."""
    verdict = run_cases(seed, 60)
    assert not verdict.differences
    assert verdict.near_ties <= 1
    assert verdict.n_cases >= 60


def test_every_draft_of_the_cases_is_accepted_sometimes() -> None:
    """A draft that is never right would test nothing but rejection."""
    verdict = run_cases(100, 90)
    assert not verdict.differences
    assert set(verdict.n_accepted) == set(DRAFTS)
    for name in ("twin", "noisy twin", "noisier twin", "lookup", "fitted head"):
        assert verdict.n_accepted[name] >= 10, name
