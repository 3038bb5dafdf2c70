"""Argument values for differential tests: typed pools, guesses from names, annotations and defaults, literals of the module itself.

Pure functions of their random generator. ``strop.tasks.inside`` calls them where the code under test runs.
"""

from __future__ import annotations

import ast
import datetime
import inspect
import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

INTS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    -1,
    -2,
    -3,
    13,
    16,
    20,
    25,
    31,
    42,
    60,
    64,
    99,
    100,
    101,
    128,
    255,
    360,
    365,
    1000,
    1024,
    3600,
    86400,
)
NUM_SMALL = 14
"""The first so many of ``INTS`` are preferred."""
FLOATS = (0.0, 0.5, 1.0, 1.5, -1.5, 2.25, 3.125, 10.0, 0.1, 100.0, -0.25, 45.0, 1234.5, 0.75)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words("a b spam eggs hello world Alice bus city box item x1 foo bar Zoo kiwi test night")
TEXTS = (
    *("", "hello world", "Hello, World!", "  padded  ", "one two  three", "line one\nline two\n", "5 minutes", "10 KB", "a & b < c"),
    *("it's", "(a, b)", "[1, 2]", "tab\there", "%d items", "UPPER lower", "caf\u00e9", "na\u00efve"),
    *_words("a abc foo_bar fooBarBaz FooBar foo-bar a,b,c key=value 12 -7 3.5 007 1,234 0xff 1.2.3 2024-02-29 12:34:56 10:30 racecar"),
    *_words("2021-03-04T05:06:07 #ff8800 aabbccdd mississippi ABC IV XLII user@example.com http://example.com/a/b?x=1&y=2#top banana"),
    *_words('192.168.0.1 ::1 a/b/../c.txt /usr/lib/file.tar.gz C:\\dir\\file.txt <p>text</p> "quoted" {x} path/to/file.py example.com'),
    *_words("kitten sitting x y 1h30m True none ** a*b?c a.b.c --flag 1e5"),
)
BYTES = (b"", b"a", b"abc", b"hello world", b"\x00\x01\x02", b"\xff\xfe", b"line\r\n", b"0123456789", b"key: value", b"\x7f\x80", b"AAAA")
DATES = ((2024, 2, 29), (2023, 1, 1), (1999, 12, 31), (2000, 6, 15), (2020, 3, 28), (1970, 1, 1), (2021, 10, 31))
CALLABLES = (len, str, int, abs, sum, max, bool, str.upper, operator.add, operator.mul, operator.neg, str.isdigit)

BASE_TYPES: tuple[str, ...] = (
    *("str", "int", "float", "list[int]", "list[str]", "bool", "bytes", "dict", "tuple", "list[list]", "list[pair]", "None", "list[float]"),
)
RARE_TYPES: tuple[str, ...] = ("callable", "date", "datetime", "timedelta", "set", "Fraction", "complex")

_LISTS = ("list[int]", "list[str]", "list[pair]", "list[list]", "list[float]")
_NAME_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "s st text string str str_ word words name title line label key prefix suffix pattern pat sep sub path p url uri src filename fmt"
        " format content char ch c host domain query value val version ver msg token sentence left right html addr code hex.* .*_str .*name"
        " .*text",
        ("str",),
    ),
    (
        "n i j k m num number count size width length len limit start stop end index idx pos step base precision digits year month day"
        " hour minute seconds? level depth rows? cols? indent maxlen max_.* min_.* num_.* n_.* .*_size .*_len .*_count bits weekday"
        " offset port",
        ("int",),
    ),
    (
        "x y z r t w h lat.* lon.* angle ratio alpha beta scale factor theta .*deg.* rad.* red green blue hue epsilon tol.*",
        ("float", "int"),
    ),
    (
        "seq.* iterables? items lst l list_? values xs ys arr.* elements coll collection data it args lines parts tokens points? numbers"
        " nums array sequence src entries keys intervals? ranges? rows stack path vec.* matrix",
        _LISTS,
    ),
    ("d dct dict.* mapping map params options kw.* headers table obj attrs env props", ("dict",)),
    ("f fn func.* key pred.* callback function op binop test transform keyfunc", ("callable",)),
    ("b buf.* bytes_? raw payload octets bstr blob data body", ("bytes",)),
    ("dt datetime when moment ts timestamp", ("datetime", "float", "int")),
    ("date.* dateobj day", ("date", "datetime", "str")),
    ("td delta timedelta duration interval", ("timedelta", "int", "float")),
    (r"box bbox rect pt.* pair p\d v\d point rgb.* triplet color t", ("tuple",)),
    ("is_.* has_.* flag strict reverse.* ignore.* include.* use_.* as_.* allow.* case.* verbose keep.*", ("bool",)),
)
_NAME_PATTERNS = tuple((re.compile("|".join(words.split())), types) for words, types in _NAME_HINTS)
_ANNOTATION_HINTS: tuple[tuple[str, str], ...] = (
    *(
        ("Callable", "callable"),
        ("datetime", "datetime"),
        ("timedelta", "timedelta"),
        ("date", "date"),
        ("bytes", "bytes"),
        ("bool", "bool"),
    ),
    *(
        ("Mapping", "dict"),
        ("dict", "dict"),
        ("Dict", "dict"),
        ("list[str]", "list[str]"),
        ("List[str]", "list[str]"),
        ("[str]", "list[str]"),
    ),
    *(("list[int]", "list[int]"), ("[int]", "list[int]"), ("[float]", "list[float]"), ("Sequence", "list[int]"), ("Iterable", "list[int]")),
    *(("list", "list[int]"), ("tuple", "tuple"), ("Tuple", "tuple"), ("set", "set"), ("Fraction", "Fraction"), ("complex", "complex")),
    *(("float", "float"), ("int", "int"), ("str", "str")),
)


