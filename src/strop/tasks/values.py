"""Plain data of test cases: encode a value as JSON that keeps its type, read it back, write it as Python source.

Two values are the same when their encodings are: ``1``, ``1.0`` and ``True`` differ, ``nan`` equals itself, ``-0.0`` differs from ``0.0``,
dictionaries and sets compare without order, subclasses are refused. Nothing here runs code that comes with a value.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import math
import operator
from typing import Any

from strop.core.errors import TaskError

JSON = Any
"""``None``, ``bool``, ``int``, ``float``, ``str``, a list of these, or an object with one key that names a type."""

MAX_NODES = 256
MAX_DEPTH = 8
MAX_TEXT = 2000
MAX_INT_BITS = 512

CALLABLES: dict[str, Any] = {
    "len": len,
    "str": str,
    "int": int,
    "abs": abs,
    "sum": sum,
    "max": max,
    "min": min,
    "bool": bool,
    "list": list,
    "tuple": tuple,
    "sorted": sorted,
    "str.upper": str.upper,
    "str.isdigit": str.isdigit,
    "operator.add": operator.add,
    "operator.mul": operator.mul,
    "operator.neg": operator.neg,
    "operator.lt": operator.lt,
}
"""Functions that may be an argument, by the name that is written in a test."""

_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque"}
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "defaultdict",
    collections.Counter: "Counter",
}
_TYPES: dict[str, type] = {name: kind for kind, name in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_CALLABLE_NAMES = {id(function): name for name, function in CALLABLES.items()}


class UnencodableError(TaskError):
    """A value isn't plain data, or is too large or too deep."""


def encode_value(value: object) -> JSON:
    """Return the encoding of ``value``: at most 256 nodes, 8 levels, 2,000 characters of text and bytes.

    Raises:
        UnencodableError: The value, or a part of it, isn't plain data of an exactly known type, or it is too large.
    """
    return _encode(value, 0, [MAX_NODES, MAX_TEXT])


