"""Task order, staleness window and conservation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_toys import ToyPool, make_sample, make_trace

from strop.core.errors import ConfigError
from strop.rl.schedule import Conservation, Window, check_staleness, plan_groups

TASKS = ToyPool(Path("."), 100).tasks("train")


def test_every_prompt_once_and_a_longer_run_begins_the_same() -> None:
    plan = plan_groups(TASKS, seed=3, steps=6, groups=16, drop_system_prompt=0.25)
    ids = [group.task.task_id for step in plan for group in step]
    assert len(set(ids)) == len(ids) == 96
    assert [sum(not g.system_prompt for g in step) for step in plan] == [4] * 6
    assert plan_groups(TASKS, seed=3, steps=2, groups=16, drop_system_prompt=0.25) == plan[:2]
    assert plan_groups(TASKS, seed=4, steps=6, groups=16, drop_system_prompt=0.25) != plan
    with pytest.raises(ConfigError, match=r"needs 112 training tasks.*there are 100.*at most 6"):
        plan_groups(TASKS, seed=3, steps=7, groups=16, drop_system_prompt=0)


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 10))
def test_window_dispatches_every_slot_once_within_the_bound(steps: int, staleness: int, start: int) -> None:
    start = min(start, steps)
    window = Window(steps=steps, max_staleness=staleness, next_slot=start)
    seen: list[int] = []
    for version in range(start, steps):
        admitted = window.admit(version)
        assert all(slot - version <= staleness for slot in admitted)
        seen += admitted
        assert version in seen
    assert seen == list(range(start, steps))


def test_staleness_is_checked_on_sampled_tokens_only() -> None:
    sample = make_sample(make_trace([1, 2, 3], [0, 1, 1], version=4))
    check_staleness([sample], version=5, max_staleness=1)
    with pytest.raises(AssertionError, match=r"1 versions old; rl\.max_staleness is 0"):
        check_staleness([sample], version=5, max_staleness=0)
    with pytest.raises(AssertionError, match="newer than the trainer's 3"):
        check_staleness([sample], version=3, max_staleness=9)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_conservation_holds_and_survives_a_commit(steps: list[tuple[int, int, int]]) -> None:
    law = Conservation()
    for trained, dropped, failed in steps:
        total = trained + dropped + failed
        law.dispatch(total)
        law.check()
        law.settle(total, trained=trained, dropped={"no_signal": dropped}, failed={"SandboxError": failed})
        law.check()
    law.check(finished=True)
    facts = law.facts()
    law.dispatch(7)
    assert law.facts() == facts
    assert Conservation.of(facts).facts() == facts
    with pytest.raises(AssertionError, match="7 episodes in flight"):
        law.check(finished=True)


def test_a_lost_and_a_doubled_episode_are_caught() -> None:
    for trained in (3, 5):
        law = Conservation()
        law.dispatch(4)
        law.settle(4, trained=trained, dropped={}, failed={})
        with pytest.raises(AssertionError, match="conservation violated"):
            law.check()


def test_metrics_name_every_reason() -> None:
    law = Conservation(dispatched=6, trained=2, dropped=Counter(no_signal=3), failed=Counter(EngineError=1))
    metrics = law.metrics()
    assert metrics["conservation/dropped/no_signal"] == 3
    assert metrics["conservation/failed/EngineError"] == 1
    assert metrics["conservation/dropped"] == 3
