"""A workspace that is mounted: what the host reads and writes of it, also while something in it won't keep still."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from strop.sandboxes.absorb import absorb
from strop.sandboxes.conformance import make_base
from strop.sandboxes.layer import BaseTree, Layer
from strop.sandboxes.live import LiveView

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


@pytest.fixture
def base(tmp_path: Path) -> BaseTree:
    return BaseTree.scan(str(make_base(tmp_path)))


def view_of(base: BaseTree, root: Path, limit: int = 1 << 20) -> tuple[LiveView, Path]:
    """A view whose upper directory stands for the mounted workspace too, as where nothing of the base is touched."""
    upper = root / "upper"
    upper.mkdir()
    view = LiveView(lambda place: Layer(base, place, limit), root / "copies", os.open(upper, DIRECTORY), os.open(upper, DIRECTORY))
    return view, upper


def test_reading_follows_what_runs_change(base: BaseTree, tmp_path: Path) -> None:
    view, upper = view_of(base, tmp_path)
    assert view.layer().changes() == {}
    (upper / "new").write_text("1")
    assert view.layer().changes() == {}
    view.changed()
    assert view.layer().changes() == {"new": b"1"}
    view.close()
    assert list((tmp_path / "copies").iterdir()) == []


def test_writing_replaces_links_and_never_follows_them(base: BaseTree, tmp_path: Path) -> None:
    view, upper = view_of(base, tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    (upper / "link").symlink_to(outside)
    (upper / "up").symlink_to(tmp_path)
    os.mkfifo(upper / "pipe")
    view.changed()
    view.write("link", b"mine")
    view.write("pipe", b"mine")
    view.write("a/b/c", b"deep")
    with pytest.raises(NotADirectoryError):
        view.write("up/outside", b"broken")
    for path in ("../outside", "/etc/x", ""):
        with pytest.raises(OSError, match=r"path|no such file"):
            view.write(path, b"broken")
    assert outside.read_text() == "untouched"
    assert [(upper / name).read_bytes() for name in ("link", "pipe", "a/b/c")] == [b"mine", b"mine", b"deep"]
    view.write("a/b/c", None)
    assert not (upper / "a/b/c").exists()
    assert "a/b/c" not in view.layer().list_files()
    view.close()


def test_a_link_put_in_between_is_not_followed(base: BaseTree, tmp_path: Path) -> None:
    """The copy says that a directory is there; a process of the box has put a link in its place since."""
    view, upper = view_of(base, tmp_path)
    (upper / "d").mkdir()
    view.changed()
    view.layer()
    (upper / "d").rmdir()
    (upper / "d").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"d"):
        view.write("d/planted", b"x")
    assert not (tmp_path / "planted").exists()
    view.close()


def test_a_tree_that_changes_while_it_is_read(base: BaseTree, tmp_path: Path) -> None:
    view, upper = view_of(base, tmp_path)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for name in ("x", "y"):
                (upper / name).mkdir(exist_ok=True)
                (upper / name / "f").write_text(name)
                (upper / name / "f").unlink()
                (upper / name).rmdir()
                (upper / name).symlink_to("/etc")
                (upper / name).unlink()

    (upper / "steady").write_text("here")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(50):
            view.changed()
            layer = view.layer()
            assert layer.read("steady") == b"here"
            assert all("passwd" not in path for path in layer.list_files())
    finally:
        stop.set()
        thread.join()
    view.close()


def test_at_rest_nothing_may_vanish(base: BaseTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is over holds still: an entry that goes away then is the machinery's fault, and said."""
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "f").write_text("x")
    (tmp_path / "layer").mkdir()
    layer = Layer(base, tmp_path / "layer", 1 << 20)
    real = os.open
    monkeypatch.setattr(
        "strop.sandboxes.absorb.os.open", lambda name, *rest, **more: real("nowhere" if name == "f" else name, *rest, **more)
    )
    with pytest.raises(FileNotFoundError):
        absorb(layer, os.open(upper, DIRECTORY))
    assert absorb(layer, os.open(upper, DIRECTORY), may_change_modes=False) == 1