def _encode(value: Any, depth: int, left: list[int]) -> JSON:
    left[0] -= 1
    kind = type(value)
    if depth > MAX_DEPTH or left[0] < 0:
        raise UnencodableError(f"value of type {kind.__name__} is deeper than {MAX_DEPTH} or has more than {MAX_NODES} parts")
    if value is None or kind is bool:
        return value
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise UnencodableError(f"integer of {value.bit_length()} bits, expected at most {MAX_INT_BITS}")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is str or kind is bytes:
        left[1] -= len(value)
        if left[1] < 0:
            raise UnencodableError(f"more than {MAX_TEXT} characters of text")
        return value if kind is str else {"bytes": value.decode("latin-1")}
    if kind is list:
        return [_encode(item, depth + 1, left) for item in value]
    if kind in _SEQUENCES:
        items = [_encode(item, depth + 1, left) for item in value]
        return {_SEQUENCES[kind]: sorted(items, key=canonical) if kind in (set, frozenset) else items}
    if kind in _MAPPINGS:
        pairs = [[_encode(key, depth + 1, left), _encode(item, depth + 1, left)] for key, item in value.items()]
        return {_MAPPINGS[kind]: pairs if kind is collections.OrderedDict else sorted(pairs, key=canonical)}
    if kind is complex:
        return {"complex": [_encode(value.real, depth + 1, left), _encode(value.imag, depth + 1, left)]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind is fractions.Fraction:
        return {"Fraction": [_encode(value.numerator, depth + 1, left), _encode(value.denominator, depth + 1, left)]}
    if kind is decimal.Decimal:
        return {"Decimal": str(value)}
    if kind in (datetime.date, datetime.datetime, datetime.time) and getattr(value, "tzinfo", None) is None:
        return {f"datetime.{kind.__name__}": value.isoformat()}
    if kind is datetime.timedelta:
        return {"datetime.timedelta": [value.days, value.seconds, value.microseconds]}
    if id(value) in _CALLABLE_NAMES:
        return {"callable": _CALLABLE_NAMES[id(value)]}
    raise UnencodableError(f"value of type {kind.__module__}.{kind.__qualname__} isn't plain data")


def canonical(encoded: JSON) -> str:
    """Return the text that two encodings share exactly if they are the same."""
    return json.dumps(encoded, sort_keys=True, separators=(",", ":"))


def decode_value(encoded: JSON) -> Any:
    """Return a fresh value; the inverse of ``encode_value``.

    Raises:
        TaskError: If it isn't an encoding.
    """
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return encoded
    if isinstance(encoded, list):
        return [decode_value(item) for item in encoded]
    ((name, data),) = encoded.items()
    if name in _TYPES:
        kind = _TYPES[name]
        if kind in _MAPPINGS:
            pairs = [(decode_value(key), decode_value(item)) for key, item in data]
            if kind is collections.defaultdict:
                return collections.defaultdict(None, pairs)
            return kind(dict(pairs)) if kind is collections.Counter else kind(pairs)
        return kind(decode_value(item) for item in data)
    if name == "bytes":
        return data.encode("latin-1")
    if name == "callable":
        return CALLABLES[data]
    if name in ("float", "Decimal"):
        return (float if name == "float" else decimal.Decimal)(data)
    if name in ("complex", "range", "Fraction"):
        parts = [decode_value(item) for item in data]
        return {"complex": complex, "range": range, "Fraction": fractions.Fraction}[name](*parts)
    if name == "datetime.timedelta":
        return datetime.timedelta(*data)
    if name in ("datetime.date", "datetime.datetime", "datetime.time"):
        return getattr(datetime, name.partition(".")[2]).fromisoformat(data)
    raise TaskError(f"{name!r} isn't a type of test data")


def to_source(encoded: JSON) -> str:
    """Return a Python expression for an encoding, as a person would write it."""
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return repr(encoded)
    if isinstance(encoded, list):
        return f"[{', '.join(map(to_source, encoded))}]"
    ((name, data),) = encoded.items()
    if name in _TYPES:
        return _container_source(name, data)
    if name == "callable":
        return data
    if name == "float":
        return f"float({data!r})"
    if name in ("complex", "Fraction", "range"):
        parts = data[1:2] if name == "range" and data[0] == 0 and data[2] == 1 else data
        return f"{name}({', '.join(map(to_source, parts))})"
    if name == "Decimal":
        return f"Decimal({data!r})"
    return repr(decode_value(encoded))


def _container_source(name: str, data: list[JSON]) -> str:
    if name in ("dict", "OrderedDict", "defaultdict", "Counter"):
        pairs = [(to_source(key), to_source(item)) for key, item in data]
        if name == "OrderedDict":
            return f"OrderedDict([{', '.join(f'({key}, {item})' for key, item in pairs)}])"
        braces = "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
        return {"dict": braces, "Counter": f"Counter({braces})", "defaultdict": f"defaultdict(None, {braces})"}[name]
    items = ", ".join(map(to_source, data))
    if name == "tuple":
        return f"({items},)" if len(data) == 1 else f"({items})"
    if name == "set":
        return f"{{{items}}}" if data else "set()"
    return f"{name}([{items}])" if data else f"{name}()"


_IMPORTS = {
    "Fraction": "from fractions import Fraction",
    "Decimal": "from decimal import Decimal",
    "deque": "from collections import deque",
    "OrderedDict": "from collections import OrderedDict",
    "defaultdict": "from collections import defaultdict",
    "Counter": "from collections import Counter",
}


def imports_of(encoded: JSON) -> set[str]:
    """Return the import lines that ``to_source(encoded)`` needs."""
    if isinstance(encoded, list):
        return set().union(*map(imports_of, encoded))
    if not isinstance(encoded, dict):
        return set()
    ((name, data),) = encoded.items()
    if name == "callable":
        return {"import operator"} if data.startswith("operator.") else set()
    if name.startswith("datetime."):
        return {"import datetime"}
    lines = {_IMPORTS[name]} if name in _IMPORTS else set()
    return lines | (imports_of(data) if isinstance(data, list) else set())
