"""Snapshots: what goes in comes out, byte for byte, and damaged ones are refused."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.core.errors import SandboxError
from strop.sandboxes.archive import MAGIC, pack, unpack
from strop.sandboxes.conformance import make_base
from strop.sandboxes.layer import BaseTree, Layer

NAMES = st.sampled_from(["README", "pkg", "pkg/core.py", "pkg/new", "tests", "tests/deep/er", "a", "a/b", "é b", "x'\n"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), NAMES, st.binary(max_size=40)),
        st.tuples(st.just("delete"), NAMES, st.none()),
        st.tuples(st.just("link"), NAMES, st.sampled_from(["/etc/passwd", "../..", "x"])),
        st.tuples(st.just("pipe"), NAMES, st.none()),
        st.tuples(st.just("directory"), NAMES, st.none()),
    ),
    max_size=12,
)


def fresh(tree: BaseTree, root: Path, name: str, limit: int = 1 << 20) -> Layer:
    (root / name).mkdir()
    return Layer(tree, root / name, limit)


def apply(layer: Layer, steps: list) -> None:
    """Do what can be done of the steps, as runs of an agent would."""
    for what, path, value in steps:
        try:
            if what == "write":
                layer.write(path, value)
            elif what == "delete":
                layer.delete(path)
            else:
                layer._make_parents(path)
                if what == "link":
                    layer.put_link(path, value)
                elif what == "pipe":
                    layer.put_pipe(path)
                else:
                    layer.put_directory(path, fresh=True)
        except OSError:
            continue


def tree_of(directory: Path) -> list[tuple]:
    found = []
    for path in sorted(directory.rglob("*")):
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found.append((str(path.relative_to(directory)), info.st_mode, info.st_rdev, content))
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_restored_layers_are_equal(steps: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tree = BaseTree.scan(str(make_base(root)))
        one, other = fresh(tree, root, "one"), fresh(tree, root, "other")
        apply(one, steps)
        snapshot = pack(one)
        unpack(other, snapshot)
        assert other.changes() == one.changes()
        assert other.list_files() == one.list_files()
        assert other.used_bytes == one.used_bytes
        assert {path: entry.kind for path, entry in other.index.items()} == {path: entry.kind for path, entry in one.index.items()}
        assert tree_of(other.directory) == tree_of(one.directory)
        assert pack(other) == snapshot
        for layer in (one, other):
            layer.close()
        os.close(tree.fd)


def test_damaged_snapshots_are_refused(tmp_path: Path) -> None:
    tree = BaseTree.scan(str(make_base(tmp_path)))
    layer = fresh(tree, tmp_path, "one")
    layer.write("new", b"x" * 100)
    snapshot = pack(layer)
    for number, damaged in enumerate([b"", b"x", snapshot[:-1], snapshot + b"x", MAGIC + bytes(40)]):
        with pytest.raises(SandboxError, match="snapshot"):
            unpack(fresh(tree, tmp_path, f"d{number}"), damaged)
    for place in range(0, len(snapshot), 7):
        flipped = snapshot[:place] + bytes([snapshot[place] ^ 4]) + snapshot[place + 1 :]
        with pytest.raises(SandboxError, match="snapshot"):
            unpack(fresh(tree, tmp_path, f"f{place}"), flipped)


def test_a_snapshot_with_a_valid_digest_still_can_not_leave_the_layer(tmp_path: Path) -> None:
    import json

    import zstandard

    tree = BaseTree.scan(str(make_base(tmp_path)))
    for number, path in enumerate(["../out", "/etc/x", "a/../../x", ""]):
        head = json.dumps([{"path": path, "kind": "file", "size": 1, "mode": 0o644, "mtime": 0}]).encode()
        body = zstandard.ZstdCompressor().compress(head + b"\nx")
        forged = MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body
        with pytest.raises(OSError, match=r"path|no such file"):
            unpack(fresh(tree, tmp_path, f"p{number}"), forged)
    assert not (tmp_path / "out").exists()


def test_a_snapshot_that_is_too_large_for_the_box(tmp_path: Path) -> None:
    tree = BaseTree.scan(str(make_base(tmp_path)))
    layer = fresh(tree, tmp_path, "one")
    layer.write("new", bytes(5000))
    with pytest.raises(SandboxError, match="limit of 4096 bytes at 'new'"):
        unpack(fresh(tree, tmp_path, "small", limit=4096), pack(layer))
