"""The text that must not be found: windows of the solution that the workspace's own sources don't show, compared without layout."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIN_CHARS = 48
MAX_WINDOWS = 24
_CONTEXT = 6
MIN_SHARE = 0.5
MIN_LINE = 12


@dataclass(frozen=True, slots=True)
class Needle:
    """What a change of one file would look like anywhere else.

    Attributes:
        path: The file.
        windows: Runs of consecutive lines of the solution, each with at least one that the workspace's file lacks; normalised.
    """

    path: str
    windows: tuple[str, ...]

    def is_in(self, text: str) -> bool:
        """Whether a normalised text holds at least half of the windows."""
        found = sum(window in text for window in self.windows)
        return bool(self.windows) and found >= max(1, MIN_SHARE * len(self.windows))


def normalise_lines(text: str) -> list[str]:
    """Lines without outer blanks, empty ones left out."""
    return [line for line in (" ".join(row.split()) for row in text.splitlines()) if line]


def normalise(text: str) -> str:
    """Return a text as needles are searched in it: between line ends, so that a window matches whole lines only."""
    return "\n" + "\n".join(normalise_lines(text)) + "\n"


def needles_of(workspace: Mapping[str, bytes | None], gold: Mapping[str, bytes | None]) -> list[Needle]:
    """Return a needle for each file that the solution changes.

    Args:
        workspace: Content of these files as the agent finds them.
        gold: Content of these files in the solution.
    """
    found = []
    for path, data in sorted(gold.items()):
        if data is None:
            continue
        before = normalise_lines((workspace.get(path) or b"").decode("utf-8", "replace"))
        after = normalise_lines(data.decode("utf-8", "replace"))
        windows = _windows(before, after)
        if windows:
            found.append(Needle(path, tuple(windows)))
    return found


def _windows(before: list[str], after: list[str]) -> list[str]:
    known = "\n" + "\n".join(before) + "\n"
    windows: list[str] = []
    for tag, _, _, start, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        # What only goes away shows in the solution as its two neighbours standing together.
        spots = range(start, end, 3) if end > start else [start]
        for spot in spots:
            window = _window(after, spot, min(spot + 3, end))
            if window and window not in known:
                windows.append(window)
    step = -(-len(windows) // MAX_WINDOWS) if windows else 1
    return list(dict.fromkeys(windows))[::step]


def _window(lines: list[str], start: int, end: int) -> str:
    """Lines ``[start, end)`` with as many around them as make the text telling."""
    first, last = max(0, start - 1), min(len(lines), max(end, start) + 1)
    for _ in range(_CONTEXT):
        if sum(map(len, lines[first:last])) >= MIN_CHARS:
            break
        first, last = max(0, first - 1), min(len(lines), last + 1)
    text = "\n" + "\n".join(lines[first:last]) + "\n"
    return text if len(text) >= MIN_CHARS // 2 else ""


def solution_lines(before: bytes, after: bytes) -> list[str]:
    """Lines of code that the solution adds to a file and that give it away: no signatures, comments, documentation or short lines."""
    told = _told_lines(after)
    old = set(normalise_lines(before.decode("utf-8", "replace")))
    rows = after.decode("utf-8", "replace").splitlines()
    found = []
    for number, row in enumerate(rows, 1):
        line = " ".join(row.split())
        if (
            number not in told
            and len(line) >= MIN_LINE
            and line not in old
            and not line.startswith(("#", "@", "def ", "class ", "async def "))
        ):
            found.append(line)
    return found


def _told_lines(source: bytes) -> set[int]:
    """Numbers of lines that an instruction may show: documentation, and signatures over several lines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    told: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.body:
            told.update(range(node.lineno, node.body[0].lineno))
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                told.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return told


def leak_in_text(text: str, pairs: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the first line of a solution that a text (an instruction) holds, ``""`` if it holds none."""
    flat = " ".join(text.split())
    for before, after in pairs:
        for line in solution_lines(before, after):
            if line in flat:
                return line
    return ""
