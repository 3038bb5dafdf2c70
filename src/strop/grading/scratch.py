"""A private directory for the layers of running verdicts, gone with its process even after kill -9.

The owner holds a lock on its directory as long as it lives; whoever makes a new one removes those of the same user that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "strop-grading-"
_GRACE_S = 60.0  # between making a directory and locking it


class Scratch:
    """A directory of this process, mode 0700.

    Args:
        parent: Where it is made; by default in memory where the system has a place for that, otherwise with other temporary files.

    Raises:
        OSError: It can't be made.
    """

    def __init__(self, parent: str | None = None) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
        place = Path(parent or in_memory)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._finalizer = weakref.finalize(self, _release, self.path, descriptor)
        remove_stale(place)

    def close(self) -> None:
        """Remove it. Idempotent; also done when the object or the process ends."""
        self._finalizer()


def remove_stale(place: Path) -> None:
    """Remove the directories in ``place`` that a dead process of this user left."""
    for found in place.glob(f"{PREFIX}*"):
        try:
            info = found.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or time.time() - info.st_mtime < _GRACE_S:
                continue
            descriptor = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # somebody else removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _release(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
