"""The holdout test: order of runs, bound, error rates, and what few prompts can prove."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from autotune.holdout import (
    ALPHA,
    MAX_RUNGS,
    MIN_PROMPTS,
    PairedTimes,
    Verdict,
    first_proved,
    judge,
    measure_block,
    paired,
    power,
    prompts_needed,
    ratio_low,
    run_order,
)


def times_of(ratios: "np.ndarray | list[float]", plain_s: float = 2.0) -> PairedTimes:
    """Return the times of prompts with these speedups."""
    return PairedTimes((plain_s,) * len(ratios), tuple(float(plain_s / ratio) for ratio in ratios))


@pytest.mark.parametrize("n_rungs", range(1, MAX_RUNGS + 1))
def test_b23_the_order_is_a_palindrome_with_every_side_twice(n_rungs: int) -> None:
    order = run_order(n_rungs)
    assert order == order[::-1]
    assert sorted(order) == sorted(2 * [-1, *range(n_rungs)])


@pytest.mark.parametrize("n_rungs", range(1, MAX_RUNGS + 1))
def test_b23_linear_drift_of_the_machine_cancels(n_rungs: int) -> None:
    clock = iter(range(10_000))
    blocks = [measure_block(n_rungs, lambda _: 100.0 + 0.5 * next(clock)) for _ in range(9)]
    for pair in paired(blocks, n_rungs):
        assert pair.plain_s == pair.speculative_s


def test_all_rungs_share_the_plain_runs_and_both_runs_count() -> None:
    seconds = {-1: 3.0, 0: 2.0, 1: 1.0}
    blocks = [measure_block(2, lambda rung, n=n: seconds[rung] * n) for n in range(1, 5)]
    pairs = paired(blocks, 2)
    assert pairs[0].plain_s == pairs[1].plain_s == (6.0, 12.0, 18.0, 24.0)
    assert pairs[0].speculative_s == (4.0, 8.0, 12.0, 16.0)
    assert pairs[1].speculative_s == (2.0, 4.0, 6.0, 8.0)


@settings(deadline=None)
@given(
    ratios=st.lists(st.floats(0.5, 3), min_size=8, max_size=40), n_rungs=st.integers(1, MAX_RUNGS)
)
def test_the_bound_of_the_typical_prompt_is_scipys_one_sided_t(
    ratios: list[float], n_rungs: int
) -> None:
    verdict = judge(times_of(ratios), n_rungs)
    logs = np.log(np.array(ratios))
    assert verdict.worst_prompt == pytest.approx(min(ratios))
    assert verdict.ratio == pytest.approx(stats.hmean(ratios))
    assert verdict.confidence == pytest.approx(1 - ALPHA / n_rungs)
    if logs.std() > 1e-6:  # scipy gives NaN where all are equal
        test = stats.ttest_1samp(logs, 0, alternative="greater")
        typical = math.exp(test.confidence_interval(1 - ALPHA / n_rungs).low)
        assert verdict.low <= typical * (1 + 1e-9)
        if verdict.low < typical * (1 - 1e-9):  # then it is the bound of the total
            assert_total_is_just_not_above(times_of(ratios), verdict.low, n_rungs)


def assert_total_is_just_not_above(times: PairedTimes, low: float, n_rungs: int) -> None:
    """Check a bound of the ratio of totals against scipy's test of plain - low * speculative."""
    saved = np.array(times.plain_s) - low * np.array(times.speculative_s)
    test = stats.ttest_1samp(saved, 0, alternative="greater")
    if low > 0:
        assert test.pvalue == pytest.approx(ALPHA / n_rungs, rel=1e-3)


def test_the_bound_of_the_total_is_fiellers() -> None:
    rng = np.random.default_rng(0)
    for n in (8, 32):
        plain = rng.lognormal(0, 0.5, n)
        speculative = plain / rng.lognormal(0.2, 0.3, n)
        low = ratio_low(plain, speculative, stats.t.ppf(0.975, n - 1) / math.sqrt(n))
        assert 0 < low < plain.sum() / speculative.sum()
        assert_total_is_just_not_above(PairedTimes(tuple(plain), tuple(speculative)), low, 2)


def test_b23_the_headline_is_the_ratio_of_total_times() -> None:
    times = PairedTimes((10.0, *[1.0] * 9), (20.0, *[0.5] * 9))
    assert judge(times, 1).ratio == pytest.approx(19 / 24.5)


def test_a_tree_that_costs_more_in_total_is_not_faster_however_many_prompts_gain() -> None:
    times = PairedTimes((100.0, *[1.0] * 39), (150.0, *[0.5] * 39))
    verdict = judge(times, 1)
    assert sum(np.log(np.array(times.plain_s) / np.array(times.speculative_s)) > 0.6) == 39
    assert verdict.ratio < 1
    assert not verdict.is_faster


def test_b25_a_ratio_of_totals_that_hangs_on_few_prompts_proves_nothing() -> None:
    # Every prompt gains 2 % but for one that is lucky, and long: the total is 1.3.
    times = PairedTimes((1.02,) * 31 + (40.0,), (1.0,) * 31 + (24.0,))
    verdict = judge(times, 1)
    assert verdict.ratio > 1.25
    assert not verdict.is_faster


