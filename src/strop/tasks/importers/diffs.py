"""Unified diffs as text: turned around, and made of the parsed commits that R2E-Gym publishes. Nothing is applied here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from strop.core.errors import TaskError

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_PAIRS = (
    ("new file mode ", "deleted file mode "),
    ("old mode ", "new mode "),
    ("rename from ", "rename to "),
    ("copy from ", "copy to "),
)


def reverse(diff: str) -> str:
    """Return the diff that undoes ``diff``: what it adds is removed, and the other way round.

    A SWE-smith row holds the diff that creates the bug; its solution is this.

    Raises:
        TaskError: It has a binary part, a copy (which has no reverse), or isn't a unified diff.
    """
    if not diff.strip():
        raise TaskError("an empty diff can't be turned around")
    out: list[str] = []
    lines = _split(diff)
    for section in _sections(lines):
        _reverse_section(section, out)
    return "".join(out)


def _split(diff: str) -> list[str]:
    # Only "\n" ends a line of a diff; splitlines would also end it at form feeds and the like within the text.
    return [line + "\n" for line in diff.split("\n")[:-1]] + ([diff.rsplit("\n", 1)[-1]] if not diff.endswith("\n") else [])


def _sections(lines: list[str]) -> Iterator[list[str]]:
    """Split into the parts of one file each; text before the first file is no part of it."""
    starts = [number for number, line in enumerate(lines) if line.startswith("diff --git ")] or [
        number for number, line in enumerate(lines) if line.startswith("--- ") and lines[number + 1 : number + 2][:1] != []
    ][:1]
    if not starts:
        raise TaskError("no file in the diff: it has neither 'diff --git' nor '---' lines")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start:end]


def _reverse_section(lines: list[str], out: list[str]) -> None:
    number = 0
    header: list[str] = []
    while number < len(lines) and not lines[number].startswith("@@ "):
        line = lines[number]
        if line.startswith(("GIT binary patch", "Binary files ")):
            raise TaskError("a binary part of the diff can't be turned around")
        header.append(line)
        number += 1
    out += _reverse_header(header)
    while number < len(lines):
        number = _reverse_hunk(lines, number, out)


def _reverse_header(header: list[str]) -> list[str]:
    done, index = [], 0
    while index < len(header):
        line = header[index]
        following = header[index + 1] if index + 1 < len(header) else ""
        if line.startswith("diff --git "):
            done.append(_swap_names(line))
        elif line.startswith("copy "):
            raise TaskError("a copy in the diff can't be turned around")
        elif line.startswith("index "):
            done.append(re.sub(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", r"index \2..\1", line))
        elif line.startswith("--- ") and following.startswith("+++ "):
            done += [_side("--- ", following[4:]), _side("+++ ", line[4:])]
            index += 1
        elif (pair := next(((a, b) for a, b in _PAIRS if line.startswith(a)), None)) and following.startswith(pair[1]):
            done += [pair[0] + following[len(pair[1]) :], pair[1] + line[len(pair[0]) :]]
            index += 1
        elif line.startswith("new file mode "):
            done.append("deleted file mode " + line[len("new file mode ") :])
        elif line.startswith("deleted file mode "):
            done.append("new file mode " + line[len("deleted file mode ") :])
        else:
            done.append(line)
        index += 1
    return done


def _side(mark: str, name: str) -> str:
    """A ``---`` or ``+++`` line for the name that stood on the other side: its prefix changes with it."""
    quote = '"' if name.startswith('"') else ""
    bare = name[len(quote) :]
    if bare.startswith(("a/", "b/")):
        bare = ("a/" if mark == "--- " else "b/") + bare[2:]
    return mark + quote + bare


def _swap_names(line: str) -> str:
    """Swap the names of ``diff --git a/OLD b/NEW`` where they differ (a renaming)."""
    body = line[len("diff --git ") :].rstrip("\n")
    middle = len(body) // 2
    if body[middle : middle + 1] == " " and body[2:middle] == body[middle + 3 :]:
        return line
    match = re.fullmatch(r'("?)a/(.+?)("?) ("?)b/(.+?)("?)', body)
    if match is None:
        return line
    open_old, old, close_old, open_new, new, close_new = match.groups()
    end = "\n" if line.endswith("\n") else ""
    return f"diff --git {open_new}a/{new}{close_new} {open_old}b/{old}{close_old}{end}"


def _count(span: str) -> int:
    _, _, count = span.partition(",")
    return int(count) if count else 1


def _reverse_hunk(lines: list[str], number: int, out: list[str]) -> int:
    match = _HUNK.fullmatch(lines[number])
    if match is None:
        raise TaskError(f"line {number + 1} of a file's diff is {lines[number][:60]!r}, expected '@@ -l,n +l,n @@'")
    old, new, rest = match.groups()
    out.append(f"@@ -{new} +{old} @@{rest}")
    left, right = _count(old), _count(new)
    removed: list[str] = []
    added: list[str] = []
    number += 1
    while number < len(lines):
        line = lines[number]
        if line.startswith("\\"):
            (added if lines[number - 1].startswith("-") else removed if lines[number - 1].startswith("+") else out).append(line)
        elif left + right == 0:
            break
        elif line.startswith("-"):
            if removed:  # a block of additions ended: its lines go before the next block's
                _flush(out, removed, added)
            added.append("+" + line[1:])
            left -= 1
        elif line.startswith("+"):
            removed.append("-" + line[1:])
            right -= 1
        elif line.startswith(" ") or line in ("\n", ""):
            _flush(out, removed, added)
            out.append(line)
            left, right = left - 1, right - 1
        else:
            raise TaskError(f"a hunk of the diff has the line {line[:60]!r}, expected one that begins with ' ', '+', '-' or '\\'")
        number += 1
    _flush(out, removed, added)
    if left or right:
        raise TaskError(f"a hunk of the diff says -{old} +{new}, which its lines don't add up to")
    while number < len(lines) and not lines[number].startswith("@@ "):
        if lines[number].strip():
            raise TaskError(f"the diff has the line {lines[number][:60]!r} after the end of a hunk")
        number += 1
    return number


def _flush(out: list[str], removed: list[str], added: list[str]) -> None:
    out += removed
    out += added
    removed.clear()
    added.clear()


def files_of(diff: str) -> tuple[str, ...]:
    """Return the paths that a diff changes, sorted; of a renaming both."""
    found = set()
    for line in _split(diff):
        if match := re.fullmatch(r'(?:---|\+\+\+) "?[ab]/(.+?)"?(?:\t.*)?\n?', line):
            found.add(match[1])
    return tuple(sorted(found))


def patch_of_commit(commit: Mapping[str, Any], *, tests: bool, where: str) -> str:
    """Return the diff of a commit as R2E-Gym publishes it (``parsed_commit_content``).

    Args:
        commit: Its JSON data.
        tests: The part that changes tests, or the other part.
        where: What messages call it.

    Raises:
        TaskError: It lacks a part.
    """
    try:
        return "".join(_file_diff(entry) for entry in commit["file_diffs"] if _is_test(entry["header"]["file"]["path"]) == tests)
    except (KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{where} is no parsed commit: {type(error).__name__}: {error}") from None


def _is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith("test_") or path.endswith("_test.py") or bool({"tests", "Tests", "test", "Test"} & set(folders))


def _file_diff(entry: Mapping[str, Any]) -> str:
    header = entry["header"]
    path = header["file"]["path"]
    lines = [f"diff --git a/{path} b/{path}"]
    if header.get("misc_line"):
        lines.append(header["misc_line"])
    if index := entry.get("index_line"):
        mode = f" {index['mode']}" if index.get("mode") else ""
        lines.append(f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}")
    if entry.get("is_binary_file"):
        lines.append(entry.get("binary_line") or "")
    if entry.get("minus_file") and entry.get("plus_file"):
        lines += [f"--- {entry['minus_file']['path']}", f"+++ {entry['plus_file']['path']}"]
    marks = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
    for hunk in entry.get("hunks") or []:
        spans = [hunk["descriptor"][side] for side in ("old_range", "new_range")]
        old, new = (f"{span['start']}" if span.get("length") is None else f"{span['start']},{span['length']}" for span in spans)
        section = hunk["descriptor"].get("section")
        lines.append(f"@@ -{old} +{new} @@{f' {section}' if section else ''}")
        lines += [marks[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"
