"""Test data keeps its type through JSON, through source text, and refuses what isn't plain."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import json
import operator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks.values import MAX_NODES, UnencodableError, canonical, decode_value, encode_value, imports_of, to_source
from strop.tasks.verifier import Case, Verifier, observe

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.fractions(max_denominator=50)
    | st.dates()
    | st.timedeltas()
    | st.complex_numbers()
)
keys = st.integers(-5, 5) | st.text(max_size=3) | st.booleans() | st.tuples(st.integers(0, 3), st.text(max_size=2))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=10,
)


def run_source(encoded: Any) -> Any:
    namespace: dict[str, Any] = {}
    exec("\n".join(sorted(imports_of(encoded))), namespace)
    return eval(to_source(encoded), namespace)


@settings(max_examples=200, deadline=None)
@given(values)
def test_round_trips_through_json_and_source(value: object):
    encoded = encode_value(value)
    text = canonical(json.loads(json.dumps(encoded)))
    assert text == canonical(encoded)
    assert canonical(encode_value(decode_value(json.loads(text)))) == text
    if "complex" not in text:
        assert canonical(encode_value(run_source(encoded))) == text


@pytest.mark.parametrize(
    ("left", "right"),
    [(1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ([1], (1,)), ({1}, frozenset({1})), ({}, []), (None, "None"), ({1: 2}, {1.0: 2})],
)
def test_types_are_told_apart(left: object, right: object):
    assert canonical(encode_value(left)) != canonical(encode_value(right))


def test_order_and_nan_are_compared_as_values():
    assert canonical(encode_value({"a": 1, "b": 2})) == canonical(encode_value({"b": 2, "a": 1}))
    assert canonical(encode_value({"x", "y", "z"})) == canonical(encode_value({"z", "y", "x"}))
    assert canonical(encode_value(float("nan"))) == canonical(encode_value(-float("nan")))


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Text("a"),
        lambda: 0,
        iter([]),
        [Text("a")],
        1 << 600,
        "x" * 2001,
        [0] * (MAX_NODES + 1),
        Exception("x"),
        {}.keys(),
    ],
)
def test_refuses_what_is_not_plain(value: object):
    with pytest.raises(UnencodableError):
        encode_value(value)


def test_refuses_what_is_too_deep():
    value: list[Any] = []
    for _ in range(12):
        value = [value]
    with pytest.raises(UnencodableError, match="deeper"):
        encode_value(value)


def test_special_values():
    for value in (len, operator.add, str.upper, range(3), range(1, 9, 2), decimal.Decimal("1.50"), datetime.datetime(2024, 2, 29, 1, 2)):
        encoded = encode_value(value)
        assert decode_value(encoded) == value
        assert run_source(encoded) == value
    assert to_source(encode_value(range(3))) == "range(3)"
    assert decode_value(encode_value(collections.Counter("aab"))) == collections.Counter("aab")
    with pytest.raises(TaskError, match="isn't a type"):
        decode_value({"module": "os"})


def chunks(items: list[int], size: int = 2):
    if size < 1:
        raise ValueError(size)
    for start in range(0, len(items), size):
        yield items[start : start + size]


def test_observe_calls_with_fresh_arguments():
    def popping(items: list[int]) -> int:
        return items.pop()

    args = ([1, 2],)
    assert observe(popping, args, {}, drain=False) == (2, None)
    assert observe(popping, args, {}, drain=False) == (2, None)
    assert observe(popping, ([],), {}, drain=False) == (None, "IndexError")
    assert observe(lambda: object(), (), {}, drain=False) == (None, "UnencodableError")
    assert observe(chunks, ([1, 2, 3],), {"size": 2}, drain=True) == ([[1, 2], [3]], None)
    assert observe(chunks, ([1, 2, 3], 0), {}, drain=True) == (None, "ValueError")


def test_case_is_met_only_by_the_same_type():
    case = Case(args=(1,), expected={"tuple": [1]})
    assert case.is_met({"tuple": [1]}, None)
    assert not case.is_met([1], None)
    assert not case.is_met({"tuple": [True]}, None)
    assert not case.is_met(None, "ValueError")
    error = Case(args=(1,), raises="ValueError")
    assert error.is_met(None, "ValueError")
    assert not error.is_met(None, None)
    assert not error.is_met(None, "KeyError")
    assert Case(args=(), expected=None).is_met(None, None)
    assert not Case(args=(), expected=None).is_met(None, "TypeError")


def test_verifier_round_trips_and_names_what_is_missing():
    cases = (Case(args=("a", {"tuple": []}), kwargs={"n": 1}, expected=[1.5]), Case(args=(), raises="KeyError"))
    verifier = Verifier(module="a.b", qualname="f", path="a/b.py", visible=cases, hidden=cases[:1], drain=True)
    data = json.loads(json.dumps(verifier.to_json()))
    assert Verifier.from_json(data) == verifier
    del data["hidden"]
    with pytest.raises(TaskError, match="hidden"):
        Verifier.from_json(data)


def test_fraction_is_exact():
    assert decode_value(encode_value(Fraction(1, 3))) == Fraction(1, 3)
