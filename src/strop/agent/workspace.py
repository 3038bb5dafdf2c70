"""The files of one sandbox as text: listing, lines, fixed-text search and exact replacement.

The listing is taken once, when the episode begins, so that a file keeps its number. Text that only the base tree can have is shared
between the episodes of a task through a ``TreeCache``; anything an edit or a command may have touched is read from the box again.
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from strop.agent.toolspec import ToolError, echo
from strop.ports import Sandbox

MAX_FILE_BYTES = 2_000_000
MAX_COUNTED = 99
EDIT_REACH = 8
"""How many lines an edit's line number may be off, in either direction."""
MAX_NAMES = 10_000
"""Names that are compared at most: an agent may write a file of nothing else."""
NEAR_NAME = 0.55
"""Similarity (``difflib``'s ratio) from which on a name is worth offering in place of another."""
_NAME = re.compile(r"\w+")
_DEFINITION = re.compile(r"^[ \t]*(?:\w+ )*(?:def|class|func|function|fn|struct|interface|trait|type) (\w+)", re.MULTILINE)
_HIDDEN_PARTS = ("__pycache__", ".git", ".venv")


def decode(content: bytes) -> str | None:
    """Return ``content`` as text that encodes back to the same bytes, or ``None`` for a binary file.

    Bytes that are not UTF-8 become lone surrogates (PEP 383); ``display`` makes them printable.
    """
    if b"\0" in content[:8192] or len(content) > MAX_FILE_BYTES:
        return None
    return content.decode("utf-8", "surrogateescape")


