"""A box's own layer over its base tree: what the agent changed, on the host's side.

Only the trusted host process writes a layer directory; the box sees it read only, under a fresh layer per run whose changes
``absorb`` moves over when every process of the run is dead. So nothing here races with the agent, and an index in memory is the
truth about what the layer holds. The directory itself is a plain overlayfs lower layer: files, directories, links, pipes, and
whiteouts (character device 0/0) for what is deleted.

Invariant: an index entry that isn't a directory has no entries below it, and hides whatever the base has at and below its path.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from strop.sandboxes.ownership import remove_tree
from strop.sandboxes.safepath import clean, open_beneath, read_regular

FILE, DIRECTORY, LINK, OTHER, WHITEOUT = "file", "directory", "link", "other", "whiteout"
MAX_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a tree: its kind and, for a file, its size in bytes, modification time in whole seconds, and permission bits."""

    kind: str
    size: int = 0
    mtime_s: int = 0
    mode: int = 0o644


@dataclass(slots=True)
class BaseTree:
    """A read-only base directory and its listing, shared by all boxes over it. It must not change while it is used."""

    path: str
    fd: int
    entries: dict[str, Entry] = field(default_factory=dict)
    children: dict[str, list[str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    @classmethod
    def scan(cls, path: str) -> BaseTree:
        """List a directory, following no link.

        Raises:
            OSError: If it isn't a readable directory.
        """
        tree = cls(path=path, fd=os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        pending = [""]
        while pending:
            parent = pending.pop()
            names = []
            with os.scandir(os.path.join(path, parent)) as scan:
                for item in scan:
                    relative = f"{parent}/{item.name}" if parent else item.name
                    info = item.stat(follow_symlinks=False)
                    kind = kind_of(info)
                    tree.entries[relative] = Entry(kind, info.st_size, int(info.st_mtime), info.st_mode & 0o777)
                    names.append(item.name)
                    if kind == DIRECTORY:
                        pending.append(relative)
            tree.children[parent] = names
        tree.files = sorted(name for name, entry in tree.entries.items() if entry.kind == FILE)
        return tree


def kind_of(info: os.stat_result) -> str:
    """Kind of a directory entry from its lstat result."""
    mode = info.st_mode
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISDIR(mode):
        return DIRECTORY
    if stat.S_ISLNK(mode):
        return LINK
    return WHITEOUT if stat.S_ISCHR(mode) and info.st_rdev == 0 else OTHER


class Layer:
    """The changes of one box.

    Args:
        base: The tree below.
        directory: Empty directory of this layer, owned by this process.
        limit_bytes: Largest sum of file sizes.
        owner: User and group that the entries get; this process's own when ``None``.
    """

    def __init__(self, base: BaseTree, directory: Path, limit_bytes: int, owner: tuple[int, int] | None = None) -> None:
        self.base = base
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._owner = owner
        self.used_bytes = 0
        self.index: dict[str, Entry] = {}
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listing: list[str] | None = None

    def close(self) -> None:
        """Release the descriptor; the directory stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ------------------------------------------------------------------------------------------------ looking

    def lookup(self, path: str) -> Entry | None:
        """What the agent sees at a clean path, or ``None``."""
        entry = self.index.get(path)
        if entry is not None:
            return None if entry.kind == WHITEOUT else entry
        return self.base.entries.get(path) if self._base_visible(path) else None

    def _base_visible(self, path: str) -> bool:
        """Whether no ancestor in the layer hides the base at ``path``."""
        if not self.index:
            return True
        end = path.rfind("/")
        while end > 0:
            above = self.index.get(path[:end])
            if above is not None and above.kind != DIRECTORY:
                return False
            end = path.rfind("/", 0, end)
        return True

    def read(self, path: str) -> bytes:
        """Content of a regular file.

        Raises:
            FileNotFoundError: Nothing there, or not a regular file.
            PermissionError: The path leaves the workspace.
        """
        path = clean(path)
        entry = self.lookup(path)
        if entry is None or entry.kind != FILE:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return read_regular(self._fd if path in self.index else self.base.fd, path, MAX_READ_BYTES)

    def mode_of(self, path: str) -> int:
        """Permission bits of what the layer holds at a clean path."""
        return stat.S_IMODE(os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_mode) & 0o777

    def link_target(self, path: str) -> str:
        """Where a link that the layer holds at a clean path points to; nothing on the host ever goes there."""
        return os.readlink(path, dir_fd=self._fd)

    def list_files(self) -> list[str]:
        """Sorted paths of the regular files that the agent sees."""
        if self._listing is None:
            index = self.index
            if not index:
                self._listing = self.base.files
            else:
                below = [path for path in self.base.files if path not in index and self._base_visible(path)]
                self._listing = sorted(below + [path for path, entry in index.items() if entry.kind == FILE])
        return list(self._listing)

    def changes(self) -> dict[str, bytes | None]:
        """Files that differ from the base: new content, or ``None`` where the base's file is no longer there."""
        found: dict[str, bytes | None] = {}
        for path, entry in self.index.items():
            original = self.base.entries.get(path)
            if entry.kind == FILE:
                content = read_regular(self._fd, path, MAX_READ_BYTES)
                same = original is not None and original.kind == FILE and original.size == len(content)
                if not same or read_regular(self.base.fd, path, MAX_READ_BYTES) != content:
                    found[path] = content
            if original is not None and original.kind != entry.kind:
                found.update((gone, None) for gone in self._base_files_at(path) if not self._is_file(gone))
        return dict(sorted(found.items()))

    def _is_file(self, path: str) -> bool:
        entry = self.lookup(path)
        return entry is not None and entry.kind == FILE

    def _base_files_at(self, path: str) -> list[str]:
        original = self.base.entries.get(path)
        if original is None:
            return []
        if original.kind == FILE:
            return [path]
        return [name for name in self.base.files if name.startswith(f"{path}/")] if original.kind == DIRECTORY else []

    # ------------------------------------------------------------------------------------------------ changing

    def write(self, path: str, content: bytes) -> None:
        """Create or replace a file; a link at its place is replaced, not followed.

        Raises:
            IsADirectoryError, NotADirectoryError: A directory is in the way, or something else where a directory is needed.
            OSError: ``ENOSPC`` if the layer would grow over its limit.
            PermissionError: The path leaves the workspace.
        """
        path = clean(path)
        entry = self.lookup(path)
        if entry is not None and entry.kind == DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        held = self.index.get(path)
        grown = self.used_bytes + len(content) - (held.size if held else 0)
        if grown > self.limit_bytes:
            raise OSError(errno.ENOSPC, f"the box's layer would hold {grown} bytes, the limit is {self.limit_bytes}", path)
        self._make_parents(path)
        self.put_file(path, content, entry.mode if entry is not None and entry.kind == FILE else 0o644)

    def delete(self, path: str) -> None:
        """Delete a file or link.

        Raises:
            FileNotFoundError: Nothing there.
            IsADirectoryError: It is a directory.
            PermissionError: The path leaves the workspace.
        """
        path = clean(path)
        entry = self.lookup(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if entry.kind == DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        self._make_parents(path)
        self.put_whiteout(path)

    def _make_parents(self, path: str) -> None:
        end = path.find("/")
        while end > 0:
            parent = path[:end]
            entry = self.lookup(parent)
            if entry is not None and entry.kind != DIRECTORY:
                raise NotADirectoryError(errno.ENOTDIR, "is not a directory", parent)
            if parent not in self.index or entry is None:
                self.put_directory(parent, fresh=entry is None)
            end = path.find("/", end + 1)

    # The ``put`` methods take clean paths whose parent directory is in the layer already.

    def put_file(self, path: str, content: bytes, mode: int, mtime_s: float | None = None) -> None:
        """Place a file, whatever was there."""
        self._clear(path)
        fd = open_beneath(self._fd, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchmod(fd, mode & 0o777 | 0o600)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            if mtime_s is not None:
                os.utime(fd, (mtime_s, mtime_s))
            if self._owner is not None:
                os.fchown(fd, *self._owner)
            seconds = int(os.fstat(fd).st_mtime)
            original = self.base.entries.get(path)
            if original is not None and original.mtime_s == seconds and original.size == len(content):
                # Interpreters take compiled code for current when size and whole-second time agree; a changed file must never look
                # unchanged.
                seconds += 1
                os.utime(fd, (seconds, seconds))
        finally:
            os.close(fd)
        self._set(path, Entry(FILE, len(content), seconds, mode & 0o777))

    def put_directory(self, path: str, *, fresh: bool, mode: int = 0o755) -> None:
        """Place a directory; a ``fresh`` one shows nothing of what the base has below it."""
        held = self.index.get(path)
        if held is None or held.kind != DIRECTORY:
            self._clear(path)
            os.mkdir(path, 0o700, dir_fd=self._fd)
            self._own(path)
            self._set(path, Entry(DIRECTORY))
        os.chmod(path, mode & 0o777 | 0o700, dir_fd=self._fd)
        if fresh:
            for name in self.base.children.get(path, []):
                child = f"{path}/{name}"
                if child not in self.index:
                    self.put_whiteout(child)

    def put_link(self, path: str, target: str) -> None:
        """Place a symbolic link; nothing on the host ever follows it."""
        self._clear(path)
        os.symlink(target, path, dir_fd=self._fd)
        self._own(path)
        self._set(path, Entry(LINK))

    def put_pipe(self, path: str, mode: int = 0o600) -> None:
        """Place a named pipe."""
        self._clear(path)
        os.mkfifo(path, 0o600, dir_fd=self._fd)
        os.chmod(path, mode & 0o777 | 0o600, dir_fd=self._fd)
        self._own(path)
        self._set(path, Entry(OTHER))

    def put_whiteout(self, path: str) -> None:
        """Make ``path`` disappear: nothing stays in the layer, and the base's entry, if it shows, is hidden."""
        self._clear(path)
        if path in self.base.entries and self._base_visible(path):
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=self._fd)
            self._set(path, Entry(WHITEOUT))

    def _own(self, path: str) -> None:
        if self._owner is not None:
            os.chown(path, *self._owner, dir_fd=self._fd, follow_symlinks=False)

    def _set(self, path: str, entry: Entry) -> None:
        self.index[path] = entry
        self.used_bytes += entry.size
        self._listing = None

    def _clear(self, path: str) -> None:
        """Remove what the layer holds at ``path``, with everything below."""
        held = self.index.get(path)
        if held is None:
            return
        if held.kind == DIRECTORY:
            remove_tree(self.directory / path)
            for name in [name for name in self.index if name.startswith(f"{path}/")]:
                self.used_bytes -= self.index.pop(name).size
        else:
            os.unlink(path, dir_fd=self._fd)
        self.used_bytes -= self.index.pop(path).size
        self._listing = None
