"""Reading what strangers made: folders, archives and data files.

No link is followed and none is kept, no path leaves its root, no pipe or device is opened, and everything has a size limit that is checked
while reading, so that neither a bomb nor a file that grows is read whole. Nothing is executed and nothing is unpickled.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import yaml
import zstandard

from strop.core.errors import TaskError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")
"""Name endings of archives."""

_CHUNK = 1 << 20
_YAML_BYTES = 1 << 16
_YAML_DEPTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLimits:
    """What one source may hold.

    Attributes:
        file_bytes: One file.
        total_bytes: All files of a folder or an archive, unpacked; also one data file.
        files: Number of files, and of archive members.
        path_bytes: One path.
        line_bytes: One line of a data file.
    """

    file_bytes: int = 64 << 20
    total_bytes: int = 512 << 20
    files: int = 20_000
    path_bytes: int = 1024
    line_bytes: int = 64 << 20


LIMITS = ReadLimits()


@dataclass(frozen=True, slots=True)
class File:
    """A regular file: its bytes, and whether it may be executed."""

    data: bytes
    executable: bool = False


def check_path(path: str, what: str, limits: ReadLimits = LIMITS) -> str:
    """Return a relative path in its one spelling (``"./a//b"`` becomes ``"a/b"``).

    Raises:
        TaskError: It is absolute, leaves the root, is too long, or has characters that no portable path has.
    """
    if path.startswith(("/", "\\")) or (len(path) > 1 and path[1] == ":" and path[0].isalpha()):
        raise TaskError(f"{what}: the path {path[:200]!r} is absolute; paths must be relative")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise TaskError(f"{what}: the path {path[:200]!r} leaves the folder")
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise TaskError(f"{what}: the path {os.fsencode(path)[:200]!r} isn't UTF-8") from None
    if size > limits.path_bytes:
        raise TaskError(f"{what}: a path has {size} bytes, the limit is {limits.path_bytes}: {path[:60]!r}...")
    if any(character < " " or character in "\\\x7f" for character in path):
        raise TaskError(f"{what}: the path {path[:200]!r} has control characters or backslashes")
    return "/".join(parts)


class _Tree:
    """Collects files under limits, and refuses a path that is both a file and a folder, or comes twice."""

    def __init__(self, what: str, limits: ReadLimits) -> None:
        self.what, self.limits = what, limits
        self.files: dict[str, File] = {}
        self._folders: set[str] = set()
        self._total = 0

    def add(self, path: str, source: IO[bytes], size: int, *, executable: bool) -> None:
        if path in self.files or path in self._folders:
            raise TaskError(f"{self.what}: the path {path!r} comes twice")
        parts = path.split("/")
        folders = {"/".join(parts[:end]) for end in range(1, len(parts))}
        if clash := next((folder for folder in folders if folder in self.files), None):
            raise TaskError(f"{self.what}: {clash!r} is a file and a folder")
        self._folders |= folders
        if len(self.files) >= self.limits.files:
            raise TaskError(f"{self.what}: more than {self.limits.files} files")
        allowed = min(self.limits.file_bytes, self.limits.total_bytes - self._total)
        if size > allowed:
            self._too_large(path, size)
        data = source.read(allowed + 1)
        if len(data) > allowed:
            self._too_large(path, len(data))
        self._total += len(data)
        self.files[path] = File(data, executable)

    def _too_large(self, path: str, size: int) -> NoReturn:
        limits = self.limits
        raise TaskError(
            f"{self.what}: {path!r} has at least {size} bytes; "
            f"the limits are {limits.file_bytes} for a file and {limits.total_bytes} for all"
        )


class _Bounded:
    """A stream that may hold so many bytes and no more."""

    def __init__(self, stream: IO[bytes], limit: int, what: str) -> None:
        self._stream, self._left, self._limit, self._what = stream, limit, limit, what

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise TaskError(f"{self._what} holds more than {self._limit} bytes when it is unpacked")
        return data


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file, following no link at its end.

    Raises:
        TaskError: It is a link or no regular file, is larger than the limit, or can't be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise TaskError(f"{str(path)!r} is not a regular file")
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise TaskError(f"{str(path)!r} can't be read: {error.strerror}") from None
    if len(data) > limit_bytes:
        raise TaskError(f"{str(path)!r} has more than {limit_bytes} bytes")
    return data


def read_folder(folder: str | Path, limits: ReadLimits = LIMITS) -> dict[str, File]:
    """Return the regular files below a folder by relative path, sorted.

    Raises:
        TaskError: A link, pipe, socket or device is below it, a path isn't portable, a limit is passed, or it can't be read.
    """
    what, root = f"folder {str(folder)!r}", str(folder)
    tree = _Tree(what, limits)
    try:
        if stat.S_ISLNK(os.lstat(root).st_mode):
            raise TaskError(f"{what} is a symbolic link; none is followed")
        for current, folders, names, fd in os.fwalk(root, follow_symlinks=False, onerror=_stop):
            prefix = os.path.relpath(current, root)
            for name in sorted([*names, *folders]):
                path = check_path(name if prefix == "." else f"{prefix}/{name}", what, limits)
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    continue
                if not stat.S_ISREG(mode):
                    raise TaskError(
                        f"{what}: {path!r} is a {_kind(mode)}; only regular files and folders are read, and no link is followed"
                    )
                handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
                with os.fdopen(handle, "rb") as file:
                    info = os.fstat(handle)
                    if not stat.S_ISREG(info.st_mode):
                        raise TaskError(f"{what}: {path!r} was replaced while it was read")
                    tree.add(path, file, info.st_size, executable=bool(info.st_mode & stat.S_IXUSR))
    except OSError as error:
        raise TaskError(f"{what} can't be read: {error}") from None
    return dict(sorted(tree.files.items()))


def _stop(error: OSError) -> None:
    raise error


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISLNK, "symbolic link"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "character device"))
    return next((name for test, name in kinds if test(mode)), "block device")


def is_archive(path: str | Path) -> bool:
    """Whether the name is that of an archive."""
    return str(path).endswith(ARCHIVES)


def read_archive(path: str | Path, limits: ReadLimits = LIMITS) -> dict[str, File]:
    """Return the files of a tar (plain, gzip, zstd) or zip archive by path, sorted.

    Raises:
        TaskError: It is damaged or too large, or a member is a link or device, or its path leaves the archive.
    """
    what = f"archive {str(path)!r}"
    tree = _Tree(what, limits)
    try:
        with open(path, "rb") as raw:
            if str(path).endswith(".zip"):
                _read_zip(raw, tree)
            else:
                stream = _decompressed(raw, str(path))
                # Headers are read whole, whatever length they claim: with 2 KiB for each member they fit, and a bomb doesn't.
                _read_tar(cast("IO[bytes]", _Bounded(stream, limits.total_bytes + 2048 * 4 * limits.files, what)), tree)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zstandard.ZstdError, NotImplementedError, RuntimeError) as error:
        raise TaskError(f"{what} can't be read: {error}") from None
    except (ValueError, OverflowError, LookupError, zlib.error) as error:
        raise TaskError(f"{what} is damaged: {type(error).__name__}: {error}") from None
    return dict(sorted(tree.files.items()))


def _read_tar(stream: IO[bytes], tree: _Tree) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for number, member in enumerate(archive):
            if number > 4 * tree.limits.files:
                raise TaskError(f"{tree.what}: more than {4 * tree.limits.files} members")
            if member.isdir():
                if member.name.strip("./"):
                    check_path(member.name, tree.what, tree.limits)
                continue
            path = check_path(member.name, tree.what, tree.limits)
            if not member.isreg():
                raise TaskError(f"{tree.what}: {path!r} is a link or device; only regular files and folders are read")
            source = archive.extractfile(member)
            if source is not None:
                tree.add(path, source, member.size, executable=bool(member.mode & stat.S_IXUSR))


def _read_zip(raw: IO[bytes], tree: _Tree) -> None:
    with zipfile.ZipFile(raw) as archive:
        members = archive.infolist()
        if len(members) > 4 * tree.limits.files:
            raise TaskError(f"{tree.what}: more than {4 * tree.limits.files} members")
        for member in members:
            path = check_path(member.filename, tree.what, tree.limits)
            if member.is_dir():
                continue
            mode = member.external_attr >> 16
            if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
                raise TaskError(f"{tree.what}: {path!r} is a {_kind(mode)}; only regular files and folders are read")
            with archive.open(member) as source:
                tree.add(path, source, member.file_size, executable=bool(mode & stat.S_IXUSR))


def _decompressed(raw: IO[bytes], name: str) -> IO[bytes]:
    if name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        return io.BufferedReader(zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw))  # type: ignore[arg-type]
    return raw


def read_rows(path: str | Path, limits: ReadLimits = LIMITS) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data file: JSON lines, one JSON list, or one JSON object; ``.gz`` and ``.zst`` are unpacked on the way.

    Raises:
        TaskError: It can't be read, isn't JSON, a row isn't an object, or a limit is passed.
    """
    what, name = f"data file {str(path)!r}", str(path)
    plain_name = name.removesuffix(".gz").removesuffix(".zst")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TaskError(f"{what} is not a regular file")
        with open(path, "rb") as raw:
            stream = _decompressed(raw, name)
            if plain_name.endswith(".jsonl"):
                for number, line in enumerate(_lines(stream, what, limits), 1):
                    if line.strip():
                        yield _object(parse_json(line, f"{what}, line {number}"), f"{what}, line {number}")
                return
            data = stream.read(limits.total_bytes + 1)
        if len(data) > limits.total_bytes:
            raise TaskError(f"{what} has more than {limits.total_bytes} bytes; split it, or make it JSON lines")
        value = parse_json(data, what)
        for number, row in enumerate(value if isinstance(value, list) else [value]):
            yield _object(row, f"{what}, row {number}")
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise TaskError(f"{what} can't be read: {error}") from None


