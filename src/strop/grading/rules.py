"""Applies the rules about text: to added code, strings and comments, and to what the agent typed.

A rule doesn't change a reward: a hack earns nothing because the verdict can't be fooled (``verdict.py``); a flag says what it was, so that
the episode can be kept out of training, counted and read. The exceptions are ``RETRIEVAL``. A rule about code counts its matches in a file
before and after and fires only on more: what was there already doesn't count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from strop.core.episode import Turn
from strop.core.outcome import Flag
from strop.grading.table import CODE, COMMENT, COPIES, RULES, STANDARD_COPIES, STATE, STRING, TURN

MAX_EVIDENCE = 200
MAX_ADDED = 20_000
"""Characters of added text of one episode that the rules read; those of ``RETRIEVAL`` read all."""

RETRIEVAL = frozenset({"library_copy", "cache_reading"})
"""Rules that take the reward away: the interpreter may hold the unbroken original, and no test can tell a call to it from a repair."""

SEVERITY: Mapping[str, str] = {rule.name: rule.severity for rule in RULES}
_COMMON = frozenset({"import", "from", "def", "return", "lambda", "true", "not", "self"})


def _needles(patterns: Iterable[str]) -> tuple[str, ...]:
    """Words of which one stands in every match: plain substring search leaves out most rules long before an expression is tried."""
    words = {word.lower() for pattern in patterns for word in re.findall(r"[A-Za-z_]{2,}", re.sub(r"\\.|\(\?\w:|\w\?", " ", pattern))}
    return tuple(sorted(words - _COMMON))


@dataclass(frozen=True, slots=True)
class _Compiled:
    name: str
    pattern: re.Pattern[str]
    needles: tuple[str, ...]


def _compile(name: str, patterns: Sequence[str]) -> _Compiled:
    return _Compiled(name, re.compile("|".join(patterns), re.MULTILINE), _needles(patterns))


_RULES = {where: [_compile(rule.name, rule.patterns) for rule in RULES if rule.where == where] for where in (CODE, STRING, COMMENT, TURN)}
_STATE = re.compile("|".join(STATE), re.MULTILINE)
_COPIES = {False: re.compile("|".join(COPIES)), True: re.compile("|".join(STANDARD_COPIES))}
_CACHES = next(rule for rule in _RULES[STRING] if rule.name == "cache_reading")
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
    strings.append("\n" * text.count("\n", at))
    comments.append("\n" * text.count("\n", at))
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


@dataclass(frozen=True)
class TextChange:
    """One changed source file: its path, and its text before (``""`` for a new file) and after."""

    path: str
    old: str
    new: str

    @cached_property
    def added(self) -> str:
        """Lines that are new."""
        return "\n".join(added_lines(self.old, self.new))

    @cached_property
    def removed(self) -> str:
        """Lines that are gone."""
        return "\n".join(added_lines(self.new, self.old))

    @cached_property
    def parts(self) -> dict[str, tuple[str, str]]:
        """Code, strings and comments before and after."""
        return dict(zip((CODE, STRING, COMMENT), zip(split_text(self.old), split_text(self.new), strict=True), strict=True))


def text_flags(changes: Sequence[TextChange]) -> list[Flag]:
    """Apply the rules about code, strings and comments.

    Returns:
        At most one flag a rule.
    """
    found: dict[str, Flag] = {}
    left = MAX_ADDED
    for change in changes:
        size = len(change.added)
        if size > left:
            found["rewrite"] = flag("rewrite", f"{change.path}: {size} characters added")
            change = TextChange(change.path, "", change.added[:left])
        left -= min(left, size)
        for item in _flags_of(change):
            found.setdefault(item.rule, item)
    return list(found.values())


def _flags_of(change: TextChange) -> list[Flag]:
    found: dict[str, Flag] = {}
    lowered = change.added.lower()
    raw = f"{change.added}\n{change.added.translate(_NO_QUOTES)}"
    for where in (CODE, STRING, COMMENT):
        for rule in _RULES[where]:
            if rule.name in found or not any(needle in lowered for needle in rule.needles) or not rule.pattern.search(raw):
                continue
            old_part, new_part = change.parts[where]
            match = first_added(rule.pattern, old_part, new_part)
            if match is not None:
                lines = change.new.split("\n")
                line = new_part.count("\n", 0, match.start())
                found[rule.name] = flag(rule.name, f"{change.path}:{line + 1}: {lines[min(line, len(lines) - 1)].strip()}")
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


def added_state(change: TextChange) -> str:
    """Return added code that can carry state from call to call, or ``""``."""
    if len(change.added) > MAX_ADDED:
        change = TextChange(change.path, "", change.added[:MAX_ADDED])
    match = first_added(_STATE, *change.parts[CODE])
    return match[0] if match else ""


def copy_flags(change: TextChange, *, is_standard_library: bool) -> list[Flag]:
    """Return the flags of ``RETRIEVAL`` that a changed file deserves, however long it is.

    Args:
        change: The file.
        is_standard_library: The package under repair is a part of the standard library, whose original every interpreter holds.
    """
    found = []
    for name, pattern, where in (("library_copy", _COPIES[is_standard_library], CODE), (_CACHES.name, _CACHES.pattern, STRING)):
        if pattern.search(change.added):
            match = first_added(pattern, *change.parts[where])
            found += [flag(name, f"{change.path}: {match[0]}")] if match else []
    return found


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
            for rule in _RULES[TURN]:
                if rule.name not in found and rule.pattern.search(text[:MAX_ADDED]):
                    found[rule.name] = flag(rule.name, f"turn {number}: {turn.call or 'text'} {text}")
    return list(found.values())
