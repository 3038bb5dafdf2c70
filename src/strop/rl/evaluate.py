"""Held-out evaluation: every task several times, intervals clustered by what the tasks come from, all episodes kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import StropError, first_known
from strop.core.outcome import Failed, Scored
from strop.core.task import Task
from strop.numerics.stats import Interval, best_of_k, mean_interval
from strop.ports import Engine, Grader, Renderer, SandboxProvider, TaskPool
from strop.rl.advantage import sort_key
from strop.rl.play import World, play
from strop.rl.rollout_stats import first_edit_right


class EpisodeSink(Protocol):
    """Keeps episodes; ``strop.store.Store`` does."""

    def put_episode(self, episode: Episode) -> None:
        """Keep a finished episode."""
        ...


class ProgressView(Protocol):
    """Shows progress; ``strop.ui.view.View`` does."""

    def progress(self, done: int, **figures: float | str) -> None:
        """``done`` episodes are finished."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What an evaluation found.

    Example: 2 tasks with 2 samples each, rewards ``[1, 0]`` and ``[0, 0]``: ``success == {"a": (1.0, 0.0), "b": (0.0, 0.0)}``,
    ``mean.mean == 0.25``, ``best_of == {1: .25, 2: .5}``.

    Attributes:
        name: As in the phase ``eval.<name>``.
        success: Task id to the reward of each sample, in the order of samples; failed samples are left out.
        clusters: Task id to its cluster.
        mean: Mean over tasks of the mean over samples, with its interval.
        best_of: Expected best of k samples, for powers of two up to the number of samples.
        first_edit_right: Share of episodes.
        failed: Episodes lost to machinery after a second try; in no figure.
        seconds: Wall seconds.
    """

    name: str
    success: Mapping[str, tuple[float, ...]]
    clusters: Mapping[str, str]
    mean: Interval
    best_of: Mapping[int, float]
    first_edit_right: float
    failed: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Return the ``eval/*`` metrics."""
        return {
            "eval/success_frac": self.mean.mean,
            "eval/success_low_frac": self.mean.low,
            "eval/success_high_frac": self.mean.high,
            "eval/first_edit_right_frac": self.first_edit_right,
            "eval/tasks": float(len(self.success)),
            "eval/samples": float(max(map(len, self.success.values()))),
            "eval/failed": float(self.failed),
            "eval/s": self.seconds,
        } | {f"eval/best_of_{k}_frac": value for k, value in self.best_of.items()}


async def evaluate(
    name: str,
    tasks: Sequence[Task],
    samples: int,
    *,
    pool: TaskPool,
    engine: Engine,
    sandbox_provider: SandboxProvider,
    grader: Grader,
    renderer: Renderer,
    store: EpisodeSink | None = None,
    view: ProgressView | None = None,
    temperature: float = 1.0,
    system_prompt: bool = True,
    max_sessions: int = 128,
    step: int = 0,
    max_infra_failures: int = 8,
) -> EvalResult:
    """Roll out ``samples`` episodes of every task with the engine's current weights and grade them.

    An episode that the machinery lost is tried once more under the same key; lost twice, it is counted in ``failed`` and in no figure.
    Routes are never replayed here.

    Args:
        name: Names the phase ``eval.<name>``; the sampling is keyed by it.
        tasks: At least one, each once.
        samples: Episodes of each task, at least 1.
        pool: Knows the tasks' workspaces.
        engine: Generates.
        sandbox_provider: Boxes.
        grader: Verdicts.
        renderer: The chat format.
        store: Keeps the episodes.
        view: Shows progress.
        temperature: 0 is greedy.
        system_prompt: Whether streams begin with the system turn.
        max_sessions: Episodes at the same time.
        step: Step in the episodes' keys.
        max_infra_failures: Episodes lost in a row (after their second try) that stop the evaluation.

    Raises:
        StropError: The machinery failed too often, or lost every sample of a task; the message has the reason.
    """
    if not tasks or samples < 1:
        raise ValueError(f"evaluate needs tasks and samples, got {len(tasks)} tasks and {samples} samples")
    began = time.perf_counter()
    world = World(pool=pool, engine=engine, sandbox_provider=sandbox_provider, grader=grader, renderer=renderer)
    desk = _Desk(name, world, temperature, system_prompt, step, asyncio.Semaphore(max_sessions), max_infra_failures, store, view)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(desk.one(task, sample)) for task in tasks for sample in range(samples)]
    except ExceptionGroup as errors:
        raise first_known(errors) from None
    episodes = sorted((task.result() for task in running), key=lambda episode: sort_key(episode.key))
    return summarise(name, tasks, episodes, seconds=time.perf_counter() - began)


