"""Workspaces on this host: an overlay over the base and the box's layer, its changes in a size-limited memory file system."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import SandboxError
from strop.sandboxes.ownership import is_dead

_NOSUID, _NODEV = 2, 4
_DETACH = 2
_INODES = 16_384
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def _mount(kind: str, target: Path, options: str) -> None:
    if _libc.mount(kind.encode(), os.fsencode(target), kind.encode(), _NOSUID | _NODEV, options.encode()) < 0:
        number = ctypes.get_errno()
        raise SandboxError(f"a workspace can't be mounted: {kind} at {target}: {os.strerror(number)}")


def _unmount(target: Path) -> None:
    _libc.umount2(os.fsencode(target), _DETACH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """A mounted workspace: ``place`` is the directory that a container binds, ``upper`` that of the changes."""

    root: Path
    place: Path
    upper: Path

    @classmethod
    def mount(cls, root: Path, layers: list[Path], *, disk_bytes: int, below: int, owner: int) -> Workspace:
        """Mount one.

        Args:
            root: An empty directory of its own.
            layers: Lower directories, topmost first.
            disk_bytes: Limit of the changes.
            below: Number of entries of the layers, which a box must be able to delete.
            owner: User and group of the workspace directory.

        Raises:
            SandboxError: The kernel refused.
        """
        made = cls(root=root, place=root / "workspace", upper=root / "changes/upper")
        made.place.mkdir()
        (root / "changes").mkdir()
        _mount("tmpfs", root / "changes", f"size={disk_bytes},nr_inodes={_INODES + below},mode=0755")
        opened: list[int] = []
        try:
            for path in (made.upper, root / "changes/work"):
                path.mkdir()
                os.chown(path, owner, owner)
            # By descriptor, so that the mount table inside the box names no path of this host.
            for path in (*layers, made.upper, root / "changes/work"):
                opened.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            *lower, upper, work = (f"/proc/self/fd/{fd}" for fd in opened)
            plain = "redirect_dir=off,metacopy=off,index=off,xino=off"
            _mount("overlay", made.place, f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},{plain}")
        except BaseException:
            _unmount(root / "changes")
            raise
        finally:
            for fd in opened:
                os.close(fd)
        return made

    def unmount(self) -> None:
        """Take both mounts away; what still uses them keeps them until it ends. Idempotent."""
        _unmount(self.place)
        _unmount(self.root / "changes")


def unmount_stale(home: Path) -> None:
    """Take away the mounts below directories of dead owners, so that they can be removed."""
    with contextlib.suppress(OSError):
        found = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for target in reversed(found):
            path = Path(target)
            if home in path.parents and is_dead(path.relative_to(home).parts[0]):
                _unmount(path)
