"""The tasks of a run: the pool that its recipe names, opened as what it says it is, and held against the rest of the recipe. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strop.cli.registry import POOLS
from strop.core.config import RunConfig
from strop.core.errors import ConfigError
from strop.core.task import Task
from strop.grading.probes import SEPARATOR, ProbePool, probe_kind
from strop.midtrain.phase import RepairTasks
from strop.ports import TaskPool
from strop.tasks.index import SPLITS, GradedPool
from strop.tasks.poolfile import pool_format

LIMIT_KEYS = ("max_turns", "max_tokens", "max_new_tokens", "wall_s", "exec_s")
"""Keys of ``[tasks]`` that stand for fields of ``Limits``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTasks:
    """A pool, and what a run can do with its tasks.

    Attributes:
        pool: The tasks.
        probes: The same tasks, and probes made of them; ``None`` if tasks of this pool can't become probes.
        by_id: The pool's tasks of all splits.
    """

    pool: TaskPool
    probes: ProbePool | None
    by_id: Mapping[str, Task]

    @property
    def repairs(self) -> RepairTasks | None:
        """The pool as one whose repairs are single edits that are known; ``None`` if it isn't."""
        return self.pool if isinstance(self.pool, RepairTasks) else None

    @property
    def played(self) -> TaskPool:
        """Where every task that an episode of the run can have is found: ordinary ones, and probes where there are some."""
        return self.probes if self.probes is not None else self.pool

    def find(self, task_id: str) -> Task | None:
        """Return the task of an episode; that of a probe is made again. ``None`` if the pool has no such task (any more)."""
        kind = probe_kind(task_id)
        if not kind or self.probes is None:
            return self.by_id.get(task_id)
        original = self.by_id.get(task_id.removesuffix(f"{SEPARATOR}{kind}"))
        return self.probes.probe(original, kind) if original is not None else None


def open_tasks(config: RunConfig, pool_dir: Path) -> RunTasks:
    """Open the pool of a recipe. What kind it is stands in its own description.

    Args:
        config: The recipe.
        pool_dir: The directory that ``tasks.pool`` stands for.

    Raises:
        ConfigError: A pool of a kind that isn't known.
        TaskError: There is no pool, it is damaged, or a kind of ``tasks.exclude_kinds`` doesn't exist in it.
    """
    limits = {key: value for key in LIMIT_KEYS if (value := getattr(config.tasks, key))}
    pool: TaskPool = POOLS.load(pool_format(pool_dir))(
        pool_dir, cache_root() / "pools", exclude_kinds=config.tasks.exclude_kinds, limits=limits
    )
    probes = ProbePool(pool, cache_root() / "probes") if isinstance(pool, GradedPool) else None
    return RunTasks(pool=pool, probes=probes, by_id={task.task_id: task for split in SPLITS for task in pool.tasks(split)})


def check_tasks(config: RunConfig, tasks: RunTasks) -> None:
    """Refuse a recipe that asks for more than its pool's tasks offer, or gives them less than they need.

    Raises:
        ConfigError: Names the key, its value, and a value that works.
        TaskError: Nothing here can decide the pool's tasks.
    """
    needs = tasks.pool.capabilities
    pool = f"tasks.pool = {config.tasks.pool!r}"
    if config.midtrain.enabled and tasks.repairs is None:
        raise ConfigError(
            f"midtrain.enabled = true, but the solutions of {pool} (kind {needs.grader!r}) aren't single edits, which is what the scripted "
            "expert shows; set midtrain.enabled = false"
        )
    if config.grading.probe_frac and tasks.probes is None:
        raise ConfigError(
            f"grading.probe_frac = {config.grading.probe_frac:g}, but probes can't be made of the tasks of {pool} (kind {needs.grader!r}); "
            "set grading.probe_frac = 0"
        )
    if config.sandbox.memory_mb < needs.box_memory_mb:
        raise ConfigError(
            f"sandbox.memory_mb = {config.sandbox.memory_mb}, but the tasks of {pool} were admitted in boxes of {needs.box_memory_mb} MiB; "
            f"set sandbox.memory_mb = {needs.box_memory_mb} or more"
        )
    longest, room = max((task.limits.max_tokens for task in tasks.by_id.values()), default=0), config.engine.max_tokens
    if longest > room:
        raise ConfigError(
            f"engine.max_tokens = {room}, but tasks of {config.tasks.pool} allow episodes of {longest} tokens; "
            f"raise it, or set tasks.max_tokens = {room}"
        )
    if not tasks.pool.tasks("heldout"):
        raise ConfigError(
            f"{pool} has no held-out tasks ({len(tasks.by_id)} in all), and every stage is measured on some. `strop env build` holds out "
            "the tasks of about one module in five: build from a source with more modules, or from more sources"
        )


def cache_root() -> Path:
    """Return the directory for files that can be made again (task workspaces): ``XDG_CACHE_HOME`` or ``~/.cache``, then ``strop``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop"
