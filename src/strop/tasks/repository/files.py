"""Files of a source as plain data, read from a folder or an archive without trusting it.

Bounds hold while reading, not after: a member's declared size is never believed, and nothing is written to disk. What isn't a regular file
with a path that any tool can write (links, devices, names that aren't UTF-8, paths that leave the tree) is left out and noted.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import zstandard

from strop.core.errors import TaskError

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 50_000
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz", ".tar.zst", ".tar", ".zip")
SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", ".tox", ".nox", ".venv", "node_modules", ".eggs"})
_SKIPPED_TOP = frozenset({"build", "dist", "venv", "env"})
SKIPPED_CACHES = frozenset({".pytest_cache", ".mypy_cache", ".ruff_cache", ".pyre", ".pytype", ".hypothesis"})
_SKIPPED_SUFFIXES = (".pyc", ".pyo", ".orig", ".rej")


@dataclass(slots=True)
class Files:
    """A source's files.

    Attributes:
        content: Path (``/`` between parts, relative, UTF-8) to bytes.
        notes: What was left out and why, by reason: number and a first example.
    """

    content: dict[str, bytes] = field(default_factory=dict)
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    total: int = 0

    def add(self, path: str, data: bytes, origin: str) -> None:
        """Take a file.

        Raises:
            TaskError: The source is over its limits.
        """
        self.total += len(data)
        if self.total > MAX_TOTAL_BYTES:
            raise TaskError(
                f"source {origin!r} holds more than {MAX_TOTAL_BYTES >> 20} MiB of files; that is more than a task's workspace may"
            )
        if len(self.content) >= MAX_FILES:
            raise TaskError(f"source {origin!r} holds more than {MAX_FILES} files; that is more than a task's workspace may")
        self.content[path] = data

    def leave_out(self, reason: str, path: object) -> None:
        """Note what wasn't taken."""
        count, first = self.notes.get(reason, (0, ascii(path)))
        self.notes[reason] = (count + 1, first)


def problem_of(path: str) -> str:
    """Return why a path can't be part of a workspace, ``""`` if it can."""
    if not path or path.startswith("/") or ".." in path.split("/"):
        return "path leaves the tree"
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return "name isn't UTF-8"
    if not path.isprintable() or "\\" in path or len(path) > 1024 or max(len(part.encode()) for part in path.split("/")) > 200:
        return "name can't be used by every tool"
    return ""


def is_skipped(path: str) -> bool:
    """Whether a path is a cache, a backup, version control or a build product: never part of a workspace."""
    parts = path.split("/")
    folders = parts[:-1]
    if folders and folders[0] in _SKIPPED_TOP:
        return True
    return any(part in SKIPPED_FOLDERS or part in SKIPPED_CACHES for part in folders) or parts[-1].endswith(_SKIPPED_SUFFIXES)


def read_folder(folder: Path) -> Files:
    """Read the files of a directory, following no link.

    Raises:
        TaskError: It can't be read, or is over the limits.
    """
    files = Files()
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(os.path.join(folder, parent)) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise TaskError(f"source {str(folder)!r} can't be read: {error.strerror}: {os.path.join(parent, '')!r}") from None
        for entry in entries:
            path = f"{parent}/{entry.name}" if parent else entry.name
            if entry.is_symlink():
                files.leave_out("link", path)
            elif entry.is_dir(follow_symlinks=False):
                if not is_skipped(f"{path}/x"):
                    pending.append(path)
            elif not entry.is_file(follow_symlinks=False):
                files.leave_out("not a regular file", path)
            elif problem := problem_of(path):
                files.leave_out(problem, path)
            elif not is_skipped(path):
                files.add(path, _read_file(folder, path), str(folder))
    return files


