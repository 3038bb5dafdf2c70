"""Field tables: what a foreign format may say, read strictly.

A ``Table`` names every key that a format has, with a check of its value. Reading keeps exactly the keys that were given (defaults belong
to whoever uses the data), so that what was read can be written again unchanged. A key that isn't in the table is an error that names it and
the nearest one that is.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.core.errors import TaskError, nearest

Check = Callable[[Any, str], Any]
"""Takes a value and where it stands; returns the value in its one spelling.

Raises:
    TaskError: The value is wrong.
"""

MAX_ECHO_CHARS = 80


def shown(value: Any) -> str:
    """Return a value for a message, short."""
    text = repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."


def wrong(where: str, value: Any, expected: str) -> TaskError:
    """Return the error for a value that isn't what its key needs."""
    return TaskError(f"{where} is {shown(value)}, expected {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One key of a table.

    Attributes:
        check: Of its value.
        required: Whether it must be there.
        default: What a missing key means; only ``Table.get`` uses it.
        nullable: Whether ``null`` is a value (JSON rows have it for empty columns).
    """

    check: Check
    required: bool = False
    default: Any = None
    nullable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A set of keys.

    Attributes:
        name: What messages call it, for example ``"[verifier]"``.
        fields: The keys.
        legacy: Old keys; ``migrate`` turns them into present ones.
        migrate: Gets a copy of the data with legacy keys, and where it stands; returns it without.
        verify: Gets what was read, and where; raises if the keys don't go together.
    """

    name: str
    fields: Mapping[str, Field]
    legacy: Sequence[str] = ()
    migrate: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
    verify: Callable[[Mapping[str, Any], str], None] | None = None

    def read(self, data: Any, where: str) -> dict[str, Any]:
        """Return the given keys in the table's order, each checked.

        Raises:
            TaskError: It isn't a table, a key is unknown (all of them are named, each with the nearest known one) or missing, or a value is
                wrong.
        """
        if not isinstance(data, Mapping):
            raise wrong(where, data, f"a table with the keys of {self.name}")
        known = [*self.fields, *self.legacy]
        if unknown := [key for key in data if key not in known]:
            said = " ".join(f"unknown key {shown(key)}.{nearest(str(key), known)}" for key in unknown)
            raise TaskError(f"{where}: {said}")
        given = dict(data)
        if self.migrate is not None and any(key in given for key in self.legacy):
            given = self.migrate(given, where)
        found = {}
        for key, field in self.fields.items():
            if key not in given:
                if field.required:
                    raise TaskError(f"{where}: the key {key!r} is missing; {self.name} needs it")
            elif given[key] is None and field.nullable:
                found[key] = None
            else:
                found[key] = field.check(given[key], f"{where}.{key}")
        if self.verify is not None:
            self.verify(found, where)
        return found

    def get(self, data: Mapping[str, Any], key: str) -> Any:
        """Return a read value, or its default.

        Raises:
            KeyError: The table has no such key.
        """
        value = data.get(key)
        return self.fields[key].default if value is None else value

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Yield every key, with those of tables below it, dotted: ``"verifier.collect[].command"``."""
        for key, field in self.fields.items():
            yield f"{prefix}{key}"
            below = getattr(field.check, "table", None)
            if below is not None:
                yield from below.paths(f"{prefix}{key}{getattr(field.check, 'suffix', '')}.")


class Nested:
    """A check that reads a table below a key, or a list of such tables."""

    def __init__(self, table: Table, *, is_list: bool = False, or_text: bool = False) -> None:
        self.table = table
        self.suffix = "[]" if is_list else ""
        self._is_list = is_list
        self._or_text = or_text

    def __call__(self, value: Any, where: str) -> Any:
        """Read the table, or each of the list's."""
        if not self._is_list:
            return self.table.read(value, where)
        if not isinstance(value, list):
            raise wrong(where, value, "a list")
        return [
            item if self._or_text and isinstance(item, str) else self.table.read(item, f"{where}[{number}]")
            for number, item in enumerate(value)
        ]


def is_unicode(value: str) -> bool:
    """Whether text can be encoded as UTF-8 (JSON escapes can say halves of characters)."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def text(*, choices: Sequence[str] = (), pattern: str = "", expected: str = "", empty: bool = True) -> Check:
    """Return a check for text.

    Args:
        choices: The only values allowed.
        pattern: Regular expression that it must match as a whole.
        expected: What messages say about ``pattern``.
        empty: Whether ``""`` is allowed.
    """

    def check(value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise wrong(where, value, "text")
        if not is_unicode(value):
            raise wrong(where, value, "text without lone surrogates")
        if choices and value not in choices:
            raise TaskError(f"{where} is {shown(value)}.{nearest(value, choices)}")
        if pattern and not re.fullmatch(pattern, value):
            raise wrong(where, value, expected or f"text that matches {pattern}")
        if not value and not empty:
            raise wrong(where, value, "text that isn't empty")
        return value

    return check


def number(*, minimum: float | None = None, above: float | None = None) -> Check:
    """Return a check for a finite number that isn't a truth value."""

    def check(value: Any, where: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise wrong(where, value, "a finite number")
        if minimum is not None and value < minimum:
            raise wrong(where, value, f"at least {minimum}")
        if above is not None and value <= above:
            raise wrong(where, value, f"more than {above}")
        return value

    return check


def integer(*, minimum: int | None = None) -> Check:
    """Return a check for an integer that isn't a truth value."""

    def check(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(where, value, "an integer")
        if minimum is not None and value < minimum:
            raise wrong(where, value, f"at least {minimum}")
        return value

    return check


def boolean(value: Any, where: str) -> bool:
    """Check a truth value."""
    if not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


def list_of(item: Check, *, empty: bool = True) -> Check:
    """Return a check for a list."""

    def check(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(where, value, "a list")
        if not value and not empty:
            raise wrong(where, value, "a list with at least one item")
        return [item(entry, f"{where}[{index}]") for index, entry in enumerate(value)]

    return check


def map_of(item: Check) -> Check:
    """Return a check for a table whose keys are free."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise wrong(where, value, "a table")
        return {str(key): item(entry, f"{where}.{key}") for key, entry in value.items()}

    return check


def either(*checks: Check, expected: str) -> Check:
    """Return a check that takes what the first of ``checks`` to accept it returns."""

    def check(value: Any, where: str) -> Any:
        for one in checks:
            try:
                return one(value, where)
            except TaskError:
                continue
        raise wrong(where, value, expected)

    return check


def plain(value: Any, where: str) -> Any:
    """Check data that the format leaves free: anything that TOML or JSON can say."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry, where) for entry in value]
    if isinstance(value, str) and not is_unicode(value):
        raise wrong(where, value, "text without lone surrogates")
    if value is None or isinstance(value, (str, bool, int, float, datetime.datetime, datetime.date, datetime.time)):
        return value
    raise wrong(where, value, "plain data")
