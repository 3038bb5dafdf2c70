"""Edits of one function: all of them in a fixed order, how to apply one, and how to undo it.

An ``Edit`` is exactly a call of the agent's ``edit`` tool. The same line change always gets the same ``(line, old, new)``, so the repair of
a mutant is found among the candidates of the mutant: ``inverse(source, e) in candidate_edits(apply_edit(source, e), function)``.
Sources have ``\\n`` line ends. Pure functions; called by the task factory, the scripted expert, the baselines and base pre-training.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection
from dataclasses import dataclass

from strop.core.errors import TaskError
from strop.tasks.catalogue import DEFAULT_KINDS, IDENTIFIER_KINDS, TOKEN_KINDS, token_ranges, tree_ranges
from strop.tasks.lexer import lex
from strop.tasks.spans import FunctionSpan, find_functions, normalised_digest

__all__ = [
    "DEFAULT_KINDS",
    "IDENTIFIER_KINDS",
    "TOKEN_KINDS",
    "Edit",
    "FunctionSpan",
    "apply_edit",
    "candidate_edits",
    "find_functions",
    "inverse",
    "normalised_digest",
]


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of one line, for example ``Edit("comparison", 214, "<", "<=")``.

    Attributes:
        kind: Kind from the catalogue; an edit and its inverse have the same.
        line: 1-based line.
        old: Text that occurs exactly once in that line; begins and ends at token boundaries, and is never empty.
        new: Its replacement.
    """

    kind: str
    line: int
    old: str
    new: str


def apply_edit(source: str, edit: Edit) -> str:
    """Return ``source`` after ``edit``.

    Raises:
        TaskError: The line doesn't exist, or ``old`` doesn't occur exactly once beginning in it.
    """
    start, end = _line_bounds(source, edit.line)
    at = source.find(edit.old, start)
    if not edit.old or at < 0 or at > end:
        raise TaskError(f"edit of line {edit.line}: {edit.old!r} isn't in {source[start:end]!r}")
    again = source.find(edit.old, at + 1)
    if 0 <= again <= end:
        raise TaskError(f"edit of line {edit.line}: {edit.old!r} occurs more than once in {source[start:end]!r}")
    return source[:at] + edit.new + source[at + len(edit.old) :]


def inverse(source: str, edit: Edit) -> Edit:
    """Return the edit that turns ``apply_edit(source, edit)`` back into ``source``.

    Args:
        source: The source before the edit.
        edit: A single-line edit of it, from ``candidate_edits``.

    Raises:
        TaskError: The edit doesn't apply, or changes nothing within a line of tokens.
    """
    start, end = _line_bounds(source, edit.line)
    before = source[start:end]
    mutant = apply_edit(source, edit)
    after = mutant[start : end + len(edit.new) - len(edit.old)]
    undo = _express(_boundaries(after), after, _boundaries(before), before)
    if undo is None:
        raise TaskError(f"edit of line {edit.line}: {edit.old!r} -> {edit.new!r} has no inverse within the line")
    return Edit(edit.kind, edit.line, *undo)


def candidate_edits(source: str, function: FunctionSpan, kinds: Collection[str] = DEFAULT_KINDS) -> list[Edit]:
    """Return every edit that the catalogue offers in a function.

    The list is complete, without repetition, ordered by line and column, and depends on the function's text alone. Every edit leaves the
    module parseable. Names take part in ``variable`` edits with their neighbours in order of first binding.

    Args:
        source: Text of the module.
        function: Lines of the function, ``def`` first.
        kinds: Kinds to offer.

    Raises:
        TaskError: The span isn't a function that parses.
    """
    lines = _split(source)[function.start_line - 1 : function.end_line]
    text = "\n".join(lines)
    tokens, shared_lines = lex(text)
    ranges = list(token_ranges(tokens))
    if any(kind in kinds for kind in ("variable", "argument_swap", "return_value")):
        node, first_line = _parse(text, function)
        ranges.extend(tree_ranges(node, lines, first_line))
    by_line: dict[int, list[tuple[str, int, int]]] = {item.line: [] for item in ranges if item.line not in shared_lines}
    for token in tokens:
        if token.line in by_line and token.kind != "newline":
            by_line[token.line].append((token.text, token.start, token.end))
    indices = {number: ({t[1]: i for i, t in enumerate(row)}, {t[2]: i + 1 for i, t in enumerate(row)}) for number, row in by_line.items()}
    found: dict[tuple[int, str, str], tuple[int, int, Edit]] = {}
    for item in ranges:
        if item.kind not in kinds or item.line not in indices:
            continue
        starts, ends = indices[item.line]
        first, last = starts.get(item.start), ends.get(item.end)
        if first is None or last is None:
            continue
        row, line = by_line[item.line], lines[item.line]
        shift = len(item.new) - (item.end - item.start)
        middle = [(piece, a + item.start, b + item.start) for piece, a, b in _boundaries(item.new)]
        new_row = row[:first] + middle + [(piece, a + shift, b + shift) for piece, a, b in row[last:]]
        change = _express(row, line, new_row, line[: item.start] + item.new + line[item.end :], first)
        if change is not None:
            number = item.line + function.start_line
            found.setdefault((number, *change), (number, item.start, Edit(item.kind, number, *change)))
    return [edit for _, _, edit in sorted(found.values(), key=lambda entry: entry[:2])]


