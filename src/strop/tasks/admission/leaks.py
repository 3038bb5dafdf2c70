"""Looks for the solution everywhere in a workspace that isn't the workspace's own source: the scan that every task passes.

Each place has a kind (``KINDS``). Text is searched for the needles; a place that can't be read as text is unpacked (git objects, archives,
compressed bodies) or judged by what it is (byte code of a changed module, a remote, a branch). Nothing found is ever run, imported or
unpickled; git objects are read by a boxed git with its own configuration.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from strop.core.errors import TaskError
from strop.tasks.admission.leak_archives import unpacked
from strop.tasks.admission.leak_git import look_at_git
from strop.tasks.admission.leak_report import KINDS, Leak, LeakReport, read_file, search
from strop.tasks.admission.needles import Needle
from strop.tasks.repository.files import ARCHIVE_SUFFIXES, SKIPPED_CACHES

__all__ = ["KINDS", "Leak", "LeakReport", "interpreter_places", "kind_of_place", "scan"]

_BACKUP = re.compile(r".*(?:\.orig|\.rej|\.bak|\.old|\.save|~|\.sw[nop]|\.patch|\.diff)$", re.IGNORECASE)
_ARCHIVES = (*ARCHIVE_SUFFIXES, ".whl", ".egg", ".gz", ".bz2", ".xz", ".zst", ".pyz")
_CHECKER_CACHES = SKIPPED_CACHES - {".pytest_cache", ".hypothesis"}


def kind_of_place(path: str) -> str:
    """Return the kind of a workspace path, ``""`` for an ordinary file of the source."""
    parts = path.split("/")
    name = parts[-1]
    if any(part.endswith("-packages") for part in parts[:-1]):
        return "site-packages"
    if ".pytest_cache" in parts or ".hypothesis" in parts:
        return "pytest cache"
    if any(part in _CHECKER_CACHES for part in parts):
        return "type-checker cache"
    if name.endswith((".pyc", ".pyo")):
        return "byte code"
    if any(first in (".cache", "Caches") and second == "pip" for first, second in pairwise(parts)) or "pip-cache" in parts:
        return "pip cache"
    if _BACKUP.fullmatch(name):
        return "backup"
    return "archive" if name.lower().endswith(_ARCHIVES) else ""


def scan(
    workspace: str | Path, needles: Sequence[Needle], *, outside: Sequence[str] = (), shared: Mapping[str, str] | None = None
) -> LeakReport:
    """Look for needles in a workspace and in other places that its box shows.

    Args:
        workspace: The workspace's folder.
        needles: What must not be found.
        outside: Host folders that the box shows too: the interpreter's ``site-packages``, a pip cache.
        shared: Workspace folder -> host folder that it was made of by hard links; looked at there, by names.

    Raises:
        TaskError: The workspace can't be read.
    """
    report = LeakReport()
    root = str(workspace)
    shared_roots = tuple(f"{item.rstrip('/')}/" for item in shared or {})
    for path in _walk(root, report):
        if shared_roots and path.startswith(shared_roots):
            continue
        if "/.git/" in f"/{path}":
            continue
        kind = kind_of_place(path)
        if kind:
            report.looked_at[kind] += 1
            _look(report, kind, root, path, needles)
    for git in _git_folders(root):
        look_at_git(report, root, git, needles)
    for shown, folder in {**(shared or {}), **{item: item for item in outside}}.items():
        _look_at_shared(report, folder, shown, needles)
    return report


def _walk(root: str, report: LeakReport) -> Iterator[str]:
    """Regular files below a folder, following no link; a link is a way out and noted."""
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(os.path.join(root, parent)) as entries:
                rows = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not parent:
                raise TaskError(f"workspace {root!r} can't be read: {error.strerror}") from None
            report.unread.append(f"{parent}: {error.strerror}")
            continue
        for entry in rows:
            path = f"{parent}/{entry.name}" if parent else entry.name
            if entry.is_symlink():
                report.unread.append(f"{path}: a link to {os.readlink(entry.path)!r}")
            elif entry.is_dir(follow_symlinks=False):
                pending.append(path)
            elif entry.is_file(follow_symlinks=False):
                yield path


def _git_folders(root: str) -> list[str]:
    found = []
    for folder, names, files in os.walk(root):
        if os.path.isdir(os.path.join(folder, "objects")) and "HEAD" in files:
            found.append(folder)
            names.clear()
        names[:] = [name for name in names if not name.endswith("-packages")]
    return found


def _look(report: LeakReport, kind: str, root: str, path: str, needles: Sequence[Needle], shown: str = "") -> None:
    shown_path = f"{shown}/{path}" if shown else path
    try:
        data = read_file(os.path.join(root, path))
    except OSError as error:
        report.unread.append(f"{path}: {error.strerror}")
        return
    if path.endswith((".pyc", ".pyo")):
        if evidence := _byte_code_problem(root, path, data, needles):
            report.leaks.append(Leak("byte code", shown_path, evidence))
        return
    for inner, content in unpacked(path, data, report):
        search(report, kind, shown_path if inner == path else f"{shown_path}!{inner}", content, needles)


def _byte_code_problem(root: str, path: str, data: bytes, needles: Sequence[Needle]) -> str:
    """Byte code of a changed module is a leak unless its header names the hash of the workspace's own source."""
    folder, _, name = path.rpartition("/")
    parent = folder.rpartition("/")[0] if folder.rpartition("/")[2] == "__pycache__" else folder
    stem = name.split(".")[0]
    source = f"{parent}/{stem}.py" if parent else f"{stem}.py"
    is_of_changed = any(needle.path == source for needle in needles)
    is_called_alike = any(needle.path.rpartition("/")[2] == f"{stem}.py" for needle in needles)
    if not is_of_changed and not is_called_alike:
        return ""
    if os.path.isfile(os.path.join(root, source)):
        digest = importlib.util.source_hash(read_file(os.path.join(root, source)))
        is_current = data[:4] == importlib.util.MAGIC_NUMBER and data[4:8] in (b"\x01\0\0\0", b"\x03\0\0\0") and data[8:16] == digest
        if is_current or not is_of_changed:
            return ""
    return f"compiled code of {source}, not of the source that lies there"


