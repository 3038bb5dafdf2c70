"""Who owns a run's files and control groups, and how what a killed process left behind is found and removed.

Everything on disk and every control group carries the owner's identity ``strop-<pid>-<start time>-<pid namespace>`` in its name.
An owner with
that process id, start time and namespace that no longer exists is dead, and what carries its name is removed by the next start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from strop.core.errors import SandboxError

_NAME = re.compile(r"strop-(\d+)-(\d+)-(\d+)")


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, or ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def identity() -> str:
    """Name of this process that no other process of this machine will ever have again."""
    return f"strop-{os.getpid()}-{_start_time(os.getpid())}-{_pid_namespace()}"


def is_dead(name: str) -> bool:
    """Whether ``name`` is an identity whose owner surely is gone; names of other process namespaces are left alone."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[3]) != _pid_namespace():
        return False
    return _start_time(int(match[1])) != int(match[2])


def remove_tree(path: Path) -> None:
    """Delete a directory tree whatever modes its directories have; links are removed, never followed. Missing is fine."""

    def unlock(function: object, name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            if not os.path.islink(name) and os.path.isdir(name):
                os.chmod(name, 0o700)
                remove_tree(Path(name))
            else:
                os.unlink(name)

    shutil.rmtree(path, onerror=unlock)


def create_root(parent: str | None = None) -> Path:
    """Create this provider's own directory (mode 0700) and remove those of dead owners.

    Args:
        parent: Where to create it; by default a directory of this user in the system's temporary directory.

    Raises:
        SandboxError: If the parent belongs to somebody else, is a link, or can't be written.
    """
    home = Path(parent) if parent else Path(tempfile.gettempdir()) / f"strop-sandboxes-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = home.lstat()
    except OSError as error:
        raise SandboxError(f"sandbox directory {str(home)!r} can't be created: {error}; set TMPDIR to a writable directory") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise SandboxError(f"sandbox directory {str(home)!r} must be a directory that user {os.getuid()} owns; remove it or set TMPDIR")
    remove_stale(home.iterdir())
    try:
        root = Path(tempfile.mkdtemp(prefix="p", dir=_owned(home)))
    except OSError as error:
        raise SandboxError(f"sandbox directory {str(home)!r} can't be written: {error}; set TMPDIR to a writable directory") from error
    return root


def _owned(home: Path) -> Path:
    own = home / identity()
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def release_root(root: Path) -> None:
    """Remove a directory made by ``create_root``; idempotent."""
    remove_tree(root)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def remove_stale(entries: Iterable[Path]) -> None:
    """Remove the directories of dead owners among ``entries``."""
    for entry in entries:
        if is_dead(entry.name):
            remove_tree(entry)
