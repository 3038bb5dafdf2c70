"""What every pool on disk answers alike: tasks by split, by id, and what stands behind one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

from strop.core.errors import TaskError, nearest
from strop.core.task import Task
from strop.ports import TaskPool
from strop.tasks.verifier import Verifier

SPLITS = ("train", "heldout", "hard")
"""Splits that every pool has, maybe without a task."""
KEEPS_ALL_KINDS = "hard"
"""The split that kinds which a recipe leaves out stay in."""

Record = TypeVar("Record")


@runtime_checkable
class GradedPool(TaskPool, Protocol):
    """A pool whose tasks are decided by calls of one function: verifiers can be resolved, and probes made of the tasks."""

    def verifier(self, task: Task) -> Verifier:
        """Visible and hidden cases of a task."""
        ...


class IndexedPool(Generic[Record]):
    """Base of the pools on disk. Half of ``strop.ports.TaskPool``: where a workspace lies is for each pool to know.

    A task that is left out of its split can still be looked up, so that a run's episodes can be read with another recipe.

    Args:
        path: The pool directory, for messages.
        tasks: Each task with what is behind it, in their fixed order.
        kinds: Values of ``provenance["kind"]`` that can be left out.
        exclude_kinds: Kinds that the splits but ``"hard"`` leave out.
        limits: Fields of ``Limits`` that are set on every task, instead of the pool's own values.

    Raises:
        TaskError: A kind doesn't exist.
    """

    def __init__(
        self,
        path: Path,
        tasks: Iterable[tuple[Task, Record]],
        *,
        kinds: Collection[str] = (),
        exclude_kinds: Collection[str] = (),
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.path = path
        for kind in exclude_kinds:
            if kind not in kinds:
                known = f" Known: {', '.join(sorted(kinds))}." if kinds else ""
                raise TaskError(f"kind {kind!r} doesn't exist in the pool {str(path)!r}.{nearest(kind, kinds)}{known}")
        self._records: dict[str, Record] = {}
        self._by_id: dict[str, Task] = {}
        self._splits: dict[str, list[Task]] = {split: [] for split in SPLITS}
        for task, record in tasks:
            task = replace(task, limits=replace(task.limits, **(limits or {})))
            self._records[task.task_id] = record
            self._by_id[task.task_id] = task
            if task.split == KEEPS_ALL_KINDS or task.provenance.get("kind") not in exclude_kinds:
                self._splits[task.split].append(task)

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of ``"train"``, ``"heldout"`` or ``"hard"`` in a fixed order.

        Raises:
            TaskError: There is no such split.
        """
        if split not in self._splits:
            raise TaskError(f"split {split!r} doesn't exist.{nearest(split, SPLITS)}")
        return tuple(self._splits[split])

    def all_tasks(self) -> list[Task]:
        """Tasks of every split."""
        return [task for split in SPLITS for task in self._splits[split]]

    def record(self, task: Task) -> Record:
        """What is behind a task. Never shown to an agent.

        Raises:
            TaskError: The task isn't from this pool.
        """
        record = self._records.get(task.task_id)
        if record is None:
            raise TaskError(
                f"task {task.task_id!r} isn't in the pool {str(self.path)!r}.{nearest(task.task_id, self._records)}",
                ids={"task": task.task_id},
            )
        return record

    def find(self, name: str) -> Task:
        """Return the task of an id, or of a part of one that only one task has.

        Raises:
            TaskError: There is none, or several.
        """
        if name in self._by_id:
            return self._by_id[name]
        found = [task_id for task_id in self._by_id if name in task_id]
        if len(found) > 1:
            raise TaskError(f"task {name!r} could be {len(found)} tasks, for example {found[0]!r} and {found[1]!r}")
        if not found:
            raise TaskError(f"task {name!r} isn't in the pool {str(self.path)!r}.{nearest(name, self._by_id)}")
        return self._by_id[found[0]]
