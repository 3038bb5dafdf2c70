"""What graders that run boxes share: the edge that no error crosses, further tries, and a private directory for layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from strop.core.episode import Episode
from strop.core.errors import GradingError, SandboxError, TaskError
from strop.core.outcome import Failed, Flag, Outcome, Scored
from strop.core.task import Task
from strop.grading.admission import Admitted
from strop.grading.scratch import Scratch
from strop.tasks.layers import BoxRunner

T = TypeVar("T")


class BoxedGrader(ABC):
    """Base of the graders that find verdicts in boxes.

    Args:
        runner: Starts grading boxes; belongs to the caller.
        seed: The run's seed.
        attempts: How often a verdict is tried when the machinery fails, at least 1.
        scratch: Where layers are written, in a private directory; by default in memory where the system has a place for that.
    """

    def __init__(self, runner: BoxRunner, *, seed: int, attempts: int, scratch: str | None) -> None:
        self._runner = runner
        self._seed = seed
        self._attempts = attempts
        self._scratch = scratch
        self._layers: Scratch | None = None

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        """Return the outcome of an episode; see the class for its reasons. What the machinery lost is ``Failed``."""
        try:
            return await self._grade(task, episode)
        except (GradingError, SandboxError, TaskError, OSError) as error:
            return Failed(error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Remove the private directory. Idempotent."""
        if self._layers is not None:
            self._layers.close()
            self._layers = None

    @abstractmethod
    async def _grade(self, task: Task, episode: Episode) -> Outcome: ...

    async def _tried(self, run: Callable[[], Awaitable[T]]) -> T:
        """Await ``run()``, again if the machinery failed in a way that may pass."""
        for attempt in range(1, self._attempts + 1):
            try:
                return await run()
            except (SandboxError, GradingError) as error:
                if attempt == self._attempts or not error.retryable:
                    raise
        raise GradingError("a verdict needs at least one attempt")

    def _layer_directory(self) -> Path:
        if self._layers is None or not self._layers.path.is_dir():
            self._layers = Scratch(self._scratch)
        return self._layers.path


def verdict_at_sight(admitted: Admitted, flags: Sequence[Flag]) -> Scored | None:
    """Return the verdict on changes that nothing needs to be run for: too many, or none; else ``None``."""
    if admitted.is_oversize:
        return Scored(reward=0.0, reason="oversize", flags=unique(flags))
    if not admitted.changes:
        return Scored(reward=0.0, reason="unchanged", flags=unique(flags))
    return None


def unique(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    """Return the flags in their order, each once."""
    return tuple(dict.fromkeys(flags))
