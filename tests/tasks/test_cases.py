"""Sources, harvesting, guessing, choosing and writing of tests."""

from __future__ import annotations

import hashlib
import inspect
import random
import unittest
import zipfile
from pathlib import Path

import pytest

from strop.core.errors import TaskError
from strop.tasks import fuzz
from strop.tasks.cases import choose_cases, has_nan, render_tests, visible_test_path
from strop.tasks.harvest import harvest_calls
from strop.tasks.sources import Source, example_texts, fetch, load_table, pin, read_tree
from strop.tasks.values import encode_value
from strop.tasks.verifier import Case


def found(number: int, expected: object, *, harvested: bool = False) -> dict[str, object]:
    return {"args": [number], "kwargs": {}, "expected": expected, "harvested": harvested}


def test_choice_covers_edits_first_and_never_shows_hidden_cases():
    cases = [found(n, n) for n in range(40)]
    kills = [[39], [38, 39], [7], list(range(40))]
    visible, hidden = choose_cases(cases, kills)
    assert visible[0] == 39
    assert 7 in visible
    assert len(visible) == 8
    assert len(hidden) == 24
    assert not set(visible) & set(hidden)


def test_choice_prefers_new_results_and_bounds_errors():
    cases = [found(n, "same") for n in range(20)] + [found(20 + n, f"other {n}") for n in range(10)]
    cases += [{"args": [n], "kwargs": {}, "raises": "ValueError", "harvested": True} for n in range(50, 60)]
    visible, _ = choose_cases(cases, [list(range(40))])
    assert sum("raises" in cases[index] for index in visible) <= 2
    assert sum(20 <= index < 30 for index in visible) >= 5


def test_rendered_file_runs_and_reads_like_one_written_by_hand(tmp_path: Path):
    cases = [
        Case(args=(encode_value(["b", "a"]),), expected=["a", "b"]),
        Case(args=(encode_value({"x": 1}),), kwargs={"reverse": True}, expected=["x"]),
        Case(args=(3,), raises="TypeError"),
        Case(args=(encode_value(("w" * 60, "v" * 60)),), expected=["v" * 60, "w" * 60]),
    ]
    text = render_tests("builtins", "sorted", cases, drain=False)
    assert "        self.assertEqual(sorted(['b', 'a']), ['a', 'b'])" in text
    assert "        with self.assertRaises(TypeError):\n            sorted(3)" in text
    assert "sorted({'x': 1}, reverse=True)" in text
    assert max(map(len, text.split("\n"))) <= 170
    namespace: dict[str, object] = {"__name__": "generated"}
    exec(text, namespace)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(namespace["TestSorted"])  # type: ignore[arg-type]
    result = unittest.TestResult()
    suite.run(result)
    assert (result.testsRun, result.failures, result.errors) == (4, [], [])
    drained = render_tests("builtins", "reversed", [Case(args=([1, 2],), expected=[2, 1])], drain=True)
    assert "self.assertEqual(list(reversed([1, 2])), [2, 1])" in drained


def test_paths_and_nan():
    assert visible_test_path("boltons.strutils") == "tests/test_strutils.py"
    assert visible_test_path("kit._private") == "tests/test_private.py"
    assert has_nan(encode_value([1, {"a": (float("nan"),)}]))
    assert not has_nan(encode_value([1, {"a": (float("inf"), "nan")}]))


def test_harvest_reads_doctests_tests_and_call_sites():
    source = '''
def f(a, b=1):
    """Doc.

    >>> f("x",
    ...   b=2)
    'x'
    >>> f(unknown)
    """
    return f([1, 2], 3), mod.f(-1), f()
'''
    calls = harvest_calls([source, "no python ( >>>"], ["f", "g"])
    assert calls == {"f": [([[1, 2], 3], {}), ([-1], {}), (["x"], {"b": 2})], "g": []}


def test_guesses_follow_names_annotations_and_defaults():
    def function(text, count, when: "datetime.datetime", flag=True, *rest, key=None):  # noqa: F821, UP037
        return text, count, when, flag, rest, key

    parameters = fuzz.parameters_of(inspect.signature(function))
    assert parameters is not None
    best = [max(parameter.types, key=lambda item: item[1])[0] for parameter in parameters]
    assert best[:4] == ["str", "int", "datetime", "bool"]
    assert [parameter.required for parameter in parameters] == [True, True, True, False, False, False]
    assert parameters[4].variadic
    assert parameters[5].keyword
    assert fuzz.parameters_of(inspect.signature(lambda: 0)) is None


def test_random_calls_fit_the_signature_and_repeat():
    def function(a, b, c=1, *rest, d=2):
        return a, b, c, rest, d

    signature = inspect.signature(function)
    parameters = fuzz.parameters_of(signature)
    assert parameters is not None
    literals = fuzz.literals_of("x = 'unit'\ny = 17\n")
    assert (literals.strings, literals.ints) == (["unit"], [17])

    def calls(seed: int):
        rng = random.Random(seed)
        return [fuzz.random_call(parameters, fuzz.random_shape(parameters, rng), rng, literals) for _ in range(200)]

    for args, kwargs in calls(1):
        signature.bind(*args, **kwargs)
    assert repr(calls(1)) == repr(calls(1))
    assert repr(calls(1)) != repr(calls(2))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "kit-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kit/__init__.py", "")
        archive.writestr("kit/a.py", "def f(x):\n    return x\n")
        archive.writestr("kit/sub/__init__.py", "")
        archive.writestr("kit/sub/b.py", "y = 1\n")
        archive.writestr("kit/tests/test_a.py", "f(12)\n")
        archive.writestr("kit/_vendor/c.py", "z = 1\n")
        archive.writestr("kit-1.0.dist-info/METADATA", "Name: Kit\nVersion: 1.0\nLicense: MIT\n\n>>> f(3)\n")
        archive.writestr("kit-1.0.dist-info/licenses/LICENSE.txt", "text")
    return path


def test_sources_are_pinned_and_cut_to_their_modules(wheel: Path):
    row = pin(wheel, ("kit/sub",))
    table = wheel.with_name("sources.toml")
    table.write_text(row)
    (source,) = load_table(table)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert source == Source("kit", "1.0", wheel.name, digest, "MIT", ("kit/sub",))
    fetch([source], wheel.parent)
    assert sorted(read_tree(source, wheel.parent).files) == ["LICENSE.txt", "kit/__init__.py", "kit/sub/__init__.py", "kit/sub/b.py"]
    everything = read_tree(Source("kit", "1.0", wheel.name, digest, "MIT", ()), wheel.parent)
    assert "kit/a.py" in everything.files
    assert not [path for path in everything.files if "test" in path or "_vendor" in path]
    texts = example_texts(everything, wheel.parent)
    assert harvest_calls(texts, ["f"]) == {"f": [([12], {}), ([3], {})]}


def test_a_changed_archive_is_refused(wheel: Path):
    source = Source("kit", "1.0", wheel.name, "0" * 64, "MIT", ())
    with pytest.raises(TaskError, match="sha256"):
        fetch([source], wheel.parent)
    with pytest.raises(TaskError, match="can't be read"):
        load_table(wheel.parent / "missing.toml")


def test_the_table_is_permissive_and_wide():
    sources = load_table()
    assert len({source.name for source in sources}) >= 20
    assert not [source.name for source in sources if "gpl" in source.licence.lower() or source.licence.lower() in ("", "unknown")]
    assert all(len(source.sha256) == 64 for source in sources if source.name != "stdlib")
