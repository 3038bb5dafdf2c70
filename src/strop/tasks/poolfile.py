"""The task pool on disk: plain JSON lines and one archive per source tree, all zstd-compressed.

repair/
  meta.json               counts by split and kind, seeds, versions, refusals
  NOTICE                  sources, versions, licences
  functions.jsonl.zst     one function a line: tree, file, lines, test file, visible and hidden cases
  tasks.jsonl.zst         one mutant a line: function number, edit, the output of its visible tests
  heldout_digests.txt     normalised digests of every held-out function: nothing that trains may hold one
  trees/ID.tar.zst        the source tree with its licence texts
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from strop.core.errors import TaskError
from strop.tasks.mutation import Edit, FunctionSpan
from strop.tasks.verifier import Verifier

FORMAT = 1
COMPRESSION = 19


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """One function of the pool.

    Attributes:
        tree_id: Its source tree.
        source: ``"boltons 26.2.0"``.
        licence: SPDX expression.
        cluster: Group of tasks that aren't independent.
        span: Its lines.
        num_edits: Number of candidate edits of the original.
        test_path: Where the visible tests lie.
        test_text: Their text.
        verifier: Visible and hidden cases.
    """

    tree_id: str
    source: str
    licence: str
    cluster: str
    span: FunctionSpan
    num_edits: int
    test_path: str
    test_text: str
    verifier: Verifier

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "tree": self.tree_id,
            "source": self.source,
            "licence": self.licence,
            "cluster": self.cluster,
            "span": [self.span.name, self.span.start_line, self.span.end_line],
            "num_edits": self.num_edits,
            "test_path": self.test_path,
            "test_text": self.test_text,
            "verifier": self.verifier.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FunctionRecord:
        """Inverse of ``to_json``."""
        return cls(
            tree_id=data["tree"],
            source=data["source"],
            licence=data["licence"],
            cluster=data["cluster"],
            span=FunctionSpan(*data["span"]),
            num_edits=data["num_edits"],
            test_path=data["test_path"],
            test_text=data["test_text"],
            verifier=Verifier.from_json(data["verifier"]),
        )


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One mutant of the pool.

    Attributes:
        task_id: Unique name.
        split: ``"train"``, ``"heldout"`` or ``"hard"``.
        function: Number of its function.
        edit: The mutation, on the original source.
        output: What its visible tests print, as an agent sees it.
        failed: Numbers of visible and hidden cases that it fails.
    """

    task_id: str
    split: str
    function: int
    edit: Edit
    output: str
    failed: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        edit = self.edit
        return {
            "id": self.task_id,
            "split": self.split,
            "function": self.function,
            "edit": [edit.kind, edit.line, edit.old, edit.new],
            "output": self.output,
            "failed": list(self.failed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskRecord:
        """Inverse of ``to_json``."""
        visible, hidden = data["failed"]
        return cls(data["id"], data["split"], data["function"], Edit(*data["edit"]), data["output"], (visible, hidden))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write compressed JSON lines."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(zstandard.ZstdCompressor(level=COMPRESSION).compress(text.encode()))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read compressed JSON lines.

    Raises:
        TaskError: The file is missing or damaged.
    """
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        return [json.loads(line) for line in data.decode().splitlines()]
    except (OSError, zstandard.ZstdError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TaskError(f"task pool file {str(path)!r} can't be read: {error}") from None


def write_tree_archive(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a tree, the same bytes for the same files."""
    buffer = io.BytesIO()
    is_long = any(len(name.encode()) > 100 for name in files)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT if is_long else tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor(level=COMPRESSION).compress(buffer.getvalue()))


def read_tree_archive(path: Path) -> dict[str, bytes]:
    """Read a tree.

    Raises:
        TaskError: The archive is missing, damaged, or holds a path that leaves the tree.
    """
    try:
        data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
            found = {name: file.read() for name, file in files.items() if file is not None}
    except (OSError, zstandard.ZstdError, tarfile.TarError) as error:
        raise TaskError(f"source tree {str(path)!r} can't be read: {error}") from None
    for name in found:
        if name.startswith("/") or ".." in name.split("/"):
            raise TaskError(f"source tree {str(path)!r} holds the path {name!r}, which leaves the tree")
    return found


def pool_format(path: Path) -> str:
    """Return the format that a pool directory says it has, for example ``"strop-suite-1"``.

    The oldest kind, of functions, calls its description ``meta.json`` and gives its format as a number.

    Raises:
        TaskError: The directory is no pool, or its description can't be read.
    """
    for name, prefix in (("pool.json", ""), ("meta.json", "strop-repair-")):
        file = path / name
        if not file.is_file():
            continue
        try:
            meta = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise TaskError(f"task pool {str(path)!r} can't be read: {name}: {error}") from None
        found = meta.get("format") if isinstance(meta, dict) else None
        if isinstance(found, int if prefix else str):
            return f"{prefix}{found}"
        raise TaskError(f"task pool {str(path)!r} is damaged: {name} has the format {found!r}")
    raise TaskError(f"{str(path)!r} is no task pool: it has neither pool.json nor meta.json. `strop env build SOURCE --out DIR` makes one")


def read_meta(file: Path, kind: object, *, hint: str = "") -> tuple[dict[str, Any], bytes]:
    """Return what a pool's description says, and its bytes.

    Args:
        file: The description, directly in the pool directory.
        kind: Expected value of ``"format"``.
        hint: How to get such a pool, for the message.

    Raises:
        TaskError: There is none, it is damaged, or it is of another format.
    """
    pool = str(file.parent)
    try:
        text = file.read_bytes()
        meta = json.loads(text)
    except (OSError, ValueError) as error:
        raise TaskError(f"task pool {pool!r} can't be read: {error}{hint}") from None
    if not isinstance(meta, dict) or meta.get("format") != kind:
        found = meta.get("format") if isinstance(meta, dict) else meta
        raise TaskError(f"task pool {pool!r} has format {found!r}, expected {kind!r}")
    return meta, text