@dataclass(slots=True)
class Literals:
    """Constants found in a module.

    Attributes:
        strings: Short texts.
        ints: Small numbers.
    """

    strings: list[str] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)


def literals_of(source: str) -> Literals:
    """Collect short constants of a module, docstrings left out, in order of first use."""
    strings: dict[str, None] = {}
    ints: dict[int, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if type(node.value) is str and 0 < len(node.value) <= 24 and node.value.isprintable():
                strings.setdefault(node.value)
            elif type(node.value) is int and abs(node.value) < 10_000:
                ints.setdefault(node.value)
    return Literals(list(strings)[:200], list(ints)[:60])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as the fuzzer sees it.

    Attributes:
        name: Its name.
        types: Types to try with their weights.
        required: Whether a call must give it.
        keyword: Whether it can only be given by name.
        variadic: Whether it is ``*args``.
    """

    name: str
    types: tuple[tuple[str, float], ...]
    required: bool
    keyword: bool = False
    variadic: bool = False


def parameters_of(signature: inspect.Signature) -> list[Parameter] | None:
    """Return the parameters with guessed types, or ``None`` where a call can't be made from plain values."""
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        required = parameter.default is parameter.empty
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        found.append(Parameter(parameter.name, _guess(parameter), required and not variadic, keyword, variadic))
    return found if 0 < len(found) <= 8 and sum(parameter.required for parameter in found) <= 5 else None


def _guess(parameter: inspect.Parameter) -> tuple[tuple[str, float], ...]:
    weights: dict[str, float] = dict.fromkeys(BASE_TYPES, 1.0) | dict.fromkeys(RARE_TYPES, 0.15)
    weights["None"] = weights["bool"] = 0.3
    for pattern, types in _NAME_PATTERNS:
        if pattern.fullmatch(parameter.name.lower()):
            for kind in types:
                weights[kind] += 8.0
    annotation = "" if parameter.annotation is parameter.empty else str(parameter.annotation)
    for text, kind in _ANNOTATION_HINTS:
        if text in annotation:
            weights[kind] += 40.0
            break
    default = parameter.default
    if default is not parameter.empty and default is not None:
        kind = {"list": "list[int]", "builtin_function_or_method": "callable", "type": "callable"}.get(
            type(default).__name__, type(default).__name__
        )
        if kind in weights:
            weights[kind] += 60.0
    return tuple(weights.items())


def value_of(kind: str, rng: random.Random, literals: Literals) -> Any:
    """Return a value of a type from ``BASE_TYPES`` or ``RARE_TYPES``."""
    if kind == "int":
        return (
            rng.choice(literals.ints)
            if literals.ints and rng.random() < 0.25
            else rng.choice(INTS[:NUM_SMALL] if rng.random() < 0.6 else INTS)
        )
    if kind == "float":
        return rng.choice(FLOATS)
    if kind == "str":
        return _text(rng, literals)
    if kind == "bytes":
        return rng.choice(BYTES)
    if kind == "bool":
        return rng.random() < 0.5
    if kind in _BUILDERS:
        return _BUILDERS[kind](rng, literals, rng.choice((0, 1, 2, 3, 3, 4, 5, 6)))
    return None


def _text(rng: random.Random, literals: Literals) -> str:
    draw = rng.random()
    if literals.strings and draw < 0.3:
        return rng.choice(literals.strings)
    if draw < 0.75:
        return rng.choice(TEXTS)
    if draw < 0.85 and literals.strings:
        return rng.choice(literals.strings) + rng.choice((" ", "", "-", "/")) + rng.choice(WORDS)
    return rng.choice(("", " ", "_", ",")).join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))