@functools.lru_cache(maxsize=8)
def _split(source: str) -> list[str]:
    """Lines of a module; its functions are asked for one after another."""
    return source.split("\n")


def _line_bounds(source: str, line: int) -> tuple[int, int]:
    """Offsets of 1-based ``line``, line end excluded."""
    start = 0
    for _ in range(line - 1):
        start = source.find("\n", start) + 1
        if not start:
            break
    if line < 1 or (line > 1 and not start):
        raise TaskError(f"edit of line {line}: the file has {source.count(chr(10)) + 1} lines")
    end = source.find("\n", start)
    return start, len(source) if end < 0 else end


_boundary_cache: dict[str, list[tuple[str, int, int]]] = {}


def _boundaries(line: str) -> list[tuple[str, int, int]]:
    """``(text, start, end)`` of the tokens of one line; short texts are remembered."""
    known = _boundary_cache.get(line)
    if known is None:
        known = [(token.text, token.start, token.end) for token in lex(line)[0] if token.kind != "newline"]
        if len(line) <= 16 and len(_boundary_cache) < 4096:
            _boundary_cache[line] = known
    return known


def _express(
    old_row: list[tuple[str, int, int]], old_line: str, new_row: list[tuple[str, int, int]], new_line: str, known_prefix: int = 0
) -> tuple[str, str] | None:
    """Return the canonical ``(old, new)`` that turns ``old_line`` into ``new_line``.

    It is the smallest run of tokens around the change (common prefix taken first) that is unique in ``old_line`` and not empty on either
    side; among equally small ones the rightmost (so that a removed word takes its operand with it).

    Args:
        old_row: Tokens of ``old_line``.
        old_line: The line before.
        new_row: Tokens of ``new_line``.
        new_line: The line after.
        known_prefix: Number of leading tokens known to be equal.
    """
    shorter = min(len(old_row), len(new_row))
    prefix = known_prefix
    while prefix < shorter and old_row[prefix][0] == new_row[prefix][0]:
        prefix += 1
    suffix = 0
    while suffix < shorter - prefix and old_row[-1 - suffix][0] == new_row[-1 - suffix][0]:
        suffix += 1
    for extra in range(prefix + suffix + 1):
        for left in range(min(extra, prefix) + 1):
            right = extra - left
            if right > suffix:
                continue
            first, old_last, new_last = prefix - left, len(old_row) - suffix + right, len(new_row) - suffix + right
            if first in (old_last, new_last):
                continue
            start, old_end = old_row[first][1], old_row[old_last - 1][2]
            old, new = old_line[start:old_end], new_line[new_row[first][1] : new_row[new_last - 1][2]]
            at = old_line.find(old)
            if at == start and old != new and old_line.find(old, at + 1) < 0 and old_line[:start] + new + old_line[old_end:] == new_line:
                return old, new
    return None


def _parse(text: str, function: FunctionSpan) -> tuple[ast.FunctionDef, int]:
    """Parse a function's own lines; returns the tree and the line number that it gives to the first of them."""
    is_indented = text[:1] in (" ", "\t")
    try:
        node = ast.parse(f"if 1:\n{text}" if is_indented else text).body[0]
    except (SyntaxError, ValueError, IndexError) as error:
        raise TaskError(f"lines {function.start_line}-{function.end_line} ({function.name}) don't parse: {error}") from None
    if is_indented and isinstance(node, ast.If):
        node = node.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise TaskError(f"lines {function.start_line}-{function.end_line} ({function.name}) aren't one function")
    return node, 2 if is_indented else 1
