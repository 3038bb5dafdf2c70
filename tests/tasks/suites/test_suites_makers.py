"""The makers: every family on a text where it applies, properties over real modules, deletion in all its forms."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks.makers.deletion import delete, find_features
from strop.tasks.makers.families import FAMILIES
from strop.tasks.makers.procedural import find_mutations
from strop.tasks.makers.splice import Mutation, Splice, apply_splices, is_real_change, overlaps

EXAMPLES = {
    "operator": ("return a + b", "return a - b"),
    "comparison": ("return a < b", "return a <= b"),
    "constant": ("return a[1]", "return a[2]"),
    "condition": ("if a:\n        return b", "if not a:\n        return b"),
    "operand_swap": ("return a - b  # why", "return b - a  # why"),
    "chain_break": ("return a + b + 1", "return a + b"),
    "argument_swap": ("return f(a, b)", "return f(b, a)"),
    "argument_remove": ("return f(a, key=b)", "return f(a)"),
    "call_swap": ("return min(a, b)", "return max(a, b)"),
    "assignment_remove": ("c = a\n    c = b\n    return c", "c = a\n    return c"),
    "statement_remove": ("a.append(b)\n    return a", "return a"),
    "statement_swap": ("c = a\n    c += b\n    return c", "c += b\n    c = a\n    return c"),
    "branch_remove": ("if a:\n        c = 1\n    else:\n        c = 2\n    return c", "if a:\n        c = 1\n    return c"),
    "loop_remove": ("for c in a:\n        b += c\n    return b", "return b"),
    "wrapper_remove": ("with a:\n        # inside\n        b += 1\n    return b", "# inside\n    b += 1\n    return b"),
}


def results(source: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for mutation in find_mutations("m.py", source.encode()):
        found.setdefault(mutation.family, set()).add(apply_splices(source.encode(), mutation.splices).decode())
    return found


@pytest.mark.parametrize("family", list(EXAMPLES))
def test_family(family: str) -> None:
    before, after = (f"def f(a, b):\n    {body}\n" for body in EXAMPLES[family])
    assert after in results(before)[family]


def test_families_of_classes() -> None:
    getter = "    @wrap\n    def f(self):\n        return 1\n\n"
    source = "class A(Base, Other):\n    x = 1\n\n" + getter + "    @f.setter\n    def f(self, v):\n        pass\n"
    found = results(source)
    assert "class A(Other):" in next(iter(found["base_remove"]))
    assert any("@wrap" not in text and "setter" in text for text in found["method_remove"])
    assert any(text.index("setter") < text.index("wrap") for text in found["method_swap"])
    assert "class B:" in next(iter(results("class B(Base):\n    pass\n")["base_remove"]))


def test_every_family_is_shown() -> None:
    assert set(EXAMPLES) | {"base_remove", "method_remove", "method_swap"} == set(FAMILIES)


@pytest.mark.parametrize("module", [textwrap, random], ids=lambda module: module.__name__)
def test_real_modules(module: object) -> None:
    path = Path(inspect.getsourcefile(module))  # type: ignore[arg-type]
    source = path.read_bytes()
    mutations = find_mutations(path.name, source)
    assert len(mutations) > 100
    chosen = random.Random(0).sample(mutations, 40)
    real = 0
    for mutation in chosen:
        after = apply_splices(source, mutation.splices)
        assert after != source
        kept = set(after.split(b"\n"))
        changed = {number for number, line in enumerate(source.split(b"\n"), 1) if line not in kept}
        assert all(mutation.first_line <= number <= mutation.last_line for number in changed), mutation
        real += is_real_change(source, after)
    assert real >= 35


def test_line_ends_and_bytes_outside_ascii_stay() -> None:
    source = "def f(a):\r\n    'é'\r\n    return a + 1  # ü\r\n".encode()
    texts = [apply_splices(source, mutation.splices) for mutation in find_mutations("m.py", source)]
    assert "def f(a):\r\n    'é'\r\n    return a - 1  # ü\r\n".encode() in texts


@pytest.mark.parametrize("source", [b"def f(:\n", b"\xff\xfe", b"x = 'a\n"])
def test_what_is_no_python_is_said(source: bytes) -> None:
    with pytest.raises(TaskError, match=r"m\.py can't be parsed"):
        find_mutations("m.py", source)


@given(st.binary(max_size=40), st.lists(st.tuples(st.integers(0, 45), st.integers(0, 45), st.binary(max_size=3)), max_size=4))
@settings(max_examples=200, deadline=None)
def test_splices_apply_or_are_refused(source: bytes, rows: list[tuple[int, int, bytes]]) -> None:
    splices = [Splice(*row) for row in rows]
    ordered = sorted(splices)
    is_good = all(0 <= s.start <= s.end <= len(source) for s in ordered) and all(a.end <= b.start for a, b in pairwise(ordered))
    if is_good:
        result = apply_splices(source, splices)
        assert len(result) == len(source) + sum(len(s.new) - (s.end - s.start) for s in splices)
    else:
        with pytest.raises(TaskError):
            apply_splices(source, splices)


def test_overlap() -> None:
    a = Mutation("x", "m.py", "f", 1, 2, 1, (Splice(0, 4, b""),))
    b = Mutation("x", "m.py", "f", 1, 2, 1, (Splice(3, 5, b""),))
    c = Mutation("x", "n.py", "f", 1, 2, 1, (Splice(3, 5, b""),))
    assert overlaps(a, b)
    assert not overlaps(a, c)


SHOP = b'''"""Doc."""


class A:
    """A."""

    def used(self, x):
        """Doc of used."""
        y = x + 1
        return y

    def alone(self):
        return 1 + \\
            2


def scale(value, factor=2, *, shift=0):
    """Scale."""
    z = value * factor
    return z + shift


def helper(a):
    b = A().used(a)
    return b + 1
'''


def features() -> dict[tuple[str, str], object]:
    return {(feature.kind, f"{feature.name}{feature.option}"): feature for feature in find_features("m.py", SHOP)}


def test_features_are_found() -> None:
    assert set(features()) == {
        ("class", "A"),
        ("method", "A.used"),
        ("method", "A.alone"),
        ("function", "scale"),
        ("option", "scalefactor"),
        ("option", "scaleshift"),
        ("function", "helper"),
    }


def test_what_nobody_names_goes_away_whole() -> None:
    text = delete(SHOP, features()["method", "A.alone"], is_named_elsewhere=False)  # type: ignore[arg-type]
    assert text is not None
    assert b"alone" not in text
    assert b"def used" in text
    ast.parse(text)


def test_what_others_name_becomes_a_stub_with_its_documentation() -> None:
    text = delete(SHOP, features()["method", "A.used"], is_named_elsewhere=True)  # type: ignore[arg-type]
    assert text is not None
    assert b'"""Doc of used."""\n        raise NotImplementedError("used")\n' in text
    assert b"y = x + 1" not in text


def test_option_becomes_its_default() -> None:
    namespace: dict[str, object] = {}
    text = delete(SHOP, features()["option", "scalefactor"], is_named_elsewhere=True)  # type: ignore[arg-type]
    assert text is not None
    assert b"def scale(value, *, shift=0):" in text
    exec(text.decode(), namespace)
    assert namespace["scale"](3) == 6  # type: ignore[operator]
    with pytest.raises(TypeError):
        namespace["scale"](3, factor=2)  # type: ignore[operator]


def test_first_option_after_the_star_is_left_alone() -> None:
    assert delete(SHOP, features()["option", "scaleshift"], is_named_elsewhere=True) is None  # type: ignore[arg-type]
