"""What the grading benchmarks share: the path to the attack suite of ``tests/grading``, boxes and episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "grading"))

from attacks_and_controls import ATTACKS, CONTROLS

from strop.core.config import SandboxConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Outcome, Scored
from strop.core.task import Task
from strop.grading.admission import changed_sources
from strop.grading.rules import TextChange
from strop.sandboxes import BubblewrapProvider

__all__ = ["ATTACKS", "CONTROLS", "in_parallel", "is_flagged", "provider", "repair_episode", "sources"]

T = TypeVar("T")
R = TypeVar("R")


def provider(workers: int = 2, memory_mb: int = 256) -> BubblewrapProvider:
    """Return a provider with the limits of the attack suite."""
    return BubblewrapProvider(SandboxConfig(workers=workers, memory_mb=memory_mb, processes=24, disk_mb=16))


async def in_parallel(items: Sequence[T], work: Callable[[T], Awaitable[R]], workers: int = 2) -> list[R]:
    """Return the results of ``work`` in the order of ``items``, ``workers`` at a time."""
    slots = asyncio.Semaphore(workers)

    async def one(item: T) -> R:
        async with slots:
            return await work(item)

    return list(await asyncio.gather(*map(one, items)))


def is_flagged(outcome: Outcome) -> bool:
    """Whether a flag above ``"info"`` is on an outcome."""
    return isinstance(outcome, Scored) and any(flag.severity != "info" for flag in outcome.flags)


def repair_episode(task: Task, changes: dict[str, bytes | None], sample: int = 0) -> Episode:
    """Return a submitted episode that made ``changes``."""
    key = EpisodeKey(phase="bench", step=0, task_id=task.task_id, sample=sample)
    return Episode(key=key, traces=(), turns=(), stop_reason="submitted", changes=changes)


def sources(pool: Any, episode: Episode, tasks: dict[str, Task]) -> list[TextChange]:
    """Changed source files of an episode."""
    return changed_sources(pool.base_dir(tasks[episode.key.task_id]), episode.changes)
