"""Replacements of byte ranges: what every mutation comes down to, so that nothing around the change is touched."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from strop.core.errors import TaskError


@dataclass(frozen=True, slots=True, order=True)
class Splice:
    """Bytes ``[start, end)`` of a file become ``new``."""

    start: int
    end: int
    new: bytes


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file.

    Attributes:
        family: Name from ``FAMILIES``.
        path: The file.
        function: Dotted name of the function or class around it.
        first_line: First line of that function or class, decorators included.
        last_line: Its last line.
        line: Line of the change.
        splices: What changes, in order, without overlap.
    """

    family: str
    path: str
    function: str
    first_line: int
    last_line: int
    line: int
    splices: tuple[Splice, ...]

    @property
    def cluster(self) -> str:
        """Group of tasks that aren't independent: ``"boltons/strutils.py:cardinalize"``."""
        return f"{self.path}:{self.function}"


def apply_splices(source: bytes, splices: Iterable[Splice]) -> bytes:
    """Return ``source`` with every splice done.

    Raises:
        TaskError: Two overlap, or one lies outside.
    """
    pieces, at = [], 0
    for splice in sorted(splices):
        if not at <= splice.start <= splice.end <= len(source):
            raise TaskError(f"splice {splice.start}-{splice.end} overlaps another one or lies outside of {len(source)} bytes")
        pieces += [source[at : splice.start], splice.new]
        at = splice.end
    return b"".join([*pieces, source[at:]])


def is_real_change(before: bytes, after: bytes) -> bool:
    """Whether ``after`` is Python and differs from ``before`` in more than white space."""
    if b"".join(before.split()) == b"".join(after.split()):
        return False
    try:
        ast.parse(after)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def overlaps(first: Mutation, second: Mutation) -> bool:
    """Whether two mutations touch the same bytes of the same file."""
    if first.path != second.path:
        return False
    return any(a.start <= b.end and b.start <= a.end for a in first.splices for b in second.splices)
