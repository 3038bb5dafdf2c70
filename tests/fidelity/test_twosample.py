"""The two-sample test finds what was planted, names it, can't learn tasks, and is silent on equal kinds."""

from __future__ import annotations

import numpy as np
import pytest
from fidelity_kit import Plant, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.fidelity.collect import Observation
from strop.fidelity.twosample import area, two_sample


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_the_area_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool]]):
    scores, labels = [float(score) for score, _ in rows], [label for _, label in rows]
    if len(set(labels)) < 2:
        with pytest.raises(ValueError, match="both kinds"):
            area(scores, labels)
        return
    pairs = [(a > b) + (a == b) / 2 for a, mine in rows for b, other in rows if mine and not other]
    assert area(scores, labels) == pytest.approx(np.mean(pairs))


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(-5, 5), min_size=4, max_size=20))
def test_swapping_the_kinds_mirrors_the_area(scores: list[float]):
    labels = [index % 2 == 0 for index in range(len(scores))]
    assert area(scores, labels) + area(scores, [not label for label in labels]) == pytest.approx(1)


PLANTS: dict[str, tuple[str, Plant]] = {
    "a text": ("hostname", lambda prod, rng: {"hostname": "web-7" if prod else "box"}),
    "a text of a family": (
        "hostname",
        lambda prod, rng: {"hostname": f"ip-10-0-{rng.integers(999)}" if prod else f"{rng.integers(1 << 40):012x}"},
    ),
    "a shifted number": ("latency_python_ms", lambda prod, rng: {"latency_python_ms": float(rng.gamma(9, 1) * (3 if prod else 1))}),
    "a number's spread": (
        "uptime_s",
        lambda prod, rng: {"uptime_s": float(np.exp(rng.normal(8, 2))) if prod else 3000.0 + float(rng.normal())},
    ),
    "one member of a set": ("variables", lambda prod, rng: {"variables": ("HOME", "PATH", *(("CI",) if prod else ()))}),
    "a share of a set": ("tools", lambda prod, rng: {"tools": ("git", *(("vim",) if rng.random() < (0.95 if prod else 0.1) else ()))}),
    "an unreadable answer": ("cgroup", lambda prod, rng: {"cgroup": "unreadable" if prod else ("/",)}),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_difference_is_found_with_its_probe_first(plant: str):
    probe, make = PLANTS[plant]
    found = two_sample(world(24, 8, 0, make), permutations=60)
    assert found.probes[0].name == probe
    assert found.low > 0.5
    assert found.p_value < 0.05
    assert found.probes[0].p_value < 0.05


def test_equal_kinds_are_left_alone():
    contained, named = 0, 0
    for seed in range(12):
        found = two_sample(world(20, 10, seed), permutations=40, seed=seed)
        contained += found.low <= 0.5 <= found.high
        named += any(row.p_value <= 0.025 for row in found.probes)
    assert contained >= 11
    assert named <= 2


def test_boxes_that_answer_all_the_same_give_exactly_one_half():
    rows = [Observation(is_production=side, group=f"g{index}", values={"hostname": "box"}) for index in range(4) for side in (False, True)]
    found = two_sample(rows, permutations=20)
    assert (found.auc, found.low, found.high, found.p_value) == (0.5, 0.5, 0.5, 1.0)
    assert found.probes == ()


def test_knowing_the_task_gains_nothing():
    def by_task(is_production: bool, rng: np.random.Generator) -> dict:
        return {}

    rows = world(30, 10, 3, by_task)
    # In half of the tasks production says A, in the other half B: within a task a giveaway, across tasks nothing.
    rows = [
        Observation(
            is_production=row.is_production,
            group=row.group,
            values=dict.fromkeys(row.values, "same") | {"git": f"{row.group}-{row.is_production}"},
        )
        for row in rows
    ]
    assert two_sample(rows, permutations=20).auc == pytest.approx(0.5, abs=0.05)


def test_the_same_seed_gives_the_same_result():
    rows = world(12, 4, 1)
    assert two_sample(rows, permutations=10, seed=5) == two_sample(rows, permutations=10, seed=5)


def test_what_cannot_be_tested_is_refused():
    rows = world(6, 3, 0)
    with pytest.raises(ValueError, match="two groups"):
        two_sample([row for row in rows if row.group == "task0"])
    with pytest.raises(ValueError, match="one kind only"):
        two_sample([row for row in rows if row.group != "task0" or row.is_production])


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000))
def test_the_interval_holds_the_area(seed: int):
    found = two_sample(world(8, 4, seed), permutations=10, resamples=200, seed=seed)
    assert 0 <= found.low <= found.auc <= found.high <= 1
    assert 0 < found.p_value <= 1
