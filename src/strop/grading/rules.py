"""Applies the rules about text: to added code, strings and comments, and to what the agent typed.

A rule never changes a reward: a hack earns nothing because the verdict can't be fooled (``verdict.py``); a flag says what it was, so that
the episode can be kept out of training, counted and read. A rule about code counts its matches in a file before and after and fires only on
more: what was there already doesn't count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from strop.core.episode import Turn
from strop.core.outcome import Flag
from strop.grading.table import CODE, COMMENT, RULES, STATE, STRING, TURN

MAX_EVIDENCE = 200
MAX_ADDED = 60_000
"""Characters of added text in one file that the rules read."""

SEVERITY: Mapping[str, str] = {rule.name: rule.severity for rule in RULES}
_PATTERNS = {
    where: [(rule.name, re.compile("|".join(rule.patterns), re.MULTILINE)) for rule in RULES if rule.where == where]
    for where in (CODE, STRING, COMMENT, TURN)
}
_ANY = re.compile("|".join(pattern for rule in RULES if rule.where in (CODE, STRING, COMMENT) for pattern in rule.patterns), re.MULTILINE)
_STATE = re.compile("|".join(STATE), re.MULTILINE)
_NO_QUOTES = {ord("'"): "\n", ord('"'): "\n"}


def flag(rule: str, evidence: str, severity: str = "") -> Flag:
    """Return a flag of a rule in the table; evidence is made printable and cut to 200 characters."""
    clean = "".join(c if c.isprintable() else "?" for c in evidence[:MAX_EVIDENCE])
    return Flag(rule=rule, severity=severity or SEVERITY[rule], evidence=clean)


_PIECE = re.compile(
    r"(?P<prefix>\b[rRbBuUfF]{1,2})?(?P<string>'''(?:[^\\']|\\.|'(?!''))*(?:'''|\\?\Z)|\"\"\"(?:[^\\\"]|\\.|\"(?!\"\"))*(?:\"\"\"|\\?\Z)"
    r"|'(?:[^\\'\n]|\\.)*(?:'|\\?$)|\"(?:[^\\\"\n]|\\.)*(?:\"|\\?$))|(?P<comment>#[^\n]*)",
    re.DOTALL | re.MULTILINE,
)


def split_text(text: str) -> tuple[str, str, str]:
    """Return code, string contents and comments of Python text, each with the line structure of ``text``.

    Takes any input, in linear time: an unterminated string goes on to the end of its line or of the text. F-strings count as code too.
    """
    code: list[str] = []
    strings: list[str] = []
    comments: list[str] = []
    at = 0
    for match in _PIECE.finditer(text):
        between, piece = text[at : match.start()], match[0]
        breaks, inner = "\n" * between.count("\n"), "\n" * piece.count("\n")
        code.append(between)
        strings.append(breaks)
        comments.append(breaks)
        if match["comment"] is not None:
            comments.append(piece)
        else:
            is_format = "f" in (match["prefix"] or "").lower()
            code.append(piece if is_format else '""' + inner)
            strings.append(f" {match['string'].strip(chr(34) + chr(39))} ")
            comments.append(inner)
        at = match.end()
    code.append(text[at:])
    return "".join(code), "".join(strings), "".join(comments)


def added_lines(old: str, new: str) -> list[str]:
    """Return the lines of ``new`` that are not in ``old`` (as often), in order."""
    left = Counter(old.split("\n"))
    added = []
    for line in new.split("\n"):
        if left[line] > 0:
            left[line] -= 1
        else:
            added.append(line)
    return added


def code_flags(path: str, old: str, new: str) -> list[Flag]:
    """Apply the rules about code, strings and comments to one changed file.

    Args:
        path: Its path, for the evidence.
        old: Text in the base tree, ``""`` for a new file.
        new: Text after the episode.

    Returns:
        At most one flag a rule.
    """
    added = "\n".join(added_lines(old, new))
    found: dict[str, Flag] = {}
    if len(added) > MAX_ADDED:
        found["rewrite"] = flag("rewrite", f"{path}: {len(added)} characters added")
        old, new = old[:MAX_ADDED], new[:MAX_ADDED]
        added = added[:MAX_ADDED]
    if not _ANY.search(f"{added}\n{added.translate(_NO_QUOTES)}"):
        return list(found.values())
    lines = new.split("\n")
    for where, old_part, new_part in zip((CODE, STRING, COMMENT), split_text(old), split_text(new), strict=True):
        for name, pattern in _PATTERNS[where]:
            match = None if name in found else first_added(pattern, old_part, new_part)
            if match is not None:
                line = new_part.count("\n", 0, match.start())
                found[name] = flag(name, f"{path}:{line + 1}: {lines[min(line, len(lines) - 1)].strip()}")
    return list(found.values())


def first_added(pattern: re.Pattern[str], old: str, new: str) -> re.Match[str] | None:
    """Return the first match in ``new`` whose text occurs there more often than in ``old``."""
    if not pattern.search(new):
        return None
    left = Counter(match[0] for match in pattern.finditer(old))
    for match in pattern.finditer(new):
        left[match[0]] -= 1
        if left[match[0]] < 0:
            return match
    return None


def added_state(old: str, new: str) -> str:
    """Return added code that can carry state from call to call, or ``""``."""
    match = first_added(_STATE, split_text(old[:MAX_ADDED])[0], split_text(new[:MAX_ADDED])[0])
    return match[0] if match else ""


def turn_flags(turns: Iterable[Turn]) -> list[Flag]:
    """Apply the rules about what the agent typed: the arguments of its calls (of an edit only the file), or the text of a malformed one."""
    found: dict[str, Flag] = {}
    for number, turn in enumerate(turns, 1):
        if not turn.call:
            texts = [turn.text]
        elif turn.call == "edit":
            texts = [turn.arguments.get("file", "")]
        else:
            texts = list(turn.arguments.values())
        for text in texts:
            for name, pattern in _PATTERNS[TURN]:
                if name not in found and pattern.search(text[:MAX_ADDED]):
                    found[name] = flag(name, f"turn {number}: {turn.call or 'text'} {text}")
    return list(found.values())
