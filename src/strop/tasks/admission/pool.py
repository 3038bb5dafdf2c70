"""A pool of repository tasks on disk; implements ``strop.ports.TaskPool``.

POOL/
  pool.json                format, sources with their digests, counts
  trees/ID.tar.zst         a source's files
  environments/ID/         installed requirements, shared by trees
  tasks/NAME.json.zst      one admitted task each (``SuiteTask``)
  refused.jsonl            one refused draft a line: id, kind, reason
  quarantine.jsonl         flaky tasks with the evidence
  leaks/NAME.json          what the leak scan of a task looked at and found

The environments are part of the pool because a registry may change; a pool without them can't be played.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

import zstandard

from strop.core.errors import TaskError
from strop.core.task import Limits, Task
from strop.ports import PoolCapabilities
from strop.tasks.admission.record import SuiteTask, SuiteVerifier, delta_to_json, resolve
from strop.tasks.index import IndexedPool
from strop.tasks.poolfile import read_meta, read_tree_archive
from strop.tasks.repository.environment import Environment
from strop.tasks.repository.metadata import Metadata
from strop.tasks.repository.probe import lay_tree
from strop.tasks.trees import link_tree, make_once

FORMAT = "strop-suite-1"
KINDS = ("mutation", "combined", "deletion", "history")
BOX_MEMORY_MB = 1024
"""Memory of the boxes that tasks pass the gate in: enough for a repository's suite."""
TOOLS = ("list", "search", "read", "edit", "test", "undo", "submit")
LIMITS = Limits(max_turns=64, max_tokens=65_536, max_new_tokens=8_192, wall_s=1_800.0, exec_s=60.0)


def is_suite_pool(path: str | Path) -> bool:
    """Whether a folder is a pool of repository tasks."""
    return (Path(path) / "pool.json").is_file()


class SuitePool(IndexedPool[SuiteTask]):
    """Tasks of a pool directory; workspaces are made when they are asked for.

    Args:
        path: The pool directory.
        cache_dir: Where trees and workspaces are laid.
        exclude_kinds: Kinds of task that are left out.
        limits: Fields of ``Limits`` that are set on every task.

    Raises:
        TaskError: The directory is no such pool, or it is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        cache_dir: str | Path,
        *,
        exclude_kinds: Collection[str] = (),
        limits: Mapping[str, float] | None = None,
    ) -> None:
        folder = Path(path).absolute()
        self.meta, _ = read_meta(folder / "pool.json", FORMAT, hint="; make one with `strop env build SOURCE --out DIR`")
        self._cache = Path(cache_dir).absolute() / f"suite-{hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()}"
        records = map(read_task, sorted((folder / "tasks").glob("*.json.zst")))
        tasks = ((_task(record), record) for record in records)
        super().__init__(folder, tasks, kinds=KINDS, exclude_kinds=exclude_kinds, limits=limits)

    @property
    def capabilities(self) -> PoolCapabilities:
        """Tests of the repository decide, in boxes like those of the gate."""
        return PoolCapabilities(grader="suite", box_memory_mb=BOX_MEMORY_MB)

    def suite(self, task: Task) -> SuiteVerifier:
        """What decides. Never shown to an agent."""
        return self.record(task).verifier

    def hidden_files(self, task: Task) -> dict[str, bytes | None]:
        """Test files of the grading box, over the workspace."""
        record = self.record(task)
        return resolve(record.tests, self.tree_files(record.tree))

    def gold_files(self, task: Task) -> dict[str, bytes | None]:
        """Files of the solution, over the workspace."""
        record = self.record(task)
        return resolve(record.gold, self.tree_files(record.tree))

    def base_files(self, task: Task) -> dict[str, bytes | None]:
        """Files that the workspace has otherwise than its source's tree."""
        record = self.record(task)
        return resolve(record.base, self.tree_files(record.tree))

    def tree_files(self, tree: str) -> Mapping[str, bytes]:
        """Files of a source's tree.

        Raises:
            TaskError: The pool is damaged.
        """
        return _tree_files(self.path / "trees" / f"{tree}.tar.zst")

    def tree_dir(self, tree: str) -> str:
        """Directory with a source's tree and its requirements, made on first use.

        Raises:
            TaskError: It can't be written, or the pool is damaged.
        """
        row = self.meta["trees"].get(tree)
        if row is None:
            raise TaskError(f"task pool {str(self.path)!r} has no tree {tree!r}")
        metadata = Metadata(row["name"], row["version"], (), (), row["entry_points"])
        environment = Environment(self.path / "environments" / row["environment"], (), ())
        if not environment.folder.is_dir():
            raise TaskError(f"task pool {str(self.path)!r} lacks the environment {row['environment']!r}")
        return str(lay_tree(self.tree_files(tree), metadata, environment, self._cache / "trees" / f"{tree}-{row['environment']}"))

    def base_dir(self, task: Task) -> str:
        """Directory with the task's starting workspace, made on first use.

        Raises:
            TaskError: It can't be written, or the pool is damaged.
        """
        record = self.record(task)
        # The same bug can stay in the pool with other tests hidden.
        content = hashlib.blake2b(json.dumps([record.tree, delta_to_json(record.base)]).encode(), digest_size=6).hexdigest()
        target = self._cache / "work" / f"{file_name(task.task_id)}-{content}"
        if target.is_dir():
            return str(target)
        tree = Path(self.tree_dir(record.tree))
        changed = self.base_files(task)
        return str(make_once(target, lambda folder: link_tree(tree, folder, changed)))


@lru_cache(maxsize=64)
def _tree_files(path: Path) -> Mapping[str, bytes]:
    return read_tree_archive(path)


def _task(record: SuiteTask) -> Task:
    return Task(
        task_id=record.task_id,
        instruction=record.instruction,
        workspace=record.task_id,
        tools=TOOLS,
        limits=LIMITS,
        verifier=record.task_id,
        split=record.split,
        provenance={
            "source": record.source,
            "licence": record.licence,
            "kind": record.kind,
            "cluster": record.cluster,
            "test_argv": json.dumps(list(record.visible)),
        },
    )


def file_name(task_id: str) -> str:
    """Return a file name for a task id."""
    clean = "".join(character if character.isalnum() or character in "-._" else "_" for character in task_id)
    return f"{clean[:120]}-{hashlib.blake2b(task_id.encode(), digest_size=4).hexdigest()}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        TaskError: The disk is full, or the folder can't be written.
    """
    part = path.with_name(f".{path.name[:100]}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TaskError(f"{str(path)!r} can't be written: {error.strerror or error}") from None


def write_task(folder: Path, record: SuiteTask) -> Path:
    """Write one task into a pool's folder of tasks.

    Raises:
        TaskError: It can't be written.
    """
    path = folder / f"{file_name(record.task_id)}.json.zst"
    write_atomic(path, zstandard.ZstdCompressor(level=10).compress(json.dumps(record.to_json()).encode()))
    return path


def read_task(path: Path) -> SuiteTask:
    """Read one task.

    Raises:
        TaskError: It is damaged.
    """
    try:
        return SuiteTask.from_json(json.loads(zstandard.ZstdDecompressor().decompress(path.read_bytes())))
    except (OSError, zstandard.ZstdError, ValueError) as error:
        raise TaskError(f"task file {str(path)!r} can't be read: {error}") from None
