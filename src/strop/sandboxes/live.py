"""The host's view of a workspace that is mounted: a box whose overlay stays up between commands.

Reading goes through a copy: the overlay's upper directory is merged into a layer of the host's own when something has changed, so
that every answer comes from the same index as in a box at rest. Writing goes to that copy first, which checks it, and then through the
mounted workspace, since nobody may change an upper directory under a mounted overlay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from strop.sandboxes.absorb import USER_OPAQUE, absorb
from strop.sandboxes.layer import Layer
from strop.sandboxes.safepath import clean, open_beneath


class LiveView:
    """Files of a mounted workspace.

    Args:
        start: Makes the layer that the overlay was mounted over, anew and empty of later changes, in a given empty directory.
        directory: Place for copies; owned by this object.
        upper: Descriptor of the overlay's upper directory; closed by ``close``.
        merged: Descriptor of the mounted workspace; closed by ``close``.
        owner: User and group of files that are written, ``None`` for this process's own.
        opaque: As for ``absorb``.
    """

    def __init__(
        self,
        start: Callable[[Path], Layer],
        directory: Path,
        upper: int,
        merged: int,
        owner: tuple[int, int] | None = None,
        opaque: str = USER_OPAQUE,
    ) -> None:
        self._start = start
        self._directory = directory
        self._upper, self._merged = upper, merged
        self._owner, self._opaque = owner, opaque
        self._copy: Layer | None = None
        self._number = 0
        self.entries_dropped = 0
        """Directory entries that the last copy left out (see ``absorb``)."""

    def changed(self) -> None:
        """Something ran in the box: what was copied is no longer the truth."""
        if self._copy is not None:
            self._copy.close()
            shutil.rmtree(self._copy.directory, ignore_errors=True)
            self._copy = None

    def layer(self) -> Layer:
        """The workspace's changes now.

        Raises:
            OSError: Processes of the box are changing the tree in this moment; the same call may succeed again.
        """
        if self._copy is None:
            self._number += 1
            place = self._directory / str(self._number)
            place.mkdir(mode=0o700, parents=True)
            copy = self._start(place)
            try:
                self.entries_dropped = absorb(copy, self._upper, may_change_modes=False, opaque=self._opaque)
            except BaseException:
                copy.close()
                shutil.rmtree(place, ignore_errors=True)
                raise
            self._copy = copy
        return self._copy

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or (``None``) delete a file in the mounted workspace; errors as ``Layer.write`` and ``Layer.delete``."""
        path = clean(path)
        layer = self.layer()
        if content is None:
            layer.delete(path)
            self._unlink(path)
            return
        layer.write(path, content)
        mode = layer.index[path].mode
        self._make_parents(path)
        self._unlink(path)
        fd = open_beneath(self._merged, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if self._owner is not None:
                os.fchown(fd, *self._owner)
            os.fchmod(fd, mode & 0o777 | 0o600)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            mtime_s = layer.index[path].mtime_s
            os.utime(fd, (mtime_s, mtime_s))
        finally:
            os.close(fd)

    def _unlink(self, path: str) -> None:
        parent, name = self._parent(path)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
        finally:
            os.close(parent)

    def _parent(self, path: str) -> tuple[int, str]:
        above, _, name = path.rpartition("/")
        return (open_beneath(self._merged, above, os.O_RDONLY | os.O_DIRECTORY) if above else os.dup(self._merged)), name

    def _make_parents(self, path: str) -> None:
        end = path.find("/")
        while end > 0:
            parent, name = self._parent(path[:end])
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=parent)
                    if self._owner is not None:
                        os.chown(name, *self._owner, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "is not a directory", path[:end])
            finally:
                os.close(parent)
            end = path.find("/", end + 1)

    def close(self) -> None:
        """Give descriptors and copies back."""
        self.changed()
        for fd in (self._upper, self._merged):
            if fd >= 0:
                os.close(fd)
        self._upper = self._merged = -1