def _ints(rng: random.Random, count: int) -> list[int]:
    values = [rng.choice(INTS[:NUM_SMALL]) for _ in range(count)]
    return sorted(values) if rng.random() < 0.3 else values


def _items(rng: random.Random, count: int) -> list[Any]:
    return _ints(rng, count) if rng.random() < 0.6 else [rng.choice(WORDS) for _ in range(count)]


def _date(rng: random.Random) -> datetime.date:
    return datetime.date(*rng.choice(DATES))


_BUILDERS: dict[str, Any] = {
    "list[int]": lambda rng, _, count: _ints(rng, count),
    "list[str]": lambda rng, lits, count: [_text(rng, lits) if rng.random() < 0.3 else rng.choice(WORDS) for _ in range(count)],
    "list[float]": lambda rng, _, count: [rng.choice(FLOATS) for _ in range(count)],
    "list[list]": lambda rng, _, count: [_items(rng, rng.randint(0, 3)) for _ in range(count)],
    "list[pair]": lambda rng, _, count: (
        [(rng.choice(WORDS), rng.choice(INTS[:NUM_SMALL])) for _ in range(count)]
        if rng.random() < 0.5
        else [tuple(_ints(rng, 2)) for _ in range(count)]
    ),
    "tuple": lambda rng, _, count: tuple(rng.choice(FLOATS) for _ in range(count)) if rng.random() < 0.3 else tuple(_ints(rng, count)),
    "set": lambda rng, _, count: set(_ints(rng, count)),
    "dict": lambda rng, lits, count: {
        rng.choice(WORDS): rng.choice(INTS) if rng.random() < 0.5 else _text(rng, lits) for _ in range(count)
    },
    "callable": lambda rng, _, __: rng.choice(CALLABLES),
    "date": lambda rng, _, __: _date(rng),
    "datetime": lambda rng, _, __: datetime.datetime.combine(_date(rng), datetime.time(rng.randint(0, 23), rng.choice((0, 7, 30, 59)))),
    "timedelta": lambda rng, _, __: datetime.timedelta(
        days=rng.choice((0, 0, 1, 2, -1, 40)), seconds=rng.choice((0, 1, 59, 61, 3600, 7265))
    ),
    "Fraction": lambda rng, _, __: Fraction(rng.choice(INTS[:NUM_SMALL]), rng.choice((1, 2, 3, 7))),
    "complex": lambda rng, _, __: complex(rng.choice((0, 1, -2, 0.5)), rng.choice((0, 1, -1, 2.5))),
}


Call = tuple[tuple[Any, ...], dict[str, Any]]
Shape = tuple[str, ...]


def random_shape(parameters: Sequence[Parameter], rng: random.Random) -> Shape:
    """Choose a type for each parameter; ``""`` leaves an optional one out (and every positional one behind it)."""
    shape: list[str] = []
    stopped = False
    for parameter in parameters:
        skipped = not parameter.required and ((stopped and not parameter.keyword) or rng.random() < (0.8 if parameter.keyword else 0.45))
        if skipped and not parameter.keyword:
            stopped = True
        kinds, weights = zip(*parameter.types, strict=True)
        shape.append("" if skipped else rng.choices(kinds, weights)[0])
    return tuple(shape)


def random_call(parameters: Sequence[Parameter], shape: Shape, rng: random.Random, literals: Literals) -> Call:
    """Return arguments of the given types."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter, kind in zip(parameters, shape, strict=True):
        if not kind:
            continue
        if parameter.variadic:
            args.extend(value_of(kind, rng, literals) for _ in range(rng.randint(1, 3)))
        elif parameter.keyword:
            kwargs[parameter.name] = value_of(kind, rng, literals)
        else:
            args.append(value_of(kind, rng, literals))
    return tuple(args), kwargs
