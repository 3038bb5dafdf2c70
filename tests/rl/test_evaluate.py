"""Evaluation: figures by hand, retries, and failures that are never zeros."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rl_toys import ToyGrader, ToyPool, ToyWorld, make_episode, toy_config

from strop.core.errors import GradingError, StropError
from strop.core.outcome import Failed, Scored
from strop.core.task import Task
from strop.rl.evaluate import EvalResult, evaluate, summarise


def tasks(count: int) -> list[Task]:
    return list(ToyPool(Path("."), count).tasks("heldout"))


def test_figures_by_hand() -> None:
    pool = tasks(2)
    rewards = {"toy/0000": [1.0, 0.0], "toy/0001": [0.0, 0.0]}
    episodes = [make_episode(t, i, Scored(reward=r)) for t, values in rewards.items() for i, r in enumerate(values)]
    result = summarise("x", pool, episodes)
    assert result.success == {"toy/0000": (1.0, 0.0), "toy/0001": (0.0, 0.0)}
    assert result.mean.mean == 0.25
    assert result.best_of == {1: 0.25, 2: 0.5}
    assert result.mean.low <= 0.25 <= result.mean.high


def test_lost_samples_are_counted_and_in_no_figure() -> None:
    episodes = [make_episode("toy/0000", i, Scored(reward=1.0)) for i in range(3)] + [make_episode("toy/0000", 3, Failed(error="x: y"))]
    result = summarise("x", tasks(1), episodes)
    assert (result.mean.mean, result.failed, result.success["toy/0000"]) == (1.0, 1, (1.0, 1.0, 1.0))
    with pytest.raises(StropError, match=r"no verdict for task toy/0001: no episode"):
        summarise("x", tasks(2), episodes)


class FlakyGrader(ToyGrader):
    """Breaks on the first try of every sample 1, or always."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always, self.tried = always, set()

    async def grade(self, task: Task, episode: Any) -> Any:
        if self.always or (episode.key.sample == 1 and episode.key not in self.tried):
            self.tried.add(episode.key)
            raise GradingError("planted")
        return await super().grade(task, episode)


class Sink:
    def __init__(self) -> None:
        self.episodes: list[Any] = []

    def put_episode(self, episode: Any) -> None:
        self.episodes.append(episode)


def run(grader: ToyGrader, tmp_path: Path, *, sessions: int = 16) -> tuple[EvalResult, Sink]:
    world = ToyWorld(toy_config(), tmp_path)
    ports = world.ports()
    ports.pop("trainer")
    ports["grader"] = grader
    sink = Sink()
    return asyncio.run(evaluate("toy", tasks(6), 4, **ports, store=sink, max_sessions=sessions)), sink


def test_one_retry_gives_the_same_episode(tmp_path: Path) -> None:
    clean, kept = run(ToyGrader(), tmp_path)
    grader = FlakyGrader()
    flaky, kept_too = run(grader, tmp_path, sessions=3)
    assert len(grader.tried) == 6
    assert flaky.failed == 0
    assert flaky.success == clean.success
    assert len(kept.episodes) == len(kept_too.episodes) == 24
    assert {e.key.phase for e in kept.episodes} == {"eval.toy"}
    assert clean.metrics()["eval/samples"] == 4


def test_machinery_that_stays_broken_stops_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(StropError, match=r"lost 8 episodes in a row.*planted"):
        run(FlakyGrader(always=True), tmp_path)
