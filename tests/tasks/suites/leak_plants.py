"""Ways to leave a solution in a workspace, one for every kind of place that the scan knows. Each takes the workspace (a git checkout), the
path of the broken file, and the solution's text."""

from __future__ import annotations

import gzip
import os
import py_compile
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """Run git without hooks."""
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    argv = ["git", "-c", "core.hooksPath=/dev/null", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(argv, cwd=folder, env={**os.environ, **names}, capture_output=True, text=True, check=True).stdout.strip()


def make_checkout(folder: Path) -> None:
    """Commit what is there, once."""
    git(folder, "init", "-q")
    git(folder, "add", "-f", ".")
    git(folder, "commit", "-q", "-m", "start")


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files below a folder."""
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def commit_gold(folder: Path, path: str, gold: bytes) -> str:
    (folder / path).write_bytes(gold)
    git(folder, "commit", "-qam", "fix")
    sha = git(folder, "rev-parse", "HEAD")
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    return sha


def plant_branch(folder: Path, path: str, gold: bytes) -> None:
    git(folder, "update-ref", "refs/heads/fix", commit_gold(folder, path, gold))
    git(folder, "reflog", "expire", "--expire=now", "--all")


def plant_dangling_blob(folder: Path, path: str, gold: bytes) -> None:
    (folder / "copy").write_bytes(gold)
    git(folder, "hash-object", "-w", "copy")
    (folder / "copy").unlink()


def plant_packed(folder: Path, path: str, gold: bytes) -> None:
    plant_branch(folder, path, gold)
    git(folder, "gc", "-q")


def plant_reflog(folder: Path, path: str, gold: bytes) -> None:
    commit_gold(folder, path, gold)


def plant_remote(folder: Path, path: str, gold: bytes) -> None:
    git(folder, "remote", "add", "origin", "https://example.org/shop.git")


def plant_tag(folder: Path, path: str, gold: bytes) -> None:
    git(folder, "tag", "v2", commit_gold(folder, path, gold))


def plant_byte_code(folder: Path, path: str, gold: bytes) -> None:
    bug = (folder / path).read_bytes()
    (folder / path).write_bytes(gold)
    py_compile.compile(str(folder / path))
    (folder / path).write_bytes(bug)


def plant_pytest_cache(folder: Path, path: str, gold: bytes) -> None:
    write_files(folder, {".pytest_cache/v/cache/diff": gold})


def plant_checker_cache(folder: Path, path: str, gold: bytes) -> None:
    write_files(folder, {".mypy_cache/3.11/copy.data.json": gold})


def plant_backup(folder: Path, path: str, gold: bytes) -> None:
    write_files(folder, {f"{path}.orig": gold})


def plant_swap_file(folder: Path, path: str, gold: bytes) -> None:
    write_files(folder, {".copy.py.swp": gold})


def plant_installed_copy(folder: Path, path: str, gold: bytes) -> None:
    write_files(folder, {f".venv/lib/python3.11/site-packages/{path}": gold})


def plant_wheel_in_pip_cache(folder: Path, path: str, gold: bytes) -> None:
    place = folder / ".cache" / "pip" / "http-v2" / "a"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / "raw", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(path, gold)
    body = (place / "raw").read_bytes()
    (place / "raw").write_bytes(b"cc=4,\x00headers\x00" + body)


def plant_wheel(folder: Path, path: str, gold: bytes) -> None:
    with zipfile.ZipFile(folder / "copy-2.1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(path, gold)


def plant_source_archive(folder: Path, path: str, gold: bytes) -> None:
    (folder / "gold.py").write_bytes(gold)
    with tarfile.open(folder / "copy-2.1.tar.gz", "w:gz") as archive:
        archive.add(folder / "gold.py", f"copy-2.1/{path}")
    (folder / "gold.py").unlink()


def plant_gzip(folder: Path, path: str, gold: bytes) -> None:
    (folder / "copy.py.gz").write_bytes(gzip.compress(gold))


def plant_borrowed_objects(folder: Path, path: str, gold: bytes) -> None:
    (folder / ".git" / "objects" / "info" / "alternates").write_text("/somewhere/objects\n")


PLANTS: dict[str, tuple[Callable[[Path, str, bytes], None], str]] = {
    "branch": (plant_branch, "git refs"),
    "tag": (plant_tag, "git refs"),
    "dangling blob": (plant_dangling_blob, "git objects"),
    "packed": (plant_packed, "git objects"),
    "borrowed objects": (plant_borrowed_objects, "git objects"),
    "reflog": (plant_reflog, "git reflog"),
    "remote": (plant_remote, "git remotes"),
    "byte code": (plant_byte_code, "byte code"),
    "pytest cache": (plant_pytest_cache, "pytest cache"),
    "checker cache": (plant_checker_cache, "type-checker cache"),
    "backup": (plant_backup, "backup"),
    "swap file": (plant_swap_file, "backup"),
    "installed copy": (plant_installed_copy, "site-packages"),
    "pip cache": (plant_wheel_in_pip_cache, "pip cache"),
    "wheel": (plant_wheel, "archive"),
    "source archive": (plant_source_archive, "archive"),
    "gzip": (plant_gzip, "archive"),
}
