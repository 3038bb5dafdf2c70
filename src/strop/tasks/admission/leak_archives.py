"""What archives and compressed bodies hold, within bounds; nothing is written to disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator

import zstandard

from strop.tasks.admission.leak_report import MAX_READ, LeakReport

MAX_UNPACKED = 128 << 20


def unpacked(path: str, data: bytes, report: LeakReport, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield a file itself and what it holds, archives in archives included, within bounds."""
    yield path, data
    if depth > 2:
        return
    try:
        for inner, content in _members(path, data):
            yield from ((inner if name == inner else f"{inner}!{name}", part) for name, part in unpacked(inner, content, report, depth + 1))
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
    ) as error:
        report.unread.append(f"{path}: {type(error).__name__}: {str(error)[:80]}")


def _members(path: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    left = MAX_UNPACKED
    if data[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if not info.is_dir() and left > 0:
                    with archive.open(info) as file:
                        content = file.read(min(left, MAX_READ))
                    left -= len(content)
                    yield info.filename, content
        return
    if path.lower().endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz")):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() and left > 0 else None
                if file is not None:
                    content = file.read(min(left, MAX_READ))
                    left -= len(content)
                    yield member.name, content
        return
    plain = _decompressed(data)
    if plain is not None:
        inner = path.rsplit(".", 1)[0] if "." in path.rpartition("/")[2] else f"{path}.inner"
        is_tar = plain[257:262] == b"ustar"
        yield f"{inner}.tar" if is_tar and not inner.endswith(".tar") else inner, plain
    elif (at := data.find(b"PK\x03\x04", 0, 65_536)) > 0:  # a cached response: headers, then a wheel
        yield f"{path}.zip", data[at:]
    elif (at := data.find(b"\x1f\x8b\x08", 0, 65_536)) > 0:
        yield f"{path}.gz", data[at:]


def _decompressed(data: bytes) -> bytes | None:
    if data[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(data)) as file:
            return file.read(MAX_UNPACKED)
    if data[:3] == b"BZh":
        with bz2.open(io.BytesIO(data)) as file:
            return file.read(MAX_UNPACKED)
    if data[:6] == b"\xfd7zXZ\0":
        with lzma.open(io.BytesIO(data)) as file:
            return file.read(MAX_UNPACKED)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as file:
            return file.read(MAX_UNPACKED)
    return None
