"""Medians and ratios over prompts, with their intervals."""

import math

import numpy as np
import pytest

from autotune.bench.speeds import median_of, ratio_of_totals


def test_a_ratio_is_that_of_the_totals_and_lies_in_its_interval() -> None:
    above, below = [3.0, 1.0, 2.0, 2.5], [1.0, 1.0, 1.0, 1.5]
    figure = ratio_of_totals(above, below)
    assert figure.value == pytest.approx(8.5 / 4.5)
    assert min(a / b for a, b in zip(above, below, strict=True)) <= figure.low < figure.value
    assert figure.value < figure.high <= 3.0


def test_pairs_stay_together_when_prompts_are_resampled() -> None:
    below = [0.1, 5.0, 1.0, 30.0]
    figure = ratio_of_totals([2 * seconds for seconds in below], below)
    assert figure == pytest.approx((2.0, 2.0, 2.0))


def test_a_single_prompt_has_no_interval() -> None:
    for figure in (median_of([4.0]), ratio_of_totals([4.0], [2.0])):
        assert figure.value in (2.0, 4.0)
        assert math.isnan(figure.low)
        assert math.isnan(figure.high)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    n_covered, n_trials = 0, 200
    for trial in range(n_trials):
        below = rng.uniform(0.5, 2.0, 16)
        above = below * 1.5 * np.exp(rng.normal(0, 0.2, 16))
        figure = ratio_of_totals(above.tolist(), below.tolist(), seed=trial)
        n_covered += figure.low <= 1.5 * math.exp(0.2**2 / 2) <= figure.high
    assert 0.85 <= n_covered / n_trials <= 0.99
