"""One episode from task to verdict, with the episode edge: whatever breaks becomes a ``Failed`` episode, counted and kept."""

from __future__ import annotations

import asyncio
import time
import traceback
from dataclasses import dataclass, field, replace

from strop.agent.episode import MACHINERY_DEADLINE_S, run_episode
from strop.agent.workspace import TreeCache
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import StropError
from strop.core.outcome import Failed
from strop.core.task import Task
from strop.ports import Engine, Grader, Renderer, SandboxProvider, TaskPool


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Everything an episode needs beside its task."""

    pool: TaskPool
    engine: Engine
    sandbox_provider: SandboxProvider
    grader: Grader
    renderer: Renderer
    cache: TreeCache = field(default_factory=TreeCache)


async def play(world: World, task: Task, key: EpisodeKey, *, temperature: float, system_prompt: bool) -> Episode:
    """Run and grade one episode. Raises for nothing that concerns this episode alone.

    Args:
        world: The machinery.
        task: What to do.
        key: Names the episode.
        temperature: Sampling temperature.
        system_prompt: Whether the stream begins with the system turn.

    Returns:
        The episode with an outcome; ``Failed`` and without tokens if the machinery broke or the deadline passed.
    """
    deadline_s = task.limits.wall_s + MACHINERY_DEADLINE_S
    try:
        async with asyncio.timeout(deadline_s):
            episode = await run_episode(
                task,
                key,
                engine=world.engine,
                sandbox_provider=world.sandbox_provider,
                pool=world.pool,
                renderer=world.renderer,
                temperature=temperature,
                system_prompt=system_prompt,
                cache=world.cache,
            )
            began = time.perf_counter()
            outcome = await world.grader.grade(task, episode)
    except Exception as error:  # the episode edge: one of the three broad ones
        return _failed(key, error, deadline_s)
    costs = {**episode.costs, "cost/grading_s": time.perf_counter() - began}
    return replace(episode, outcome=outcome, costs=costs, stats={**episode.stats, "system_prompt": float(system_prompt)})


def _failed(key: EpisodeKey, error: Exception, deadline_s: float) -> Episode:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError):
        text = f"TimeoutError: the episode did not end within {deadline_s:g} s"
    elif not isinstance(error, StropError):  # nobody raised it on purpose, so where it came from is worth more than its text
        text += "\n" + "".join(traceback.format_exception(error)[-3:])
    return Episode(key=key, traces=(), turns=(), stop_reason="failed", outcome=Failed(error=text))
