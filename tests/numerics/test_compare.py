"""Comparators: exact zeros on equals, and each planted kind of difference shows in the figure that is meant for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.metrics import validate
from strop.numerics.compare import compare_logprobs, differing_routes, effective_sample_frac

DRAW = np.random.default_rng(0)
LOGPROBS = -DRAW.exponential(1.0, 4000).astype(np.float32)
SIGNS = np.where(DRAW.random(4000) < 0.5, 1.0, -1.0).astype(np.float32)


def test_equals_are_exactly_zero() -> None:
    metrics = compare_logprobs(LOGPROBS, LOGPROBS.copy(), SIGNS)
    assert validate(metrics).keys() == metrics.keys()
    for key in (
        "logprob_diff_mean_nats",
        "logprob_diff_max_nats",
        "logprob_diff_p99_nats",
        "logprob_diff_p999_nats",
        "k1_nats",
        "k3_nats",
        "advantage_skew",
        "clip_frac",
    ):
        assert metrics[f"numerics/{key}"] == 0.0
    assert metrics["numerics/token_mult_error"] == metrics["numerics/ess_frac"] == metrics["numerics/is_exact"] == 1.0


def test_one_last_bit_is_seen() -> None:
    other = LOGPROBS.copy()
    other[7] = np.nextafter(other[7], np.float32(0))
    metrics = compare_logprobs(LOGPROBS, other, SIGNS)
    assert metrics["numerics/is_exact"] == 0.0
    assert 0 < metrics["numerics/logprob_diff_max_nats"] < 1e-6


def test_bias_along_the_advantage_is_seen_where_k3_is_blind() -> None:
    """Same size of difference, once along the advantage and once not: k3 can't tell, the skew can."""
    size = np.float32(0.01)
    along = compare_logprobs(LOGPROBS, LOGPROBS + size * SIGNS, SIGNS)
    across = compare_logprobs(LOGPROBS, LOGPROBS + size * DRAW.permutation(SIGNS), SIGNS)
    assert along["numerics/k3_nats"] == pytest.approx(across["numerics/k3_nats"], rel=0.05)
    assert along["numerics/advantage_skew"] > 10 * abs(across["numerics/advantage_skew"])
    parts = along["numerics/advantage_skew_positive"] + along["numerics/advantage_skew_negative"]
    assert parts == pytest.approx(along["numerics/advantage_skew"])


def test_wrong_temperature_and_stale_weights_move_the_figures() -> None:
    metrics = compare_logprobs(LOGPROBS, LOGPROBS * np.float32(1.5), SIGNS)
    assert metrics["numerics/k3_nats"] > 0.01
    assert metrics["numerics/ratio_above_2_frac"] > 0.1
    assert metrics["numerics/ess_frac"] < 0.9
    assert metrics["numerics/token_mult_error"] > 1.05


def test_not_finite_is_counted_and_nothing_else_is_claimed() -> None:
    other = LOGPROBS.copy()
    other[:3] = np.nan
    metrics = compare_logprobs(LOGPROBS, other, SIGNS)
    assert metrics["numerics/nonfinite"] == 3
    assert "numerics/k3_nats" not in metrics
    assert compare_logprobs(LOGPROBS[:0], LOGPROBS[:0], SIGNS[:0]) == {"numerics/tokens": 0.0}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_effective_sample_share_lies_in_its_range(weights: list[float]) -> None:
    assert 0 < effective_sample_frac(np.array(weights)) <= 1 + 1e-12


@given(rows=st.integers(0, 6), changes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)), max_size=4))
def test_routes_differ_where_any_expert_does(rows: int, changes: list[tuple[int, int, int]]) -> None:
    recorded = np.tile(np.array([[0, 1], [2, 3]]), (rows, 1, 1))
    natural = recorded.copy()
    expected = np.zeros((rows, 2), bool)
    for row, layer, place in changes:
        if row < rows:
            natural[row, layer, place] = 9
            expected[row, layer] = True
    found = differing_routes(recorded, natural)
    assert found.dtype == np.bool_
    assert np.array_equal(found, expected)
