"""Source trees on disk: written atomically, with byte code that stays valid wherever the tree is mounted."""

from __future__ import annotations

import os
import py_compile
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from strop.core.errors import TaskError


def make_once(target: Path, fill: Callable[[Path], None], *, is_intact: Callable[[Path], bool] = lambda folder: True) -> Path:
    """Create the folder ``target`` by filling a new one and renaming it; whoever comes second keeps what is there.

    Args:
        target: The folder.
        fill: Fills an empty one.
        is_intact: Whether a folder that is there can be kept. Nothing is flushed to disk, so a power cut can leave empty files.

    Raises:
        TaskError: The folder can't be written.
    """
    if target.is_dir() and is_intact(target):
        return target
    try:
        if target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:40]}.") as name:
                os.rename(target, Path(name) / "damaged")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:40]}.") as name:
            folder = Path(name) / "tree"
            folder.mkdir()
            fill(folder)
            try:
                os.rename(folder, target)
            except OSError:
                if not target.is_dir():
                    raise
    except OSError as error:
        raise TaskError(f"workspace {str(target)!r} can't be written: {error}", retryable=True) from None
    return target


def has_files(folder: Path, files: Mapping[str, bytes], changed: Mapping[str, bytes]) -> bool:
    """Whether a folder holds ``files`` with their sizes, and ``changed``, which come before them, byte for byte."""
    try:
        return all((folder / path).read_bytes() == data for path, data in changed.items()) and all(
            os.stat(folder / path, follow_symlinks=False).st_size == len(data) for path, data in files.items() if path not in changed
        )
    except OSError:
        return False


def write_tree(files: Mapping[str, bytes], folder: Path, *, byte_code: bool = True) -> None:
    """Write files below ``folder``, modules with byte code that is checked against the source's hash, not its time.

    So an unchanged module loads without compilation, and a changed one (by a mutation or by an agent) is compiled from its source.
    """
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if byte_code and path.endswith(".py"):
            try:
                py_compile.compile(str(target), dfile=path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
            except (py_compile.PyCompileError, ValueError, OSError):
                # A module that this interpreter can't compile is still part of the tree.
                continue


def link_tree(source: Path, folder: Path, changed: Mapping[str, bytes | None]) -> None:
    """Copy a tree by hard links (across file systems by copies); ``changed`` files are written instead (``None``: left out), without
    byte code."""
    for root, _, names in os.walk(source):
        relative = Path(root).relative_to(source)
        (folder / relative).mkdir(parents=True, exist_ok=True)
        for name in names:
            path = (relative / name).as_posix()
            if path in changed or _source_of(path) in changed:
                continue
            try:
                os.link(Path(root) / name, folder / path)
            except OSError:
                shutil.copyfile(Path(root) / name, folder / path)
    for path, data in changed.items():
        if data is not None:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _source_of(path: str) -> str:
    """The module that a byte code file belongs to: ``"a/__pycache__/b.cpython-311.pyc"`` -> ``"a/b.py"``."""
    head, separator, tail = path.rpartition("__pycache__/")
    return f"{head}{tail.split('.')[0]}.py" if separator else path
