"""Durable writes and the one error for a full disk. Every byte of a run directory outside the database goes through here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from strop.core.errors import CheckpointError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("disk is full", "disk I/O error", "No space left", "File too large")


@contextlib.contextmanager
def full_disk_is_clear(path: Path, doing: str) -> Iterator[None]:
    """Turn every form of "disk full" into one ``CheckpointError``.

    Args:
        path: What was being written.
        doing: Phrase for the message, for example ``"writing an episode"``.

    Raises:
        CheckpointError: The disk, the quota or the file size limit is exhausted.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise CheckpointError(
            f"no space left while {doing} in {path} ({_free_mib(path)} MiB free on that disk). "
            "Everything committed so far is intact: free some space, then continue with --resume."
        ) from error


def _is_full(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if type(seen).__module__.startswith(("sqlite3", "sqlalchemy", "safetensors")) and any(text in str(seen) for text in _FULL_TEXTS):
            return True
        seen = seen.__cause__
    return False


def _free_mib(path: Path) -> int:
    for candidate in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(candidate).free >> 20
    return 0


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; a short write goes on until done or until the system says why not."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a crash leaves the old content or the new, never a part.

    Raises:
        CheckpointError: The disk is full; the old content is still there.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with full_disk_is_clear(path, f"writing {path.name}"):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make renames and new names in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make every file below ``path`` and every directory durable."""
    for parent, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(parent))
