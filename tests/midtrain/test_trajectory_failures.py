"""Collecting trajectories when boxes break: once is retried, twice stops the phase and leaves nothing running."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from strop.core.config import load_config
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import SandboxError
from strop.core.task import Task
from strop.midtrain import phase

TASKS = [Task(task_id=f"t{n}", instruction="", workspace="w", tools=("edit",), verifier="v", split="train") for n in range(4)]
NOTHING = SimpleNamespace(put_episode=lambda episode: None, stage=lambda name, total: None, progress=lambda done: None)


def collect(monkeypatch: pytest.MonkeyPatch, breaks: dict[str, int]) -> tuple[list[Any], Counter[str], list[str]]:
    """Collect with boxes that break so many times for a task; returns what came, tries by task, and who was cancelled."""
    tries: Counter[str] = Counter()
    cancelled: list[str] = []

    async def run_episode(task: Task, key: EpisodeKey, **world: Any) -> Episode:
        tries[task.task_id] += 1
        if tries[task.task_id] <= breaks.get(task.task_id, 0):
            raise SandboxError(f"the box of {task.task_id} broke")
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            cancelled.append(task.task_id)
            raise
        return Episode(key=key, traces=(), turns=(), stop_reason="submitted")

    monkeypatch.setattr(phase, "run_episode", run_episode)
    world: Any = {"pool": None, "sandbox_provider": None, "renderer": None, "store": NOTHING, "view": NOTHING}
    try:
        played = asyncio.run(phase.collect_trajectories(load_config(None), TASKS, **world))
    except SandboxError as error:
        played = [error]
    return played, tries, cancelled


def test_a_box_that_breaks_once_is_no_news_about_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    played, tries, _ = collect(monkeypatch, {"t2": 1})
    assert [task.task_id for task, _ in played] == ["t0", "t1", "t2", "t3"]
    assert tries == {"t0": 1, "t1": 1, "t2": 2, "t3": 1}


def test_one_that_breaks_twice_stops_the_phase_with_its_reason_and_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    played, tries, cancelled = collect(monkeypatch, {"t2": 2})
    assert str(played[0]) == "the box of t2 broke"
    assert tries["t2"] == 2
    assert sorted(cancelled) == ["t0", "t1", "t3"]
