"""Every format by name, and finding out which one a path has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.core.errors import TaskError, nearest
from strop.tasks.importers import answers, harbor, harbor_export, rows, task_repository
from strop.tasks.importers.hostile import LIMITS, File, ReadLimits, is_archive, read_archive, read_folder, read_rows
from strop.tasks.importers.record import Blueprint, ImportedTask
from strop.tasks.importers.row_tables import ROW_TABLES

FORMATS = (harbor.FORMAT, *ROW_TABLES)
"""Names of the formats that files come in."""

_MAX_DEPTH = 4
_MAX_TASKS = 200_000


@dataclass(slots=True)
class Imported:
    """What an import found.

    Attributes:
        tasks: In the order of the source.
        refused: Where a task stood, and why it was refused.
    """

    tasks: list[ImportedTask] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def import_path(path: str | Path, *, format_name: str = "", split: str = "train", limits: ReadLimits = LIMITS) -> Imported:
    """Read everything that a path holds: a Harbor task or a folder or archive of them, a SWE-bench 5 task repository, or a data file.

    A task that is wrong is refused with its reason, and the others are read; a path that holds no task is an error.

    Args:
        path: Folder or file.
        format_name: Its format; by default found from what it holds.
        split: Where the tasks go.
        limits: What one task, or one data file, may hold.

    Raises:
        TaskError: There is nothing there, or it can't be read at all.
    """
    source = Path(path)
    if format_name and format_name not in FORMATS:
        raise TaskError(f"format {format_name!r} is unknown.{nearest(format_name, FORMATS)} Known: {', '.join(FORMATS)}.")
    if not source.exists():
        raise TaskError(f"{str(source)!r} doesn't exist")
    found, names = Imported(), set[str]()
    for where, load in _sources(source, format_name, split, limits):
        try:
            task = load()
            if task.task.task_id in names:
                raise TaskError(f"task {task.name!r} comes twice")
            names.add(task.task.task_id)
            found.tasks.append(task)
        except TaskError as error:
            found.refused.append((where, str(error)))
        if len(found.tasks) > _MAX_TASKS:
            raise TaskError(f"{str(source)!r} holds more than {_MAX_TASKS} tasks")
    if not found.tasks and not found.refused:
        raise TaskError(f"{str(source)!r} holds no task: no task.toml, no sweb.yaml, and no row")
    return found


def _sources(source: Path, format_name: str, split: str, limits: ReadLimits) -> Iterator[tuple[str, Callable[[], ImportedTask]]]:
    if source.is_dir():
        if task_repository.is_task_repository(source):
            settings = task_repository.read_settings(source, limits)
            for folder in sorted(entry for entry in (source / "tasks").iterdir() if entry.is_dir() and not entry.is_symlink()):
                yield str(folder), lambda folder=folder: task_repository.import_instance(folder, settings, limits, split=split)
            return
        for folder in _task_folders(source):
            yield str(folder), lambda folder=folder: import_files(read_folder(folder, limits), folder.resolve().name, split=split)
    elif is_archive(source):
        files = read_archive(source, limits)
        for name, below in _tasks_of_archive(files, source):
            yield f"{source}:{name}", lambda name=name, below=below: import_files(below, name, split=split)
    else:
        for number, row in enumerate(read_rows(source, limits), 1):
            where = f"{source.name}, row {number}"
            yield where, lambda row=row, where=where: rows.import_row(row, where, format_name=format_name, split=split)


def _task_folders(root: Path) -> list[Path]:
    """Folders with a ``task.toml``, at most four deep, through no link."""
    found: list[Path] = []
    level = [root]
    for _ in range(_MAX_DEPTH):
        below: list[Path] = []
        for folder in level:
            if (folder / harbor.CONFIG).is_file():
                found.append(folder)
            else:
                try:
                    below += [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
                except OSError as error:
                    raise TaskError(f"folder {str(folder)!r} can't be read: {error.strerror}") from None
        level = below
    return sorted(found)


def _tasks_of_archive(files: Mapping[str, File], source: Path) -> Iterator[tuple[str, dict[str, File]]]:
    name = source.name.split(".")[0]
    for path in sorted(files):
        folder, _, last = path.rpartition("/")
        if last == harbor.CONFIG:
            prefix = f"{folder}/" if folder else ""
            below = {inner[len(prefix) :]: file for inner, file in files.items() if inner.startswith(prefix)}
            yield (folder.rpartition("/")[2] or name), below


def import_files(files: Mapping[str, File], name: str, *, split: str = "train") -> ImportedTask:
    """Return the task of a Harbor directory; if strop exported it from a row and it is unchanged, the row's.

    Raises:
        TaskError: It is wrong.
    """
    return harbor_export.restore(files, split=split) or harbor.import_task(files, name, split=split)


def blueprint(task: ImportedTask) -> Blueprint:
    """Return what a runner needs to know about an imported task.

    Raises:
        TaskError: Its format is unknown.
    """
    if task.format == harbor.FORMAT:
        return harbor.blueprint(task)
    if task.format in ROW_TABLES:
        return rows.blueprint(task)
    if task.format in answers.TABLES:
        return answers.blueprint(task)
    raise TaskError(f"task {task.name!r} has the format {task.format!r}, which has no blueprint.{nearest(task.format, FORMATS)}")


def export_native(task: ImportedTask) -> dict[str, File] | dict[str, Any]:
    """Return a task in the format that it came in: files of a folder, or a row."""
    if task.format == harbor.FORMAT:
        return harbor.export_files(task)
    if task.files and task.format not in answers.TABLES:
        return task_repository.export_instance(task)
    return rows.export_row(task)


def row_line(task: ImportedTask) -> str:
    """Return the row of a task as a line of JSON."""
    return json.dumps(rows.export_row(task), ensure_ascii=False) + "\n"