def test_a_gain_of_the_typical_prompt_that_the_total_does_not_show_is_not_proved() -> None:
    # Speedups that vary are kinder to their geometric mean than to the total time (Jensen).
    rng = np.random.default_rng(0)
    n_typical = n_proved = 0
    for _ in range(400):
        logs = rng.normal(0.06, 0.4, 32)  # typical prompt 1.06, ratio of totals 0.98
        typical = stats.ttest_1samp(logs, 0, alternative="greater").pvalue < ALPHA
        n_typical += typical
        n_proved += judge(times_of(np.exp(logs)), 1).is_faster
    assert n_typical / 400 > 3 * ALPHA
    assert n_proved / 400 <= 2 * ALPHA


@pytest.mark.parametrize("n_rungs", [1, MAX_RUNGS])
def test_b25_a_tree_as_fast_as_plain_is_rarely_called_faster(n_rungs: int) -> None:
    rng = np.random.default_rng(0)
    n_jobs, n_prompts = 500, 12
    n_wrong = 0
    for _ in range(n_jobs):
        length = rng.lognormal(0, 0.5, n_prompts)  # prompts of very different length
        plain = length * rng.lognormal(0, 0.03, n_prompts)
        verdicts = []
        for _ in range(n_rungs):
            speculative = length * rng.lognormal(0, 0.15, n_prompts)
            pair = PairedTimes(tuple(plain.tolist()), tuple(speculative.tolist()))
            verdicts.append(judge(pair, n_rungs))
        n_wrong += first_proved(verdicts) is not None
    margin = 3 * math.sqrt(ALPHA * (1 - ALPHA) / n_jobs)
    assert n_wrong / n_jobs <= ALPHA + margin


def test_a_tree_that_is_a_tenth_faster_is_mostly_found() -> None:
    rng = np.random.default_rng(1)
    found = sum(
        judge(times_of(1.1 * rng.lognormal(0, 0.1, 32)), MAX_RUNGS).is_faster for _ in range(200)
    )
    assert found >= 190


@pytest.mark.parametrize("n_prompts", range(1, MIN_PROMPTS))
def test_b25_few_prompts_never_prove_anything(n_prompts: int) -> None:
    verdict = judge(times_of([10.0] * n_prompts), 1)
    assert not verdict.is_faster
    assert verdict.ratio == pytest.approx(10)


def test_enough_prompts_all_alike_prove_it() -> None:
    assert judge(times_of([1.2] * MIN_PROMPTS), 1).is_faster
    assert not judge(times_of([1.0] * MIN_PROMPTS), 1).is_faster


@pytest.mark.parametrize("n_prompts", range(1, MIN_PROMPTS))
def test_too_few_promising_prompts_ask_for_at_least_the_minimum(n_prompts: int) -> None:
    needed = judge(times_of([1.5, 1.4, 1.6, 1.5, 1.45, 1.55, 1.5][:n_prompts]), 1).n_prompts_needed
    assert needed is not None
    assert needed >= MIN_PROMPTS


def test_no_number_of_prompts_is_named_where_it_is_settled_or_hopeless() -> None:
    assert judge(times_of([1.5] * 10), 1).n_prompts_needed is None
    assert judge(times_of([0.9, 1.0] * 10), 1).n_prompts_needed is None


def test_the_number_of_prompts_named_mostly_settles_it() -> None:
    rng = np.random.default_rng(2)
    small = judge(times_of(np.exp(0.03 + 0.1 * np.array([-1.2, 1.2] * 5))), 1)
    assert not small.is_faster
    needed = small.n_prompts_needed
    assert needed is not None
    assert needed > 10
    proved = sum(
        judge(times_of(np.exp(rng.normal(0.03, small.spread, needed))), 1).is_faster
        for _ in range(300)
    )
    assert 0.7 <= proved / 300 <= 0.9  # planned for 0.8


def test_the_power_is_that_of_many_tests_and_the_number_is_the_smallest() -> None:
    rng = np.random.default_rng(3)
    draws = rng.normal(0.1, 0.2, (4000, 20))
    found = stats.ttest_1samp(draws, 0, axis=1, alternative="greater").pvalue < 0.05
    assert power(0.5, 20, 0.95) == pytest.approx(found.mean(), abs=0.03)
    needed = prompts_needed(0.5, 0.95)
    assert needed is not None
    assert power(0.5, needed - 1, 0.95) < 0.8 <= power(0.5, needed, 0.95)


def test_no_number_is_named_that_nobody_would_run() -> None:
    assert prompts_needed(1e-5, 0.95) is None
    assert prompts_needed(0.0, 0.95) is None
    assert prompts_needed(-math.inf, 0.95) is None
    assert prompts_needed(1e9, 0.95) == prompts_needed(math.inf, 0.95) == MIN_PROMPTS


def test_no_prompts_at_all_are_no_evidence() -> None:
    verdict = judge(PairedTimes((), ()), 1)
    assert not verdict.is_faster
    assert verdict.n_prompts_needed == MIN_PROMPTS


def verdict(low: float, ratio: float = 1.5) -> Verdict:
    return Verdict(
        ratio, low, confidence=0.95, worst_prompt=low, spread=0.1, n_prompts=MIN_PROMPTS
    )


def test_the_first_rung_that_is_proved_wins_not_the_best() -> None:
    assert first_proved([verdict(0.9), verdict(1.01), verdict(1.4, ratio=2.0)]) == 1
    assert first_proved([verdict(1.1), verdict(1.4)]) == 0
    assert first_proved([verdict(0.9), verdict(0.99)]) is None
    assert first_proved([]) is None
