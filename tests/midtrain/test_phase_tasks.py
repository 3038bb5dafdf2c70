"""Which training tasks mid-training shows and which are left to RL, on the pool that ships."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.task import Task
from strop.midtrain.phase import midtrain_tasks, rl_tasks
from strop.tasks.pool import BUILTIN, RepairPool, open_pool


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> RepairPool:
    return open_pool(BUILTIN, tmp_path_factory.mktemp("cache"))


def modules(pool: RepairPool, tasks: list[Task]) -> set[tuple[str, str]]:
    return {(task.provenance["source"], pool.function(task)[0]) for task in tasks}


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 5))
def test_rl_sees_no_module_of_which_a_repair_was_shown(pool: RepairPool, count: int, seed: int) -> None:
    shown, left = midtrain_tasks(pool, count, seed), rl_tasks(pool, count, seed)
    total = len(pool.tasks("train"))
    assert len(shown) == min(count, total // 2)
    assert not modules(pool, shown) & modules(pool, left)
    cut = total - len(shown) - len(left)  # the rest of the one module that the count cuts through
    assert 0 <= cut < total / 10
    assert {task.split for task in [*shown, *left]} == {"train"}


def test_the_choice_depends_on_the_seed_and_grows_with_the_count(pool: RepairPool) -> None:
    few, more = midtrain_tasks(pool, 100, 0), midtrain_tasks(pool, 400, 0)
    assert few == more[:100]
    assert few != midtrain_tasks(pool, 100, 1)