@dataclass(slots=True)
class _Desk:
    """Plays the episodes of one evaluation and keeps count."""

    name: str
    world: World
    temperature: float
    system_prompt: bool
    step: int
    slots: asyncio.Semaphore
    max_infra_failures: int
    store: EpisodeSink | None
    view: ProgressView | None
    done: int = 0
    lost_in_a_row: int = 0
    reward: float = 0.0

    async def one(self, task: Task, sample: int) -> Episode:
        """Play one episode, once more if the machinery lost it."""
        key = EpisodeKey(phase=f"eval.{self.name}", step=self.step, task_id=task.task_id, sample=sample)
        async with self.slots:
            episode = await play(self.world, task, key, temperature=self.temperature, system_prompt=self.system_prompt)
            if isinstance(episode.outcome, Failed):
                episode = await play(self.world, task, key, temperature=self.temperature, system_prompt=self.system_prompt)
        if self.store is not None:
            self.store.put_episode(episode)
        self.lost_in_a_row = self.lost_in_a_row + 1 if isinstance(episode.outcome, Failed) else 0
        if isinstance(episode.outcome, Failed) and self.lost_in_a_row >= self.max_infra_failures:
            reason = f"the last one {key}: {episode.outcome.error}"
            raise StropError(f"evaluation {self.name!r} lost {self.lost_in_a_row} episodes in a row, {reason}")
        self.done += 1
        self.reward += episode.outcome.reward if isinstance(episode.outcome, Scored) else 0.0
        if self.view is not None:
            self.view.progress(self.done, reward=self.reward / self.done)
        return episode


def summarise(name: str, tasks: Sequence[Task], episodes: Sequence[Episode], *, seconds: float = 0.0) -> EvalResult:
    """Turn graded episodes into an ``EvalResult``; also for episodes read back from a store, and for scripted baselines.

    Raises:
        StropError: A task has no scored episode; names it with the last error.
    """
    rewards: dict[str, list[float]] = {task.task_id: [] for task in tasks}
    lost: list[Episode] = []
    for episode in episodes:
        if isinstance(episode.outcome, Scored):
            rewards[episode.key.task_id].append(episode.outcome.reward)
        else:
            lost.append(episode)
    for task_id, values in rewards.items():
        if not values:
            reasons = [str(episode.outcome) for episode in lost if episode.key.task_id == task_id]
            raise StropError(f"evaluation {name!r} has no verdict for task {task_id}: {reasons[-1] if reasons else 'no episode'}")
    scored = [episode for episode in episodes if isinstance(episode.outcome, Scored)]
    clusters = {task.task_id: task.provenance.get("cluster", task.task_id) for task in tasks}
    means = [float(np.mean(rewards[task.task_id])) for task in tasks]
    fewest = min(map(len, rewards.values()))
    return EvalResult(
        name=name,
        success={task_id: tuple(values) for task_id, values in rewards.items()},
        clusters=clusters,
        mean=mean_interval(means, [clusters[task.task_id] for task in tasks]),
        best_of={k: float(np.mean([best_of_k(values, k) for values in rewards.values()])) for k in _powers_of_two(fewest)},
        first_edit_right=float(np.mean([first_edit_right(episode) for episode in scored])),
        failed=len(lost),
        seconds=seconds,
    )


def _powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length())]
