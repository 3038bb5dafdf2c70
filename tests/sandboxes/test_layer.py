"""The host's view of a box's layer, against a plain dictionary and against the kernel's overlay."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.sandboxes.absorb import absorb
from strop.sandboxes.layer import BaseTree, Layer
from strop.sandboxes.safepath import clean, open_beneath, read_regular

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.sampled_from([None, b"", b"x", b"new\n"])


def _layer(root: Path, files: dict[str, bytes], limit: int = 1 << 20) -> Layer:
    (root / "base").mkdir()
    (root / "layer").mkdir()
    for path, content in files.items():
        (root / "base" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "base" / path).write_bytes(content)
    return Layer(BaseTree.scan(str(root / "base")), root / "layer", limit)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(PATHS, CONTENTS), max_size=8), st.lists(st.tuples(PATHS, CONTENTS), max_size=12))
def test_file_operations_match_a_dictionary(start: list[tuple[str, bytes | None]], operations: list[tuple[str, bytes | None]]) -> None:
    def blocked(files: dict[str, bytes], dirs: set[str], path: str) -> bool:
        return path in dirs or any(path.startswith(f"{name}/") for name in files)

    initial: dict[str, bytes] = {}
    dirs: set[str] = set()
    for path, content in start:
        if not blocked(initial, dirs, path):
            initial[path] = content or b"base"
            dirs.update(_parents(path))
    with tempfile.TemporaryDirectory() as directory:
        layer = _layer(Path(directory), initial)
        model = dict(initial)
        for path, content in operations:
            if content is None:
                if path in model:
                    layer.delete(path)
                    del model[path]
                else:
                    with pytest.raises((FileNotFoundError, IsADirectoryError)):
                        layer.delete(path)
            elif blocked(model, dirs, path):
                with pytest.raises((IsADirectoryError, NotADirectoryError)):
                    layer.write(path, content)
            else:
                layer.write(path, content)
                model[path] = content
                dirs.update(_parents(path))
        assert layer.list_files() == sorted(model)
        assert {path: layer.read(path) for path in model} == model
        changed = {path: model.get(path) for path in {*model, *initial} if model.get(path) != initial.get(path)}
        assert layer.changes() == dict(sorted(changed.items()))
        assert layer.used_bytes == sum(len(layer.read(path)) for path, entry in layer.index.items() if entry.kind == "file")
        layer.close()


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def test_layer_has_a_size_limit(tmp_path: Path) -> None:
    layer = _layer(tmp_path, {"a": b"1"}, limit=10)
    layer.write("b", b"12345678")
    with pytest.raises(OSError, match="limit is 10"):
        layer.write("c", b"123")
    layer.write("b", b"1")
    layer.write("c", b"123")
    assert layer.used_bytes == 4


def test_edit_in_the_same_second_never_looks_unchanged(tmp_path: Path) -> None:
    layer = _layer(tmp_path, {"m.py": b"x = 1\n"})
    base_seconds = layer.base.entries["m.py"].mtime_s
    for content in (b"x = 2\n", b"x = 3\n"):
        layer.write("m.py", content)
        assert int(os.stat(tmp_path / "layer/m.py").st_mtime) != base_seconds


def test_mode_of_an_edited_script_is_kept(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "layer").mkdir()
    (tmp_path / "base/run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "base/run.sh").chmod(0o755)
    layer = Layer(BaseTree.scan(str(tmp_path / "base")), tmp_path / "layer", 1 << 20)
    layer.write("run.sh", b"#!/bin/sh\ntrue\n")
    assert stat.S_IMODE(os.stat(tmp_path / "layer/run.sh").st_mode) == 0o755


def test_deleted_file_is_an_overlay_whiteout(tmp_path: Path) -> None:
    layer = _layer(tmp_path, {"d/a": b"1"})
    layer.delete("d/a")
    info = os.lstat(tmp_path / "layer/d/a")
    assert stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == 0
    layer.write("d/a", b"2")
    assert layer.read("d/a") == b"2"


@pytest.mark.parametrize("path", ["/etc/passwd", "..", "a/../b", "a/..", "x\0y", "\udcff"])
def test_paths_that_leave_are_refused(path: str) -> None:
    with pytest.raises(PermissionError):
        clean(path)


def test_one_spelling_per_path() -> None:
    assert clean("a//./b/") == "a/b"


@pytest.mark.parametrize("steps", [False, True])
def test_opening_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: bool) -> None:
    if steps:
        monkeypatch.setattr("strop.sandboxes.safepath._has_openat2", False)
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("x")
    (tmp_path / "dirlink").symlink_to("real")
    (tmp_path / "filelink").symlink_to("real/file")
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_regular(fd, "real/file", 10) == b"x"
        for path in ("dirlink/file", "filelink", "pipe", "real", "nothing", "real/file/below"):
            with pytest.raises(OSError, match=r"no such file|No such file|directory"):
                read_regular(fd, path, 10)
        with pytest.raises(OSError, match="limit"):
            read_regular(fd, "real/file", 0)
        with pytest.raises(OSError, match=r".*"):
            open_beneath(fd, "../" + tmp_path.name + "/real/file", os.O_RDONLY)
    finally:
        os.close(fd)


def test_absorb_takes_an_overlay_upper_directory(tmp_path: Path) -> None:
    layer = _layer(tmp_path, {"keep": b"1", "gone": b"2", "dir/one": b"3", "dir/two": b"4", "swap/x": b"5"})
    upper = tmp_path / "upper"
    (upper / "dir").mkdir(parents=True)
    os.setxattr(upper / "dir", "user.overlay.opaque", b"y")
    (upper / "dir/fresh").write_bytes(b"6")
    os.mknod(upper / "gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    (upper / "swap").write_bytes(b"now a file")
    (upper / "link").symlink_to("/etc/passwd")
    (upper / "setuid").write_bytes(b"7")
    (upper / "setuid").chmod(0o6755)
    os.mkfifo(upper / "pipe")
    (upper / os.fsdecode(b"bad\xff")).write_bytes(b"8")
    fd = os.open(upper, os.O_RDONLY)
    dropped = absorb(layer, fd)
    os.close(fd)
    assert dropped == 1
    assert layer.list_files() == ["dir/fresh", "keep", "setuid", "swap"]
    assert layer.changes() == {
        "dir/fresh": b"6",
        "dir/one": None,
        "dir/two": None,
        "gone": None,
        "setuid": b"7",
        "swap": b"now a file",
        "swap/x": None,
    }
    assert os.lstat(tmp_path / "layer/setuid").st_mode & 0o6000 == 0
    assert os.readlink(tmp_path / "layer/link") == "/etc/passwd"


def test_absorb_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    layer = _layer(tmp_path, {}, limit=100)
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/a").write_bytes(b"x" * 60)
    (tmp_path / "upper/b").write_bytes(b"x" * 60)
    with open(tmp_path / "upper/c", "wb") as file:
        file.truncate(1 << 40)
    fd = os.open(tmp_path / "upper", os.O_RDONLY)
    assert absorb(layer, fd) == 2
    os.close(fd)
    assert layer.list_files() == ["a"]
