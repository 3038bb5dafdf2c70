"""Imported tasks on disk; implements ``strop.ports.TaskPool``.

POOL/
  pool.json               format, what was imported, counts, refusals
  tasks.jsonl.zst         one task a line: format, name, fields, split, paths of its files
  files/NAME.tar.zst      the files of a task that has some

A workspace can be laid here only for a task that brings its files along (``environment/workspace`` of a Harbor task that strop exported);
the others live in container images, and asking for their workspace says so.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import os
import tarfile
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from strop.core.errors import TaskError
from strop.core.task import Task
from strop.ports import PoolCapabilities
from strop.tasks.importers import answers
from strop.tasks.importers.formats import FORMATS, blueprint
from strop.tasks.importers.harbor import import_task
from strop.tasks.importers.hostile import LIMITS, File, ReadLimits, check_path, read_archive, read_rows
from strop.tasks.importers.record import Blueprint, ImportedTask
from strop.tasks.importers.rows import import_row
from strop.tasks.importers.toml_text import dump_toml
from strop.tasks.index import SPLITS, IndexedPool
from strop.tasks.poolfile import read_meta
from strop.tasks.trees import make_once

FORMAT = "strop-import-1"
WORKSPACE = "environment/workspace/"
_ROWS = ReadLimits(total_bytes=8 << 30)
_TAG = "$toml"
_LEVEL = 10


def is_import_pool(path: str | Path) -> bool:
    """Whether a folder is a pool of imported tasks."""
    try:
        return json.loads((Path(path) / "pool.json").read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def write_pool(path: str | Path, tasks: Iterable[ImportedTask], *, source: str, refused: Sequence[tuple[str, str]] = ()) -> Path:
    """Write a pool; the folder must not exist, and is there whole or not at all.

    Args:
        path: The folder.
        tasks: Its tasks.
        source: What they were read from, for ``pool.json``.
        refused: Where a task stood, and why it was refused.

    Raises:
        TaskError: It exists, two tasks have one id, or it can't be written.
    """
    target = Path(path)
    if target.exists():
        raise TaskError(f"{str(target)!r} exists; a pool is never overwritten, choose another folder")

    def fill(folder: Path) -> None:
        lines: list[str] = []
        counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
        seen: set[str] = set()
        for task in tasks:
            if task.task.task_id in seen:
                raise TaskError(f"task {task.task.task_id!r} comes twice")
            seen.add(task.task.task_id)
            counts[task.task.split] += 1
            lines.append(json.dumps(_to_json(task), ensure_ascii=False) + "\n")
            if _keeps_files(task):
                _write_archive(folder / "files" / file_name(task.task.task_id), task.files)
        (folder / "tasks.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress("".join(lines).encode()))
        meta = {"format": FORMAT, "source": source, "counts": counts, "refused": [list(row) for row in refused]}
        (folder / "pool.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    return make_once(target, fill)


class ImportPool(IndexedPool[ImportedTask]):
    """Tasks of a pool directory.

    Args:
        path: The pool directory.
        cache_dir: Where workspaces are laid.
        exclude_kinds: None can be left out: imported tasks have no kinds.
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
        self.meta, _ = read_meta(folder / "pool.json", FORMAT, hint="; make one with `strop env import SOURCE --out DIR`")
        self._cache = Path(cache_dir).absolute() / f"import-{hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()}"
        records = (_from_json(row, folder / "files") for row in read_rows(folder / "tasks.jsonl.zst", _ROWS))
        super().__init__(folder, ((record.task, record) for record in records), exclude_kinds=exclude_kinds, limits=limits)

    @property
    def capabilities(self) -> PoolCapabilities:
        """Not known to any grader here.

        Raises:
            TaskError: Always.
        """
        raise TaskError(
            f"tasks of {str(self.path)!r} were imported: their verifiers run in images of their own, which no grader here starts. "
            "Choose a pool that `strop env build` made; `strop env export` writes these for Harbor"
        )

    def blueprint(self, task: Task) -> Blueprint:
        """Image, steps, verifier and gold solution of a task. Never shown to an agent."""
        return blueprint(self.record(task))

    def base_dir(self, task: Task) -> str:
        """Directory with the task's starting workspace, made on first use.

        Raises:
            TaskError: The workspace lies in a container image.
        """
        record = self.record(task)
        files = {path[len(WORKSPACE) :]: file for path, file in record.files.items() if path.startswith(WORKSPACE)}
        if not files:
            place = blueprint(record).place
            image = f"the image {place.image!r}" if place.image else f"an image that is built from {place.build or 'its install_config'}"
            raise TaskError(
                f"the workspace of task {task.task_id!r} lies in {image}; use a sandbox that starts images", ids={"task": task.task_id}
            )

        def fill(folder: Path) -> None:
            for path, file in files.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.data)
                target.chmod(0o755 if file.executable else 0o644)

        return str(make_once(self._cache / file_name(task.task_id), fill))