def _lines(stream: IO[bytes], what: str, limits: ReadLimits) -> Iterator[bytes]:
    rest = b""
    while chunk := stream.read(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > limits.line_bytes:
            raise TaskError(f"{what} has a line of more than {limits.line_bytes} bytes")
    if rest:
        yield rest


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TaskError(f"{where} is a {type(row).__name__}, expected an object with the columns of a task")
    return row


def parse_json(data: bytes | str, what: str) -> Any:
    """Return JSON data strictly: UTF-8, every key once, finite numbers, limited depth.

    Raises:
        TaskError: It is anything else.
    """
    try:
        source = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(source, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise TaskError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise TaskError(f"{what} is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


class _StrictLoader(yaml.SafeLoader):
    """Plain data only: no aliases (a few bytes of them stand for gigabytes), every key once, dates stay text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases aren't read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            raise yaml.YAMLError(f"a key comes twice: {sorted(map(str, keys))}")
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(data: bytes, what: str) -> Any:
    """Return YAML as plain data; dates stay text.

    Raises:
        TaskError: It isn't UTF-8 or YAML, is longer than 64 KiB, is nested deeply, or uses aliases or tags.
    """
    if len(data) > _YAML_BYTES:
        raise TaskError(f"{what} has {len(data)} bytes, the limit for YAML is {_YAML_BYTES}")
    # The scanner's time grows with the square of the depth, so that a short file could hold it for hours.
    depths = accumulate((byte in b"[{") - (byte in b"]}") for byte in data)
    if max(depths, default=0) > _YAML_DEPTH or b"- " * _YAML_DEPTH in data or b"? " * _YAML_DEPTH in data:
        raise TaskError(f"{what} is nested too deeply")
    try:
        return yaml.load(data.decode("utf-8"), Loader=_StrictLoader)
    except RecursionError:
        raise TaskError(f"{what} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise TaskError(f"{what} is not plain YAML: {' '.join(str(error).split())[:300]}") from None


def as_text(file: File, what: str) -> str:
    """Return a file as text, line ends as they are.

    Raises:
        TaskError: It isn't UTF-8.
    """
    try:
        return file.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{what} isn't UTF-8: {error.reason} at byte {error.start}") from None