# ----------------------------------------------------------------------------------------------------- shared, large folders


def _look_at_shared(report: LeakReport, folder: str, shown: str, needles: Sequence[Needle]) -> None:
    """Look at a large folder by names: files called like a changed one, archives that hold such a file, byte code without a source.

    These folders come from an installer, which keeps names; a whole search of every interpreter's packages would cost more than the gate.
    """
    names, archives = _names(folder, os.stat(folder).st_mtime_ns if os.path.isdir(folder) else 0)
    for needle in needles:
        *_, parent, name = ("", *needle.path.split("/"))
        for path in names.get(name, ()):
            if name != "__init__.py" or path.split("/")[-2:-1] == [parent]:
                report.looked_at["site-packages"] += 1
                _look(report, "site-packages", folder, path, [needle], shown)
        for path in names.get(f"{name.removesuffix('.py')}.pyc", ()):
            source = f"{path.rpartition('__pycache__/')[0]}{name}" if "__pycache__/" in path else path[:-1]
            if name != "__init__.py" and not os.path.isfile(os.path.join(folder, source)):
                report.leaks.append(Leak("byte code", f"{shown}/{path}", f"compiled code named like {needle.path}, without a source"))
    wanted = {needle.path.rpartition("/")[2] for needle in needles}
    for path in archives:
        report.looked_at["archive"] += 1
        if wanted & _member_names(os.path.join(folder, path), os.stat(os.path.join(folder, path)).st_mtime_ns):
            _look(report, "site-packages", folder, path, needles, shown)


@lru_cache(maxsize=64)
def _names(folder: str, _changed: int) -> tuple[dict[str, list[str]], list[str]]:
    """Paths below a folder by name (byte code as ``"NAME.pyc"``), and the archives among them."""
    names: dict[str, list[str]] = {}
    archives = []
    for path in _walk(folder, LeakReport()) if os.path.isdir(folder) else ():
        name = path.rpartition("/")[2]
        if name.endswith(".pyc"):
            name = f"{name.split('.')[0]}.pyc"
        elif name.lower().endswith(_ARCHIVES):
            archives.append(path)
        if name.endswith((".py", ".pyc")):
            names.setdefault(name, []).append(path)
    return names, archives


@lru_cache(maxsize=512)
def _member_names(path: str, _changed: int) -> frozenset[str]:
    try:
        return frozenset(name.rpartition("/")[2] for name, _ in unpacked("", read_file(path), LeakReport()))
    except OSError:
        return frozenset()


def interpreter_places(prefixes: Iterable[str]) -> list[str]:
    """Folders of installed packages that a box shows besides the workspace's own.

    Args:
        prefixes: Prefixes of interpreters that the box shows, for example ``("/usr", sys.base_prefix)``.
    """
    found = []
    for prefix in dict.fromkeys(os.path.realpath(item) for item in prefixes):
        for pattern in (
            "lib/python3*/site-packages",
            "lib/python3*/dist-packages",
            "lib/python3/dist-packages",
            "lib/python3*/ensurepip/_bundled",
        ):
            found += sorted(str(path) for path in Path(prefix).glob(pattern) if path.is_dir())
            found += sorted(str(path) for path in Path(prefix, "local").glob(pattern) if path.is_dir())
    return list(dict.fromkeys(found))
