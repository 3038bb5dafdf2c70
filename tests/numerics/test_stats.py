"""Intervals, paired gains and best-of-k: laws, known values, coverage, and faults that must be noticed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.numerics.stats import best_of_k, mean_interval, paired_interval, pass_at_k, student_quantile

units = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 6)), min_size=2, max_size=30)


@settings(max_examples=40, deadline=None)
@given(units, st.randoms(use_true_random=False))
def test_interval_does_not_depend_on_the_order_of_the_tasks(pairs, random):
    shuffled = list(pairs)
    random.shuffle(shuffled)
    one = mean_interval([v for v, _ in pairs], [str(c) for _, c in pairs], resamples=200)
    two = mean_interval([v for v, _ in shuffled], [str(c) for _, c in shuffled], resamples=200)
    assert one == two


@settings(max_examples=40, deadline=None)
@given(units, st.floats(-3, 3))
def test_shifting_every_value_shifts_the_interval(pairs, shift):
    values = np.array([v for v, _ in pairs])
    clusters = [str(c) for _, c in pairs]
    base = mean_interval(values, clusters, resamples=200)
    moved = mean_interval(values + shift, clusters, resamples=200)
    assert moved.mean == pytest.approx(base.mean + shift, abs=1e-9)
    if base.clusters > 1:
        assert (moved.low, moved.high) == pytest.approx((base.low + shift, base.high + shift), abs=1e-9)


def test_one_cluster_says_nothing_about_spread():
    interval = mean_interval([0.0, 1.0, 1.0], ["f"] * 3)
    assert (interval.low, interval.high, interval.clusters) == (-math.inf, math.inf, 1)


def test_clustered_values_give_a_wider_interval_than_independent_ones():
    values = [float(i // 8 % 2) for i in range(128)]
    clustered = mean_interval(values, [str(i // 8) for i in range(128)])
    independent = mean_interval(values, [str(i) for i in range(128)])
    assert clustered.high - clustered.low > 2 * (independent.high - independent.low)


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(300):
        effects = rng.normal(0, 1, 10)
        values = np.repeat(effects, 4) + rng.normal(0, 0.3, 40)
        interval = mean_interval(values, [str(i // 4) for i in range(40)], confidence=0.9, resamples=400, seed=trial)
        hits += interval.low <= 0 <= interval.high
    assert 0.85 <= hits / 300 <= 0.95  # unwidened percentiles reach about .84 here, unclustered ones about .6


def test_paired_interval_is_narrower_than_the_spread_of_tasks():
    rng = np.random.default_rng(0)
    difficulty = rng.uniform(0, 1, 60)
    clusters = [str(i) for i in range(60)]
    gain = paired_interval(difficulty, difficulty + 0.05 + rng.normal(0, 0.01, 60), clusters)
    assert gain.low > 0.03
    assert gain.high < 0.07


@pytest.mark.parametrize(
    ("values", "clusters", "confidence", "message"),
    [
        ([], [], 0.95, "at least one"),
        ([1.0], ["a", "b"], 0.95, "as many values as clusters"),
        ([1.0, math.nan], ["a", "b"], 0.95, "not finite at index 1"),
        ([1.0, 2.0], ["a", "b"], 95, r"confidence must lie in \(0, 1\), got 95"),
    ],
)
def test_wrong_input_is_named(values, clusters, confidence, message):
    with pytest.raises(ValueError, match=message):
        mean_interval(values, clusters, confidence=confidence)
    with pytest.raises(ValueError, match="same tasks"):
        paired_interval([1.0], [1.0, 2.0], ["a"])


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(results, data):
    k = data.draw(st.integers(1, len(results)))
    subsets = list(itertools.combinations(results, k))
    share = sum(any(s) for s in subsets) / len(subsets)
    assert pass_at_k(len(results), sum(results), k) == pytest.approx(share, abs=1e-12)
    assert best_of_k([float(r) for r in results], k) == pytest.approx(share, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_of_the_best_of_all_subsets(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, k))
    assert best_of_k(rewards, k) == pytest.approx(sum(max(s) for s in subsets) / len(subsets), abs=1e-9)


@pytest.mark.parametrize("arguments", [(4, 1, 0), (4, 1, 5), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_numbers_that_do_not_fit(arguments):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(*arguments)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 4, 2.77645),
        (0.95, 9, 1.83311),
        (0.005, 30, -2.75),
        (0.975, 1000, 1.96234),
        (0.5, 3, 0),
    ],
)
def test_student_quantiles_match_the_tables(probability, freedom, value):
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=1e-3)
