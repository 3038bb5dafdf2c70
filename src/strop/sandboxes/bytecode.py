"""Compiled code for a base tree, as one more read-only layer under it.

A run that imports a package compiles every module of it again (about 12 us per line), because boxes never write compiled files.
``compile_tree`` does it
once, into a directory beside the base that the sandbox mounts below it. The files carry a hash of their source, which the
interpreter compares on import: a module that the agent changed, in whatever way and however fast, is compiled from its text.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path

from strop.sandboxes.layer import FILE, BaseTree
from strop.sandboxes.ownership import remove_tree
from strop.sandboxes.safepath import read_regular

SUFFIX = ".pyc"
_MAX_SOURCE_BYTES = 4 << 20
_compiled: dict[tuple[str, bytes], bytes] = {}
_MAX_CACHED = 20_000


def layer_of(base: str) -> str | None:
    """The compiled layer beside a base directory, or ``None`` if there is none."""
    path = base.rstrip("/") + SUFFIX
    return path if os.path.isdir(path) else None


def compile_tree(base: str, only: Iterable[str] | None = None) -> str:
    """Compile a base tree's modules into ``BASE.pyc/`` unless that exists; equal files of many trees are compiled once per process.

    The tree must be trusted as far as compiling goes (nothing is executed). Files that don't compile are left out.

    Args:
        base: The base directory.
        only: Workspace-relative ``.py`` files; all when ``None``.

    Returns:
        The layer's path.

    Raises:
        OSError: The tree can't be read or the layer can't be written.
    """
    base = os.path.realpath(base)
    target = Path(base + SUFFIX)
    if target.is_dir():
        return str(target)
    tree = BaseTree.scan(base)
    try:
        wanted = tree.files if only is None else sorted(set(only))
        building = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
        os.chmod(building, 0o755)
        for path in wanted:
            if path.endswith(".py") and tree.entries.get(path) is not None and tree.entries[path].kind == FILE:
                _compile_one(tree.fd, path, building)
    finally:
        os.close(tree.fd)
    try:
        os.rename(building, target)
    except OSError:
        remove_tree(building)
        if not target.is_dir():  # another process was not faster, so this is a real failure
            raise
    return str(target)


def _compile_one(tree_fd: int, path: str, building: Path) -> None:
    source = read_regular(tree_fd, path, _MAX_SOURCE_BYTES)
    digest = importlib.util.source_hash(source)
    data = _compiled.get((path, digest))
    if data is None:
        inside = f"/workspace/{path}"
        try:
            code = SourceFileLoader("_", inside).source_to_code(source, inside)
        except (SyntaxError, ValueError, RecursionError):
            return
        data = importlib._bootstrap_external._code_to_hash_pyc(code, digest, True)  # type: ignore[attr-defined]
        if len(_compiled) < _MAX_CACHED:
            _compiled[path, digest] = data
    place = building / importlib.util.cache_from_source(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
