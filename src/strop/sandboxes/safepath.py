"""Opening files of trees that hold hostile content: never through a link, never outside, never blocking on a pipe or device."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct

_OPENAT2 = 437
_RESOLVE = 0x02 | 0x04 | 0x08  # no magic links, no symbolic links, beneath the directory
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_has_openat2 = platform.machine() in ("x86_64", "aarch64")


def clean(path: str) -> str:
    """Check a workspace-relative path and return its one spelling (``a//./b`` becomes ``a/b``).

    Raises:
        PermissionError: Absolute path, ``..``, a NUL, or text that isn't UTF-8.
        FileNotFoundError: Empty path.
    """
    if path.startswith("/") or "\0" in path or len(path) > 4096:
        raise PermissionError(errno.EACCES, "path must be relative to the workspace", path[:200])
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise PermissionError(errno.EACCES, "path must be valid Unicode", repr(path[:200])) from None
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PermissionError(errno.EACCES, "path must stay in the workspace", path)
    if not parts:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    return "/".join(parts)


def open_beneath(directory: int, path: str, flags: int, mode: int = 0) -> int:
    """Open ``path`` below the directory descriptor, following no link in any component.

    Raises:
        OSError: As open(2); ``ELOOP`` if a component is a link, ``EXDEV`` if the path leaves the directory.
    """
    global _has_openat2
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if _has_openat2:
        how = struct.pack("=QQQ", flags, mode, _RESOLVE)
        fd = _syscall(_OPENAT2, directory, os.fsencode(path), how, ctypes.c_size_t(len(how)))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise OSError(number, os.strerror(number), path)
        _has_openat2 = False
    return _open_by_steps(directory, path, flags, mode)


def _open_by_steps(directory: int, path: str, flags: int, mode: int) -> int:
    *parents, name = path.split("/")
    if ".." in parents or name == "..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    current = os.dup(directory)
    try:
        for parent in parents:
            step = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = step
        return os.open(name, flags, mode, dir_fd=current)
    finally:
        os.close(current)


def read_regular(directory: int, path: str, limit_bytes: int) -> bytes:
    """Content of a regular file below the directory.

    Raises:
        FileNotFoundError: Missing, or not a regular file.
        OSError: ``EFBIG`` if it is larger than ``limit_bytes``.
    """
    try:
        fd = open_beneath(directory, path, os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if info.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"file has {info.st_size} bytes, the limit is {limit_bytes}", path)
        data = os.read(fd, info.st_size + 1)
        while len(data) < info.st_size and (more := os.read(fd, info.st_size - len(data) + 1)):
            data += more
        return data
    finally:
        os.close(fd)
