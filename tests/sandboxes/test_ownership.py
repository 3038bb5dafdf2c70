"""Directories of dead owners go, living ones stay, and nobody else's directory is trusted."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from strop.core.errors import SandboxError
from strop.sandboxes.ownership import create_root, identity, is_dead, release_root, remove_tree


def test_a_killed_process_leaves_a_dead_identity() -> None:
    code = "from strop.sandboxes.ownership import identity; print(identity())"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert is_dead(name)
    assert not is_dead(identity())


def test_next_start_removes_what_a_dead_owner_left(tmp_path: Path) -> None:
    pid, start, namespace = identity().removeprefix("strop-").split("-")
    stale = tmp_path / f"strop-{pid}-{int(start) - 1}-{namespace}" / "p1" / "b1"
    stale.mkdir(parents=True)
    (stale / "locked").mkdir()
    (stale / "locked/file").write_text("x")
    (stale / "locked").chmod(0)
    unrelated = tmp_path / "something-else"
    unrelated.mkdir()
    root = create_root(str(tmp_path))
    assert not stale.parent.parent.exists()
    assert unrelated.exists()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    release_root(root)
    assert not root.exists()


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(SandboxError, match="must be a directory that user"):
        create_root(str(tmp_path / "link"))


def test_removal_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep/file").write_text("x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to(tmp_path / "keep")
    remove_tree(tmp_path / "tree")
    assert not os.path.lexists(tmp_path / "tree")
    assert (tmp_path / "keep/file").exists()
