"""The revision that results name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from strop.store.facts import git_revision


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(("path", "is_dirty"), [("src/a.py", True), ("docs/results/a.json", False), ("docs/a.md", True)])
def test_only_recorded_results_may_differ_from_the_commit(tmp_path: Path, path: str, is_dirty: bool) -> None:
    for name in ("src/a.py", "docs/results/a.json", "docs/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "first")
    clean = git_revision(tmp_path / "src")
    assert len(clean) == 40
    (tmp_path / path).write_text("2")
    assert git_revision(tmp_path / "src") == clean + "+dirty" * is_dirty


def test_no_checkout_has_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) == "unknown"
