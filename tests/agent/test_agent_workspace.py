"""Files of every kind, exact replacement, and what is shared between episodes."""

from __future__ import annotations

import os
from pathlib import Path

from agent_kit import DirSandbox, Hands, make_task
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.agent.workspace import EDIT_REACH, TreeCache, Workspace
from strop.core.task import Task


def test_crlf_files_keep_their_line_ends(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "w.py").write_bytes(b"a = 1\r\nb = 2\r\nc = 3\n\r\nd = 4")
    box = DirSandbox(base, tmp_path / "box")
    hands = Hands(box, task)
    assert hands("read", "w.py", "1") == "1|a = 1\n2|b = 2\n3|c = 3\n4|\n5|d = 4"
    assert hands("edit", "w.py", "1\nb = 2", "1", "9\n# new\nb = 8") == "ok\n1|a = 9\n2|# new\n3|b = 8"
    assert box.read("w.py") == b"a = 9\r\n# new\r\nb = 8\r\nc = 3\n\r\nd = 4"
    assert hands("edit", "w.py", "4", "6", "4\ne = 5") == "ok\n6|d = 4\n7|e = 5"
    assert box.read("w.py") == b"a = 9\r\n# new\r\nb = 8\r\nc = 3\n\r\nd = 4\r\ne = 5"
    assert hands("search", "1\nb") == "no match"
    hands("undo")
    hands("undo")
    assert hands("search", "1\nb") == "[6] w.py:1:a = 1"
    assert box.changes() == {}


def test_bytes_that_are_not_utf8_survive_an_edit(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "latin.py").write_bytes(b"# caf\xe9\nx = 1\n")
    box = DirSandbox(base, tmp_path / "box")
    hands = Hands(box, task)
    assert hands("read", "latin.py", "1") == "1|# caf\ufffd\n2|x = 1"
    assert hands("search", "caf") == "[2] latin.py:1:# caf\ufffd"
    assert hands("edit", "latin.py", "caf", "1", "Caf") == "ok\n1|# Caf\ufffd"
    assert box.read("latin.py") == b"# Caf\xe9\nx = 1\n"
    assert hands("edit", "latin.py", "\ufffd", "1", "e").startswith("error: OLD not found in line 1: # Caf\ufffd")


def test_binary_files(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "image.bin").write_bytes(b"clamp\0\xff")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    assert hands("read", "image.bin", "1") == "error: image.bin is not a text file (7 bytes)"
    assert hands("edit", "image.bin", "clamp", "1", "x") == "error: image.bin is not a text file (7 bytes)"
    assert "image.bin" not in hands("search", "clamp")


def test_file_names_that_are_not_utf8_can_be_shown(base: Path, tmp_path: Path, task: Task) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (base / name).write_text("x = 1\n")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    assert "[2] caf\ufffd.py" in hands("list")
    assert hands("read", "2", "1") == "1|x = 1"


def test_lone_surrogates_in_arguments_are_replaced(hands: Hands, sandbox: DirSandbox) -> None:
    assert hands("edit", "3", "<", "4", "\ud800") == "ok\n4|    if x \ufffd\ufffd\ufffd high:"
    sandbox.read("pkg/numbers.py").decode("utf-8")


CELLS = st.text("ab\n\r\té", max_size=12)


@given(CELLS, st.integers(1, 6), CELLS, CELLS)
@settings(max_examples=300, deadline=None)
def test_edit_is_exactly_a_replacement(text: str, line: int, old: str, new: str) -> None:
    """Against a plain model of the rule: the first occurrence in the nearest line, unless two lines are equally near.

    For text without carriage returns; with them, undo still restores every byte.
    """
    files = {"f": text.encode()}

    class Memory(DirSandbox):
        def __init__(self) -> None:
            self.reads = 0

        def list_files(self) -> list[str]:
            return ["f"]

        def read(self, path: str) -> bytes:
            return files[path]

        def write(self, path: str, content: bytes | None) -> None:
            files[path] = content or b""

    hands = Hands(Memory(), make_task())
    seen = hands("edit", "f", old, str(line), new)
    if "\r" not in text + old + new and old and old != new:
        rows = text.split("\n")[: len(text.split("\n")) - text.endswith("\n") - (text == "")]
        begins = {at: text.count("\n", 0, at) + 1 for at in range(len(text)) if text.startswith(old, at)}
        least = min((abs(row - line) for row in begins.values() if row <= len(rows)), default=EDIT_REACH + 1)
        found = [at for at, row in begins.items() if abs(row - line) == least and row <= len(rows)]
        applies = len({begins[at] for at in found}) == 1 and line <= len(rows) and least <= EDIT_REACH
        assert seen.startswith("ok") == applies
        if applies:
            assert files["f"].decode() == text[: found[0]] + new + text[found[0] + len(old) :]
    if seen.startswith("ok"):
        assert hands("undo").startswith("ok")
    assert files["f"] == text.encode()


# ---------------------------------------------------------------------------------------------------------------- caching


def test_a_second_episode_searches_without_reading_again(base: Path, tmp_path: Path, task: Task) -> None:
    cache = TreeCache()
    boxes = [DirSandbox(base, tmp_path / f"box{n}") for n in range(2)]
    first, second = (Hands(box, task, cache) for box in boxes)
    first("edit", "3", "x < high", "4", "x > high")
    assert first("search", "high:") == "[3] pkg/numbers.py:4:    if x > high:"
    assert second("search", "high:") == "[3] pkg/numbers.py:4:    if x < high:"  # edits of another episode are not seen
    reads = boxes[1].reads
    second("search", "clamp")
    assert boxes[1].reads == reads
    third = DirSandbox(base, tmp_path / "box2")
    Hands(third, task, cache)("search", "clamp")
    assert third.reads == 0


def test_cache_forgets_the_oldest_tree(base: Path, tmp_path: Path) -> None:
    cache = TreeCache(max_chars=300)
    box = DirSandbox(base, tmp_path / "box")
    for name in ("one", "two", "one", "three"):
        Workspace(box, name, cache).search("clamp", 8)
    Workspace(box, "four", cache)
    reads = box.reads
    Workspace(box, "three", cache).search("clamp", 8)
    assert box.reads > reads  # "three" alone is larger than the bound, so it went when "four" came
