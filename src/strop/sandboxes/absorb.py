"""Moving the changes of a finished run into the box's layer.

The run wrote to a fresh overlayfs upper directory that nobody else can reach any more: every process of the run is dead. Its
content is hostile data all the same. The walk follows no link, opens only regular files, and bounds depth and number of entries.
"""

from __future__ import annotations

import errno
import os
import stat

from strop.sandboxes.layer import DIRECTORY, FILE, LINK, WHITEOUT, Layer, kind_of

MAX_DEPTH = 64
MAX_PATH_BYTES = 2_048
MAX_ENTRIES = 20_000
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)
USER_OPAQUE, ROOT_OPAQUE = "user.overlay.opaque", "trusted.overlay.opaque"


def absorb(layer: Layer, upper: int, *, may_change_modes: bool = True, opaque: str = USER_OPAQUE) -> int:
    """Merge an overlay upper directory into the layer.

    Args:
        layer: The box's layer; its entries change.
        upper: Descriptor of the upper directory.
        may_change_modes: Whether entries without permission bits may get them; not while the overlay is mounted. What can't be read then
            is left out, unless this process may read everything.
        opaque: Attribute that marks a directory which hides the one below: of an overlay that an ordinary user mounted, or root. The
            other one is the agent's to set, and means nothing.

    Returns:
        Number of entries left out: sockets, device nodes, names that aren't UTF-8, what is over ``MAX_DEPTH``, ``MAX_PATH_BYTES`` or
        ``MAX_ENTRIES``, and files that no longer fit the layer's size limit.
    """
    return _Walk(layer, may_change_modes, opaque).directory(upper, "", 0)


class _Walk:
    def __init__(self, layer: Layer, may_change_modes: bool, opaque: str) -> None:
        self._layer = layer
        self._may_change_modes = may_change_modes
        self._opaque = opaque
        self._left = MAX_ENTRIES

    def directory(self, fd: int, prefix: str, depth: int) -> int:
        with os.scandir(fd) as scan:
            names = sorted(item.name for item in scan)
        dropped = 0
        for name in names:
            self._left -= 1
            if self._left < 0 or len(self._layer.index) > MAX_ENTRIES or depth > MAX_DEPTH or not _is_storable(prefix + name):
                dropped += 1
                continue
            try:
                dropped += self._entry(fd, name, f"{prefix}{name}", depth)
            except OSError as error:
                # In a box that is up, processes may take an entry away, or put another in its place, while it is looked at.
                if self._may_change_modes or error.errno not in _VANISHED:
                    raise
                dropped += 1
        return dropped

    def _entry(self, parent: int, name: str, path: str, depth: int) -> int:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = kind_of(info)
        if kind == WHITEOUT:
            self._layer.put_whiteout(path)
        elif kind == DIRECTORY:
            return self._subdirectory(parent, name, path, info, depth)
        elif kind == FILE:
            return self._file(parent, name, path, info)
        elif kind == LINK:
            self._layer.put_link(path, os.readlink(name, dir_fd=parent))
        elif stat.S_ISFIFO(info.st_mode):
            self._layer.put_pipe(path, info.st_mode)
        else:
            self._layer.put_whiteout(path)
            return 1
        return 0

    def _subdirectory(self, parent: int, name: str, path: str, info: os.stat_result, depth: int) -> int:
        if self._may_change_modes and info.st_mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=parent)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except PermissionError:
            return 1
        try:
            seen = self._layer.lookup(path)
            is_opaque = _is_opaque(fd, self._opaque)
            if is_opaque and path in self._layer.index:
                self._layer.put_whiteout(path)
            self._layer.put_directory(path, fresh=is_opaque or seen is None or seen.kind != DIRECTORY, mode=info.st_mode)
            return self.directory(fd, f"{path}/", depth + 1)
        finally:
            os.close(fd)

    def _file(self, parent: int, name: str, path: str, info: os.stat_result) -> int:
        held = self._layer.index.get(path)
        # A hole counts as written: the layer's limit is on what a reader would get.
        if self._layer.used_bytes - (held.size if held else 0) + info.st_size > self._layer.limit_bytes:
            return 1
        if self._may_change_modes and info.st_mode & 0o400 == 0:
            os.chmod(name, 0o600, dir_fd=parent)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except PermissionError:
            return 1
        try:
            content = b""
            # No more than it had: a process that still runs could make it grow for ever.
            while len(content) < info.st_size and (chunk := os.read(fd, min(1 << 20, info.st_size - len(content)))):
                content += chunk
        finally:
            os.close(fd)
        self._layer.put_file(path, content, info.st_mode, info.st_mtime)
        return 0


def _is_storable(path: str) -> bool:
    try:
        return len(path.encode("utf-8")) <= MAX_PATH_BYTES
    except UnicodeEncodeError:
        return False


def _is_opaque(fd: int, attribute: str) -> bool:
    try:
        return os.getxattr(fd, attribute) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
