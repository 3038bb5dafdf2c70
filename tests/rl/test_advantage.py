"""Credit: every episode leaves exactly once, and only differences within a group teach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_toys import make_episode, make_trace

from strop.core.outcome import Failed, Scored, Ungraded
from strop.core.random import generator
from strop.rl.advantage import assign_credit, group_advantages, permuted_rewards, sort_key

outcomes = st.one_of(
    st.builds(lambda r: Scored(reward=r), st.sampled_from([0.0, 0.25, 1.0])),
    st.just(Ungraded(reason="judge")),
    st.just(Failed(error="SandboxError: gone")),
)


def test_reward_minus_mean_without_deviation() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([0.1, 0.3]).tolist() == pytest.approx([-0.1, 0.1])


@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_rewards_are_exactly_no_signal(reward: float, size: int) -> None:
    assert not group_advantages([reward] * size).any()


@pytest.mark.parametrize("rewards", [[], [float("nan"), 1.0], [float("inf")]])
def test_rewards_that_mean_nothing_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(rewards)


@settings(max_examples=60)
@given(st.lists(st.lists(outcomes, min_size=1, max_size=5), min_size=1, max_size=5), st.randoms())
def test_conservation_and_order(groups: list[list[object]], shuffle: object) -> None:
    episodes = [make_episode(f"task{g}", s, o) for g, members in enumerate(groups) for s, o in enumerate(members)]  # type: ignore[arg-type]
    credit = assign_credit(episodes)
    assert credit.trained + sum(credit.dropped.values()) + sum(credit.failed.values()) == len(episodes)
    keys = [sort_key(sample.key) for sample in credit.samples]
    assert keys == sorted(keys)
    mixed = list(episodes)
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]
    again = assign_credit(mixed)
    assert [s.key for s in again.samples] == [s.key for s in credit.samples]
    assert [s.advantage.tolist() for s in again.samples] == [s.advantage.tolist() for s in credit.samples]


def test_missing_members_leave_the_mean_over_the_scored() -> None:
    group = [Scored(reward=1.0), Failed(error="SandboxError: gone"), Scored(reward=0.0), Ungraded(reason="judge")]
    credit = assign_credit([make_episode("t", i, o) for i, o in enumerate(group)])
    assert credit.advantages.tolist() == [0.5, -0.5]
    assert credit.dropped == {"ungraded": 1}
    assert credit.failed == {"SandboxError": 1}


def test_reasons() -> None:
    lone = [make_episode("lone", 0, Scored(reward=1.0)), make_episode("lone", 1, Failed(error="boom"))]
    flat = [make_episode("flat", i, Scored(reward=1.0)) for i in range(3)]
    credit = assign_credit([*lone, *flat])
    assert credit.dropped == {"small_group": 1, "no_signal": 3}
    assert credit.failed == {"boom": 1}
    assert (credit.num_groups, credit.groups_no_signal, credit.samples) == (1, 1, ())


def test_advantage_stands_on_every_sampled_token_of_every_trace_also_when_truncated() -> None:
    traces = [make_trace([1, 2, 3, 4], [0, 1, 0, 1]), make_trace([5, 6], [0, 1])]
    good = make_episode("t", 0, Scored(reward=1.0), traces=traces)
    cut = make_episode("t", 1, Scored(reward=0.0))
    object.__setattr__(cut, "stop_reason", "max_tokens")
    credit = assign_credit([good, cut])
    assert [s.advantage.tolist() for s in credit.samples] == [[0, 0.5, 0, 0.5], [0, 0.5], [0, 0, -0.5, -0.5]]
    assert credit.trained == 2


def test_ungraded_by_mistake_is_refused() -> None:
    with pytest.raises(ValueError, match="has no outcome"):
        assign_credit([make_episode("t", 0, None)])
    with pytest.raises(ValueError, match="same key"):
        assign_credit([make_episode("t", 0, Scored(reward=1.0))] * 2)


def test_permutation_keeps_the_rewards_and_breaks_the_link() -> None:
    rewards = [float(i % 7 < 3) for i in range(256)]
    groups = [list(range(start, 256, 32)) for start in range(32)]
    permuted = permuted_rewards(rewards, groups, generator("p", 0))
    assert permuted == permuted_rewards(rewards, groups, generator("p", 0))
    for members in groups:
        assert sorted(permuted[i] for i in members) == sorted(rewards[i] for i in members)
    means = {i: np.mean([rewards[j] for j in members]) for members in groups for i in members}
    earned, given = (np.array([values[i] - means[i] for i in range(256)]) for values in (rewards, permuted))
    assert abs(np.corrcoef(earned, given)[0, 1]) < 0.3


def test_a_control_has_as_much_signal_as_the_run() -> None:
    episodes = [make_episode(f"t{i // 4}", i % 4, Scored(reward=float(i % 5 == 0 and i < 16))) for i in range(32)]
    real, control = assign_credit(episodes), assign_credit(episodes, permutation=generator("p", 1))
    assert (real.trained, real.groups_no_signal, real.dropped) == (control.trained, control.groups_no_signal, control.dropped)
    assert sorted(real.advantages) == sorted(control.advantages)
    assert real.advantages.tolist() != control.advantages.tolist()