def file_name(task_id: str) -> str:
    """Return a file name for a task id."""
    clean = "".join(character if character.isascii() and (character.isalnum() or character in "-._") else "_" for character in task_id)
    return f"{clean[:100]}-{hashlib.blake2b(task_id.encode(), digest_size=6).hexdigest()}"


def _write_archive(path: Path, files: Mapping[str, File]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, file in sorted(files.items()):
            info = tarfile.TarInfo(check_path(name, "task"))
            info.size, info.mode = len(file.data), 0o755 if file.executable else 0o644
            archive.addfile(info, io.BytesIO(file.data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".tar.zst").write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress(buffer.getvalue()))


def _keeps_files(task: ImportedTask) -> bool:
    """Files of a task with an answer are the same for all of them."""
    return bool(task.files) and task.format not in answers.TABLES


def _to_json(task: ImportedTask) -> dict[str, Any]:
    return {
        "format": task.format,
        "name": task.name,
        "split": task.task.split,
        "fields": encode_plain(dict(task.fields)),
        "has_files": _keeps_files(task),
    }


def _from_json(row: Mapping[str, Any], folder: Path) -> ImportedTask:
    try:
        format_name, name, split, fields = row["format"], row["name"], row["split"], decode_plain(row["fields"])
        task_id = f"{format_name}:{name}"
        files = read_archive(folder / f"{file_name(task_id)}.tar.zst", LIMITS) if row["has_files"] else {}
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"task pool {str(folder.parent)!r} is damaged: a task lacks or misuses {error}") from None
    if format_name not in (*FORMATS, *answers.TABLES) or split not in SPLITS:
        raise TaskError(f"task pool {str(folder.parent)!r} is damaged: task {name!r} has format {format_name!r}, split {split!r}")
    # What a pool holds is checked like any other source: it may come from anywhere.
    if format_name == "harbor":
        return import_task({**files, "task.toml": File(dump_toml(fields).encode())}, name, split=split)
    if format_name in answers.TABLES:
        return answers.import_answer_task(fields, f"task {name!r}", format_name=format_name, split=split)
    return import_row(fields, f"task {name!r}", format_name=format_name, split=split, files=files)


def encode_plain(value: Any) -> Any:
    """Return TOML data as JSON data: a time becomes ``{"$toml": "..."}``."""
    if isinstance(value, dict):
        encoded = {key: encode_plain(item) for key, item in value.items()}
        return {_TAG: encoded} if _TAG in value else encoded
    if isinstance(value, list):
        return [encode_plain(item) for item in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return {_TAG: value.isoformat()}
    return value


def decode_plain(value: Any) -> Any:
    """Inverse of ``encode_plain``.

    Raises:
        ValueError: A time that isn't one.
    """
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TAG}:
        inner = value[_TAG]
        if isinstance(inner, str):
            return tomllib.loads(f"x = {inner}")["x"]
        return {key: decode_plain(item) for key, item in inner.items()}
    return {key: decode_plain(item) for key, item in value.items()}


def write_files(folder: Path, files: Mapping[str, File]) -> None:
    """Write files below a new folder; what is there already is an error.

    Raises:
        TaskError: It exists, or can't be written.
    """
    if folder.exists():
        raise TaskError(f"{str(folder)!r} exists; nothing is overwritten, choose another folder")

    def fill(inner: Path) -> None:
        for path, file in files.items():
            target = inner / check_path(path, str(folder))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
            os.chmod(target, 0o755 if file.executable else 0o644)

    make_once(folder, fill)
