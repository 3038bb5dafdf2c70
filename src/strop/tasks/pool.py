"""The repair pool: tasks whose workspace is a real source tree with one mutated function."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path

from strop.core.errors import TaskError, nearest
from strop.core.task import Limits, Task
from strop.ports import PoolCapabilities
from strop.tasks.index import IndexedPool
from strop.tasks.mutation import DEFAULT_KINDS, Edit, FunctionSpan, apply_edit, candidate_edits, inverse
from strop.tasks.poolfile import FORMAT, FunctionRecord, TaskRecord, read_lines, read_meta, read_tree_archive
from strop.tasks.trees import has_files, link_tree, make_once, write_tree
from strop.tasks.verifier import Verifier

TOOLS = ("list", "search", "read", "edit", "test", "undo", "submit")
LIMITS = Limits(max_turns=9, exec_s=1.0)
"""Three tries of ``edit``, ``test``, ``undo`` for random edits, which know the file; two and a last edit for who searches and reads first.
Tests of one function take milliseconds; what runs longer than a second is an edit that made a loop endless."""
INSTRUCTION = "The tests fail. Find the bug and repair it.\n\n"
BUILTIN = "builtin:repair"


def open_pool(locator: str, cache_dir: str | Path, *, exclude_kinds: Collection[str] = ()) -> RepairPool:
    """Open a pool directory, or the pool that ships with strop for ``"builtin:repair"``.

    Raises:
        TaskError: There is no pool, it is damaged, or a kind doesn't exist.
    """
    if locator == BUILTIN:
        locator = str(resources.files("strop").joinpath("assets", "pools", "repair"))
    if locator.startswith("builtin:"):
        raise TaskError(f"task pool {locator!r} doesn't ship with strop.{nearest(locator, [BUILTIN])}")
    return RepairPool(Path(locator), cache_dir, exclude_kinds=exclude_kinds)


class RepairPool(IndexedPool[TaskRecord]):
    """Tasks of a pool directory; implements ``strop.ports.TaskPool``. Any prefix of a split is spread over functions and kinds.

    Workspaces are made when they are asked for, once, and may be made by many processes at the same time.

    Args:
        path: The pool directory.
        cache_dir: Where trees and workspaces are laid; two pools may share it.
        exclude_kinds: Kinds of bug that the splits ``"train"`` and ``"heldout"`` leave out; ``"hard"`` keeps them.
        limits: Fields of ``Limits`` that are set on every task.

    Raises:
        TaskError: The directory is no pool of this format, it is damaged, or a kind doesn't exist.
    """

    def __init__(
        self,
        path: str | Path,
        cache_dir: str | Path,
        *,
        exclude_kinds: Collection[str] = (),
        limits: Mapping[str, float] | None = None,
    ) -> None:
        folder = Path(path)
        self.meta, text = read_meta(folder / "meta.json", FORMAT)
        self._cache = Path(cache_dir).absolute() / f"repair-{hashlib.blake2b(text, digest_size=6).hexdigest()}"
        self._intact: set[str] = set()
        self._functions = [FunctionRecord.from_json(row) for row in read_lines(folder / "functions.jsonl.zst")]
        super().__init__(folder, self._read(), kinds=DEFAULT_KINDS, exclude_kinds=exclude_kinds, limits=limits)

    @property
    def capabilities(self) -> PoolCapabilities:
        """Functions are called, in boxes of any size."""
        return PoolCapabilities(grader="repair", box_memory_mb=0)

    def _read(self) -> Iterator[tuple[Task, TaskRecord]]:
        for row in read_lines(self.path / "tasks.jsonl.zst"):
            record = TaskRecord.from_json(row)
            yield self._task(record), record

    def _task(self, record: TaskRecord) -> Task:
        function = self._functions[record.function]
        return Task(
            task_id=record.task_id,
            instruction=INSTRUCTION + record.output,
            workspace=record.task_id,
            tools=TOOLS,
            verifier=record.task_id,
            split=record.split,
            limits=LIMITS,
            provenance={
                "source": function.source,
                "licence": function.licence,
                "kind": record.edit.kind,
                "cluster": function.cluster,
                "gold_sha256": self._gold_digest(function.tree_id, function.verifier.path),
            },
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - as long-lived as the pool
    def _gold_digest(self, tree_id: str, path: str) -> str:
        return hashlib.sha256(self._tree_files(tree_id)[path]).hexdigest()

    def function_record(self, task: Task) -> FunctionRecord:
        """The function behind a task, with its tests."""
        return self._functions[self.record(task).function]

    def verifier(self, task: Task) -> Verifier:
        """Visible and hidden cases. Never shown to an agent."""
        return self.function_record(task).verifier

    def function(self, task: Task) -> tuple[str, FunctionSpan]:
        """Workspace-relative file and lines of the mutated function (the same lines before and after the mutation)."""
        record = self.function_record(task)
        return record.verifier.path, record.span

    def gold_source(self, task: Task) -> str:
        """Text of the file without the bug."""
        record = self.function_record(task)
        return self._tree_files(record.tree_id)[record.verifier.path].decode("utf-8")

    def mutant_source(self, task: Task) -> str:
        """Text of the file as the agent finds it."""
        return apply_edit(self.gold_source(task), self.record(task).edit)

    def gold_edit(self, task: Task) -> Edit:
        """The edit that repairs the workspace."""
        return inverse(self.gold_source(task), self.record(task).edit)

    def candidates(self, task: Task) -> list[Edit]:
        """Every edit that the catalogue offers in the mutated function; ``gold_edit`` is one of them."""
        return candidate_edits(self.mutant_source(task), self.function(task)[1])

    def base_dir(self, task: Task) -> str:
        """Directory with the task's starting workspace, made on first use.

        Raises:
            TaskError: It can't be written, or the pool is damaged.
        """
        target = self._cache / "work" / _file_name(task.task_id)
        if task.task_id in self._intact and target.is_dir():
            return str(target)
        record = self.function_record(task)
        files = self._tree_files(record.tree_id)
        tree = self._cache / "trees" / record.tree_id
        changed = {record.verifier.path: self.mutant_source(task).encode(), record.test_path: record.test_text.encode()}
        make_once(tree, lambda folder: write_tree(files, folder), is_intact=lambda folder: has_files(folder, files, {}))
        make_once(target, lambda folder: link_tree(tree, folder, changed), is_intact=lambda folder: has_files(folder, files, changed))
        self._intact.add(task.task_id)
        return str(target)

    def _tree_files(self, tree_id: str) -> dict[str, bytes]:
        return _read_tree_cached(self.path / "trees" / f"{tree_id}.tar.zst")


@functools.lru_cache(maxsize=128)
def _read_tree_cached(path: Path) -> dict[str, bytes]:
    return read_tree_archive(path)


def _file_name(task_id: str) -> str:
    return "".join(character if character.isalnum() or character in "-._" else "_" for character in task_id)
