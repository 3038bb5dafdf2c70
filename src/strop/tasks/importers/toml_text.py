"""Plain data as TOML text that ``tomllib`` reads back to equal data. The standard library only reads TOML."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from typing import Any

from strop.core.errors import TaskError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dump_toml(data: Mapping[str, Any]) -> str:
    """Return a document: values first, then a section per table and per item of a list of tables. ``None`` values are left out.

    Raises:
        TaskError: A value that TOML can't say.
    """
    lines: list[str] = []
    _write_table(data, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    later = []
    for key, value in table.items():
        if value is None:
            continue
        if _is_section(value):
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_inline(value)}")
    for key, value in later:
        name = (*path, key)
        header = ".".join(map(_key, name))
        if isinstance(value, Mapping):
            lines += ["", f"[{header}]"]
            _write_table(value, name, lines)
        else:
            for item in value:
                lines += ["", f"[[{header}]]"]
                _write_table(item, name, lines)


def _is_section(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    parts = []
    for character in text:
        if character in _ESCAPES:
            parts.append(_ESCAPES[character])
        elif ord(character) < 32 or ord(character) == 127:
            parts.append(f"\\u{ord(character):04x}")
        else:
            parts.append(character)
    return f'"{"".join(parts)}"'


def _inline(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else ("inf" if value > 0 else "-inf"))
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, list):
        return f"[{', '.join(_inline(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_inline(item)}' for key, item in value.items() if item is not None)}}}"
    raise TaskError(f"{value!r} of type {type(value).__name__} has no TOML notation")
