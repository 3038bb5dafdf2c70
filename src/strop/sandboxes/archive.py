"""A box's changes as bytes: what ``Sandbox.snapshot`` gives and ``start(base, snapshot=...)`` takes.

The form is the same for every back end, so that a box can be resumed on another one: a magic line, the digest of what follows, and
a zstandard frame with one JSON line of entries, then the contents of the files one after the other. Equal changes give equal bytes.
What was in the box is hostile, but only this process writes archives and the digest shows a damaged one; names are checked all the
same before they are used.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import zstandard

from strop.core.errors import SandboxError
from strop.sandboxes.layer import DIRECTORY, FILE, LINK, OTHER, WHITEOUT, Layer
from strop.sandboxes.safepath import clean

MAGIC = b"strop-snapshot-1\n"
MAX_BYTES = 1 << 31
_DIGEST_BYTES = 32


def pack(layer: Layer) -> bytes:
    """Everything that a layer holds over its base: files with mode and time, directories, links, pipes and deletions."""
    entries: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for path in sorted(layer.index):
        entry = layer.index[path]
        row: dict[str, Any] = {"path": path, "kind": entry.kind}
        if entry.kind == FILE:
            content = layer.read(path)
            row |= {"size": len(content), "mode": entry.mode, "mtime": entry.mtime_s}
            contents.append(content)
        elif entry.kind in (DIRECTORY, OTHER):
            row["mode"] = layer.mode_of(path)
        elif entry.kind == LINK:
            row["target"] = layer.link_target(path)
        entries.append(row)
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    body = zstandard.ZstdCompressor(level=1).compress(head + b"\n" + b"".join(contents))
    return MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unpack(layer: Layer, data: bytes) -> None:
    """Bring an empty layer to the state that ``pack`` saw.

    Args:
        layer: An empty layer over the same base.
        data: Bytes of ``pack``.

    Raises:
        SandboxError: The bytes aren't a snapshot, are damaged, or don't fit the layer's size limit.
    """
    head, contents = _open(data)
    offset = 0
    for row in head:
        path = clean(row["path"])
        kind = row["kind"]
        if kind == FILE:
            size = row["size"]
            content = contents[offset : offset + size]
            offset += size
            if layer.used_bytes + size > layer.limit_bytes:
                raise SandboxError(f"the snapshot doesn't fit the box: its files pass the limit of {layer.limit_bytes} bytes at {path!r}")
            layer.put_file(path, content, row["mode"], row["mtime"])
        elif kind == DIRECTORY:
            # Deletions below it are entries of their own, so nothing has to be hidden here.
            layer.put_directory(path, fresh=False, mode=row["mode"])
        elif kind == LINK:
            layer.put_link(path, row["target"])
        elif kind == OTHER:
            layer.put_pipe(path, row["mode"])
        elif kind == WHITEOUT:
            layer.put_whiteout(path)
        else:
            raise SandboxError(f"the snapshot names an entry of unknown kind {kind!r} at {path!r}; it is of another version of strop")


def content_digest(data: bytes) -> bytes:
    """Return a digest of everything that a snapshot holds but the times of its files.

    Args:
        data: Bytes of ``pack``.

    Raises:
        SandboxError: The bytes aren't a snapshot, or are damaged.
    """
    head, contents = _open(data)
    rows = [{key: value for key, value in row.items() if key != "mtime"} for row in head]
    return hashlib.blake2b(json.dumps(rows).encode() + b"\n" + contents, digest_size=_DIGEST_BYTES).digest()


def _open(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    if not data.startswith(MAGIC):
        raise SandboxError(f"not a snapshot: it begins with {data[:20]!r}, expected {MAGIC!r}")
    digest = data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES]
    body = data[len(MAGIC) + _DIGEST_BYTES :]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise SandboxError(f"the snapshot is damaged: its {len(body)} bytes don't have the digest that it carries")
    try:
        plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_BYTES)
    except zstandard.ZstdError as error:
        raise SandboxError(f"the snapshot can't be unpacked: {error}") from error
    line, _, contents = plain.partition(b"\n")
    return json.loads(line), contents