def _read_file(folder: Path, path: str) -> bytes:
    try:
        descriptor = os.open(os.path.join(folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise TaskError(f"source {str(folder)!r}: {path!r} changed while it was read")
            if info.st_size > MAX_FILE_BYTES:
                raise TaskError(_too_large(str(folder), path))
            return _read_bounded(file, str(folder), path)
    except OSError as error:
        raise TaskError(f"source {str(folder)!r}: {path!r} can't be read: {error.strerror}") from None


def _too_large(origin: str, path: str) -> str:
    return f"source {origin!r}: {path!r} is larger than {MAX_FILE_BYTES >> 20} MiB; remove it from the source"


def _read_bounded(file: IO[bytes], origin: str, path: str) -> bytes:
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise TaskError(_too_large(origin, path))
    return data


def is_archive(path: Path) -> bool:
    """Whether a file name is that of a source archive."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def read_archive(path: Path) -> Files:
    """Read a source archive; a single top folder is taken off.

    Raises:
        TaskError: It is truncated, damaged, empty or over the limits, or can't be read.
    """
    files = Files()
    try:
        members = _zip_members(path, files) if path.name.lower().endswith(".zip") else _tar_members(path, files)
        for name, data in members:
            files.add(name, data, path.name)
    except OSError as error:
        if error.strerror:
            raise TaskError(f"archive {path.name!r} can't be read: {error.strerror}") from None
        raise TaskError(f"archive {path.name!r} is truncated or damaged: {error or type(error).__name__}") from None
    except (
        EOFError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
        ValueError,
        RuntimeError,
    ) as error:
        raise TaskError(f"archive {path.name!r} is truncated or damaged: {error or type(error).__name__}") from None
    if not files.content:
        raise TaskError(f"archive {path.name!r} holds no files")
    return _without_top_folder(files)


def _tar_members(path: Path, files: Files) -> Iterator[tuple[str, bytes]]:
    openers = {(".gz", ".tgz"): gzip.open, (".bz2", ".tbz"): bz2.open, (".xz", ".txz"): lzma.open}
    name = path.name.lower()
    opener = next((opener for suffixes, opener in openers.items() if name.endswith(suffixes)), open)
    with opener(path, "rb") as raw:
        plain: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(raw) if name.endswith(".zst") else raw  # type: ignore[assignment]
        with tarfile.open(fileobj=plain, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for member in archive:
                member_path = member.name.removeprefix("./").rstrip("/")
                if not _is_wanted(
                    files, member_path, is_file=member.isfile(), is_folder=member.isdir(), size=member.size, origin=path.name
                ):
                    continue
                file = archive.extractfile(member)
                if file is not None:
                    data = _read_bounded(file, path.name, member_path)
                    if len(data) != member.size:
                        raise EOFError(f"{member_path!r} has {len(data)} of {member.size} bytes")
                    yield member_path, data
        while plain.read(1 << 20):  # a compressed stream proves that it is whole only at its end
            continue


def _zip_members(path: Path, files: Files) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            is_file = kind in (0, stat.S_IFREG) and not info.is_dir()
            if _is_wanted(
                files, info.filename.rstrip("/"), is_file=is_file, is_folder=info.is_dir(), size=info.file_size, origin=path.name
            ):
                with archive.open(info) as file:
                    yield info.filename, _read_bounded(file, path.name, info.filename)


def _is_wanted(files: Files, name: str, *, is_file: bool, is_folder: bool, size: int, origin: str) -> bool:
    if is_folder:
        return False
    if problem := problem_of(name):
        files.leave_out(problem, name)
        return False
    if not is_file:
        files.leave_out("link or device", name)
        return False
    if is_skipped(name.partition("/")[2] or name):
        return False
    if size > MAX_FILE_BYTES:
        raise TaskError(_too_large(origin, name))
    return True


def _without_top_folder(files: Files) -> Files:
    tops = {path.partition("/")[0] for path in files.content}
    if len(tops) == 1 and all("/" in path for path in files.content):
        files.content = {path.partition("/")[2]: data for path, data in files.content.items()}
    return files