def display(text: str) -> str:
    """Return ``text`` with every byte that isn't UTF-8 shown as U+FFFD, so that a tokenizer can encode it."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _has_word(line: str, pattern: str) -> bool:
    """Whether ``pattern`` stands in ``line`` with no letter, digit or underscore continuing it on either side."""
    before = r"(?<!\w)" if re.match(r"\w", pattern) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", pattern) else ""
    return re.search(f"{before}{re.escape(pattern)}{after}", line) is not None


@dataclass(slots=True)
class _Tree:
    files: list[str]
    texts: dict[str, str | None] = field(default_factory=dict)
    size: int = 0


class TreeCache:
    """Listings and texts of base trees, shared by the episodes that start from them.

    Args:
        max_chars: Trees are forgotten, least recently used first, when all texts together are longer.
    """

    def __init__(self, max_chars: int = 64_000_000) -> None:
        self._max_chars = max_chars
        self._trees: OrderedDict[str, _Tree] = OrderedDict()

    def tree(self, base: str, sandbox: Sandbox) -> _Tree:
        """Return the tree of ``base``; ``sandbox`` is a fresh box over it, asked on first use."""
        tree = self._trees.get(base)
        if tree is None:
            files = [path for path in sandbox.list_files() if not any(part in _HIDDEN_PARTS for part in path.split("/"))]
            tree = self._trees[base] = _Tree(files)
        self._trees.move_to_end(base)
        while len(self._trees) > 1 and sum(t.size for t in self._trees.values()) > self._max_chars:
            self._trees.popitem(last=False)
        return tree


@dataclass(frozen=True, slots=True)
class Hit:
    """One matching line: number in the listing, path, line number from 1, the line."""

    index: int
    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Replacement:
    """What an edit did: file, its content, and the changed lines ``[line, line + count)``, each before and after."""

    path: str
    before: bytes
    after: bytes
    line: int
    count_before: int
    count_after: int


class Workspace:
    """The text view of one box.

    Args:
        sandbox: A box that nothing has run in yet.
        base: Names the base tree in ``cache``.
        cache: Shared texts.
    """

    def __init__(self, sandbox: Sandbox, base: str, cache: TreeCache) -> None:
        self._sandbox = sandbox
        self._tree = cache.tree(base, sandbox)
        self._changed: set[str] = set()
        self._may_have_changed = False

    @property
    def files(self) -> list[str]:
        """Sorted paths as they were when the episode began."""
        return self._tree.files

    def command_ran(self) -> None:
        """Note that a command ran in the box and may have written to any file."""
        self._may_have_changed = True

    def resolve(self, file: str) -> str:
        """Return the path that ``file`` names: a number in the listing, a path, or an absolute path that ends in one.

        Raises:
            ToolError: There is no such file.
        """
        name = file.strip()
        files = self.files
        if name.isascii() and name.isdigit():
            if len(name) <= 9 and 1 <= int(name) <= len(files):
                return files[int(name) - 1]
            raise ToolError(f"no file {echo(name)}. Files are numbered 1 to {len(files)}")
        name = name.removeprefix("./")
        if name in files:
            return name
        if name.startswith("/"):  # tracebacks print absolute paths
            inside = [path for path in files if name.endswith("/" + path)]
            if inside:
                return max(inside, key=len)
        raise ToolError(f"no file {echo(file)}.{self._nearest_file(name)}")

    def _nearest_file(self, name: str) -> str:
        base = name.rsplit("/", 1)[-1]
        same = [path for path in self.files if path.rsplit("/", 1)[-1] == base]
        close = same or difflib.get_close_matches(name[-120:], self.files[:500], n=1, cutoff=0.6)
        return f" Did you mean {display(close[0])}?" if close else ""

    def lines(self, path: str) -> list[str]:
        """Return the lines of a text file without their ends.

        Raises:
            ToolError: The file is binary, too large, or a command removed it.
        """
        return text_lines(self._text(path)[0])

    def _text(self, path: str) -> tuple[bytes, str]:
        try:
            content = self._sandbox.read(path)
        except OSError as error:
            raise ToolError(f"cannot read {display(path)}: {error.strerror or type(error).__name__}") from None
        text = decode(content)
        if text is None:
            raise ToolError(f"{display(path)} is not a text file ({len(content)} bytes)")
        return content, text

    def search(self, pattern: str, limit: int) -> tuple[list[Hit], int]:
        """Find a fixed text.

        Args:
            pattern: Not empty; may span lines (``"\\n"``).
            limit: At most so many hits.

        Returns:
            The first hits, whole words before parts of words (``nth`` before ``nth_or_last``), each in the order of the listing and at
            most one a line; and the number of further lines. Looking stops in the file in which that number goes over ``MAX_COUNTED``:
            a frequent text would cost more to count than to find.
        """
        words: list[Hit] = []
        parts: list[Hit] = []
        seen = 0
        for index, path, text in self._texts():
            at = text.find(pattern)
            line, counted = 1, 0
            while at >= 0 and seen <= limit + MAX_COUNTED:
                seen += 1
                start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
                end = len(text) if end < 0 else end
                found = words if _has_word(text[start : max(end, at + len(pattern))], pattern) else parts
                if len(found) < limit:
                    line += text.count("\n", counted, at)
                    counted = at
                    found.append(Hit(index, path, line, text[start:end].rstrip("\r")))
                at = text.find(pattern, max(end, at + 1))
        hits = [*words, *parts][:limit]
        return hits, seen - len(hits)

    def definitions_like(self, pattern: str, limit: int) -> list[Hit]:
        """Return the definitions whose names are nearest to the longest name in ``pattern``, nearest first.

        Args:
            pattern: What was searched for.
            limit: At most so many names; of each the first definition.
        """
        wanted = max(_NAME.findall(pattern), key=len, default="")
        if not wanted:
            return []
        places: dict[str, tuple[int, str, str, int]] = {}
        for index, path, text in self._texts():
            for found in _DEFINITION.finditer(text):
                if len(places) < MAX_NAMES:
                    places.setdefault(found[1], (index, path, text, found.start(1)))
        hits = []
        for name in difflib.get_close_matches(wanted, places, n=limit, cutoff=NEAR_NAME):
            index, path, text, at = places[name]
            start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
            hits.append(Hit(index, path, text.count("\n", 0, at) + 1, text[start : len(text) if end < 0 else end].rstrip("\r")))
        return hits

    def _texts(self) -> Iterator[tuple[int, str, str]]:
        if self._may_have_changed:
            self._changed.update(self._sandbox.changes())
            self._may_have_changed = False
        tree = self._tree
        for index, path in enumerate(tree.files, 1):
            if path in self._changed:
                text = self._read_or_none(path)
            elif path in tree.texts:
                text = tree.texts[path]
            else:
                text = tree.texts[path] = self._read_or_none(path)
                tree.size += len(text or "")
            if text:
                yield index, path, text

    def _read_or_none(self, path: str) -> str | None:
        try:
            text = decode(self._sandbox.read(path))
        except OSError:
            return None
        return None if text is None else text.replace("\r\n", "\n")

    def replace(self, path: str, line: int, old: str, new: str) -> Replacement:
        """Replace ``old``, which begins in ``line`` or near it, by ``new``.

        A line number that is a little off is put right: where ``line`` doesn't have ``old``, the nearest line within ``EDIT_REACH``
        that has it is taken. Of several occurrences in a line the first is replaced.

        Line ends are kept: a file with ``"\\r\\n"`` is matched as if it had ``"\\n"`` and written back with its own.

        Raises:
            ToolError: Line out of range, ``old`` not found near it or equally near on both sides, or the file can't be written.
        """
        content, text = self._text(path)
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
        lines, ends = _split(text)
        asked = check_line(path, _visible(lines), line) - 1
        view = "\n".join(lines)
        row, at = _locate(view, _visible(lines), asked, old)
        view = view[:at] + new + view[at + len(old) :]
        after = _join(view, ends, row, old.count("\n"), new.count("\n"))
        self._write(path, after)
        return Replacement(path, content, after, row + 1, old.count("\n") + 1, new.count("\n") + 1)

    def restore(self, path: str, content: bytes) -> None:
        """Put back the content that ``replace`` found.

        Raises:
            ToolError: The file can't be written.
        """
        self._write(path, content)

    def _write(self, path: str, content: bytes) -> None:
        try:
            self._sandbox.write(path, content)
        except OSError as error:
            raise ToolError(f"cannot write {display(path)}: {error.strerror or type(error).__name__}") from None
        self._changed.add(path)


def check_line(path: str, lines: list[str], line: int) -> int:
    """Return ``line`` if the file has it.

    Raises:
        ToolError: It is out of range.
    """
    if not 1 <= line <= len(lines):
        count = len(lines)
        raise ToolError(f"no line {line}: {display(path)} has {count} line{'' if count == 1 else 's'}")
    return line


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return lines without ends, and their ends: ``"\\n"`` or ``"\\r\\n"``, and ``""`` for the last (empty if the text ends in one)."""
    lines = text.split("\n")
    ends = ["\n"] * (len(lines) - 1) + [""]
    if "\r\n" in text:
        for row, item in enumerate(lines[:-1]):
            if item.endswith("\r"):
                lines[row], ends[row] = item[:-1], "\r\n"
    return lines, ends


