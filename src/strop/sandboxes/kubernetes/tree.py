"""Workspaces as archives: what is sent to a pod, and what a pod's tree differs in from the base.

An archive from a pod is hostile. It is read in memory, never unpacked: names are checked, links are only ever texts.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable

from strop.core.errors import SandboxError
from strop.sandboxes.absorb import MAX_DEPTH, MAX_ENTRIES, MAX_PATH_BYTES
from strop.sandboxes.layer import DIRECTORY, FILE, LINK, OTHER, BaseTree, Layer
from strop.sandboxes.safepath import clean, read_regular

_MAX_FILE_BYTES = 1 << 30
_END = bytes(1024)


def archive_of(tree: BaseTree, layer: Layer | None = None) -> bytes:
    """A tar archive of a base as a layer over it changes it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        names = set(tree.entries) | set(layer.index if layer is not None else ())
        for path in sorted(names):
            entry = layer.lookup(path) if layer is not None else tree.entries[path]
            if entry is None:
                continue
            is_own = layer is not None and path in layer.index
            info = tarfile.TarInfo(path)
            info.mode, info.mtime = entry.mode, entry.mtime_s
            if entry.kind == FILE:
                content = layer.read(path) if layer is not None and is_own else read_regular(tree.fd, path, _MAX_FILE_BYTES)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            if entry.kind == DIRECTORY:
                info.type, info.mode = tarfile.DIRTYPE, layer.mode_of(path) if layer is not None and is_own else entry.mode | 0o700
            elif entry.kind == LINK:
                info.type = tarfile.SYMTYPE
                info.linkname = layer.link_target(path) if layer is not None and is_own else os.readlink(path, dir_fd=tree.fd)
            elif entry.kind == OTHER and is_own:
                info.type, info.mode = tarfile.FIFOTYPE, layer.mode_of(path) if layer is not None else 0o600
            else:
                continue
            tar.addfile(info)
    return data.getvalue()


def archive_of_file(path: str, content: bytes, mode: int, parents: Iterable[str]) -> bytes:
    """A tar archive of one file and the directories above it that are new."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in parents:
            above = tarfile.TarInfo(parent)
            above.type, above.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(above)
        info = tarfile.TarInfo(path)
        info.size, info.mode = len(content), mode
        tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def differences(layer: Layer, archive: bytes) -> int:
    """Make an empty layer hold what a pod's archive differs in from the layer's base.

    Args:
        layer: An empty layer over the base that the pod started with.
        archive: Output of ``tar -cf - -C /workspace .`` in the pod.

    Returns:
        Number of entries left out, as ``absorb``.

    Raises:
        SandboxError: The archive can't be read.
    """
    if len(archive) < len(_END) or not archive.endswith(_END):
        what = f"it has {len(archive)} bytes and no end"  # a part would look like deletions
        raise SandboxError(f"the archive of a pod's workspace can't be read: {what}", retryable=True)
    found: dict[str, tarfile.TarInfo] = {}
    dropped = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for info in tar:
                try:
                    path = clean(info.name)
                    is_wanted = len(path.encode()) <= MAX_PATH_BYTES and path.count("/") <= MAX_DEPTH and len(found) < MAX_ENTRIES
                except (OSError, UnicodeEncodeError):
                    is_wanted = info.name in (".", "./")
                    dropped += not is_wanted
                    continue
                if not is_wanted or not (info.isreg() or info.isdir() or info.issym() or info.isfifo() or info.islnk()):
                    dropped += 1
                    continue
                found[path] = info
            for path in sorted(found):
                if all(above in found and found[above].isdir() for above in _above(path)):
                    dropped += _put(layer, path, found[path], tar)
                else:
                    dropped += 1
                    found.pop(path)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise SandboxError(f"the archive of a pod's workspace can't be read: {error}", retryable=True) from error
    for path in sorted(layer.base.entries):
        if path not in found and all(above in found and found[above].isdir() for above in _above(path)):
            if "/" in path:
                layer.put_directory(path.rpartition("/")[0], fresh=False)
            layer.put_whiteout(path)
    return dropped


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _put(layer: Layer, path: str, info: tarfile.TarInfo, tar: tarfile.TarFile) -> int:
    """Place one entry unless it is the base's own; return how many were left out."""
    original = layer.base.entries.get(path)
    if info.isdir():
        if original is None or original.kind != DIRECTORY:
            _make_above(layer, path)
            layer.put_directory(path, fresh=True, mode=info.mode)
        return 0
    if info.isreg() or info.islnk():
        try:
            file = tar.extractfile(info)
        except KeyError:  # a hard link to what isn't in the archive
            return 1
        if file is None or layer.used_bytes + info.size > layer.limit_bytes + _base_size(layer, path, info):
            return 1
        content = file.read()
        if _is_the_bases(layer, path, content, info.mode):
            return 0
        if layer.used_bytes + len(content) > layer.limit_bytes:
            return 1
        _make_above(layer, path)
        layer.put_file(path, content, info.mode, info.mtime)
    elif info.issym():
        if original is not None and original.kind == LINK and os.readlink(path, dir_fd=layer.base.fd) == info.linkname:
            return 0
        _make_above(layer, path)
        layer.put_link(path, info.linkname)
    else:
        _make_above(layer, path)
        layer.put_pipe(path, info.mode)
    return 0


def _is_the_bases(layer: Layer, path: str, content: bytes, mode: int) -> bool:
    original = layer.base.entries.get(path)
    if original is None or original.kind != FILE or original.size != len(content) or (original.mode ^ mode) & 0o777:
        return False
    return read_regular(layer.base.fd, path, _MAX_FILE_BYTES) == content


def _base_size(layer: Layer, path: str, info: tarfile.TarInfo) -> int:
    """Room for a file that may turn out to be the base's own."""
    original = layer.base.entries.get(path)
    return original.size if original is not None and original.size == info.size else 0


def _make_above(layer: Layer, path: str) -> None:
    for above in _above(path):
        if above not in layer.index:
            layer.put_directory(above, fresh=False)