def text_lines(content: bytes) -> list[str]:
    """Return the lines of a text file's content without their ends."""
    return _visible(_split(content.decode("utf-8", "surrogateescape"))[0])


def _visible(lines: list[str]) -> list[str]:
    return lines[:-1] if lines[-1] == "" else lines


def _occurrences(view: str, old: str, first: int, last: int) -> list[int]:
    """Return every position in ``[first, last]`` where ``old`` begins (``last`` is the line's end character)."""
    found: list[int] = []
    at = view.find(old, first)
    while first <= at <= last:
        found.append(at)
        at = view.find(old, at + 1)
    return found


def _locate(view: str, lines: list[str], asked: int, old: str) -> tuple[int, int]:
    """Return the row nearest to ``asked`` in which ``old`` begins, and where it first does in ``view``, the lines joined.

    Raises:
        ToolError: ``old`` isn't near, or equally near above and below.
    """
    starts = list(accumulate((len(item) + 1 for item in lines), initial=0))
    for distance in range(EDIT_REACH + 1):
        rows = [row for row in dict.fromkeys((asked - distance, asked + distance)) if 0 <= row < len(lines)]
        found = {row: at for row in rows if 0 <= (at := view.find(old, starts[row])) <= starts[row] + len(lines[row])}
        if len(found) == 2:
            raise ToolError(f"OLD is not in line {asked + 1}, and equally near in lines {' and '.join(str(row + 1) for row in found)}")
        for row, first in found.items():
            return row, first
    anywhere = [view.count("\n", 0, at) for at in _occurrences(view, old, 0, len(view))[:100]]
    hint = f"\nOLD is in line {min(anywhere, key=lambda row: abs(row - asked)) + 1}" if anywhere else ""
    raise ToolError(f"OLD not found in {_shown(lines, asked)}{hint}")


def _shown(lines: list[str], row: int) -> str:
    text = display(lines[row])
    return f"line {row + 1}: {text if len(text) <= 120 else text[:120] + '...'}"


def _join(view: str, ends: list[str], row: int, removed: int, added: int) -> bytes:
    """Write ``view`` with the line ends of the file; new lines take the end of the line that was edited."""
    if "\r\n" in ends:
        own = ends[row] or ends[0]
        kept = [*ends[:row], *[own] * added, *ends[row + removed :]]
        view = "".join(line + end for line, end in zip(view.split("\n"), kept, strict=True))
    return view.encode("utf-8", "surrogateescape")
