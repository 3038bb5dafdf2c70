"""The catalogue is complete, deterministic, parseable and closed under inversion."""

from __future__ import annotations

import ast
import difflib
import inspect
import posixpath
import shlex
import statistics
import string
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks import catalogue
from strop.tasks.mutation import (
    DEFAULT_KINDS,
    IDENTIFIER_KINDS,
    Edit,
    FunctionSpan,
    apply_edit,
    candidate_edits,
    find_functions,
    inverse,
    normalised_digest,
)
from strop.tasks.split import module_of, split_of

SAMPLE = '''\
import math


class Table:
    def pick(self, rows, start, stop=10, *extra, strict=True):
        """Doc with < and 0 and `not`."""
        best = None
        total = 0
        for i, row in enumerate(rows[start:], 1):
            if not row and i not in extra or row is None:
                continue
            if strict and row[0] < stop and best is not None:
                best = max(best, row[-1] - 1)
            total += len(row[i + 1:]) * 2 + f"{row < 3}".count(" ")
        text = """a < b
        1 < 2""" + str(total).rstrip()
        return (best if total % 2 else text.lower()), math.floor(total / (stop - start))


def last(items): return items[-1] if items else None
'''
MODULES = [SAMPLE, *(inspect.getsource(module) for module in (textwrap, posixpath, shlex, string, statistics, difflib))]


def alone(source: str, span: FunctionSpan) -> tuple[str, FunctionSpan]:
    """A module of one function, under a class where it was a method."""
    text = "\n".join(source.split("\n")[span.start_line - 1 : span.end_line])
    first = 2 if text.startswith(" ") else 1
    return "class _:\n" * (first - 1) + text, FunctionSpan(span.name, first, first + span.end_line - span.start_line)


FUNCTIONS = [alone(source, span) for source in MODULES for span in find_functions(source) if span.end_line - span.start_line < 40]


def test_finds_functions_and_methods():
    assert find_functions(SAMPLE) == [FunctionSpan("Table.pick", 5, 17), FunctionSpan("last", 20, 20)]
    assert find_functions("def broken(:") == []


def test_sample_has_every_expected_edit():
    edits = candidate_edits(SAMPLE, find_functions(SAMPLE)[0])
    assert {edit.kind for edit in edits} == set(DEFAULT_KINDS)
    for expected in (
        Edit("comparison", 12, "<", "<="),
        Edit("identity", 10, "not in", "in"),
        Edit("identity", 10, "None", "not None"),
        Edit("identity", 12, "not None", "None"),
        Edit("negation", 10, "not row", "row"),
        Edit("negation", 12, "strict", "not strict"),
        Edit("boolean", 10, "or", "and"),
        Edit("constant", 5, "True", "False"),
        Edit("constant", 5, "10", "11"),
        Edit("slice", 13, "-1", "1"),
        Edit("slice", 9, "start", "start + 1"),
        Edit("slice", 14, "i + 1", "i"),
        Edit("arithmetic", 17, "/", "//"),
        Edit("augmented", 14, "+=", "-="),
        Edit("call", 13, "max", "min"),
        Edit("call", 17, "floor", "ceil"),
        Edit("control", 11, "continue", "break"),
        Edit("argument_swap", 13, "best, row[-1] - 1", "row[-1] - 1, best"),
        Edit("return_value", 17, "best if total % 2 else text.lower()", "text.lower() if total % 2 else best"),
        Edit("variable", 17, "stop", "start"),
    ):
        assert expected in edits, expected


def test_leaves_docstrings_strings_and_loop_syntax_alone():
    edits = candidate_edits(SAMPLE, find_functions(SAMPLE)[0])
    assert not [edit for edit in edits if edit.line in (6, 15, 16)]
    assert not [edit for edit in edits if edit.line == 9 and edit.kind == "identity"]
    assert all("row < 3" in apply_edit(SAMPLE, edit) for edit in edits)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_closed_under_inversion(data: st.DataObject):
    source, span = data.draw(st.sampled_from(FUNCTIONS))
    edits = candidate_edits(source, span)
    if not edits:
        return
    edit = data.draw(st.sampled_from(edits))
    mutant = apply_edit(source, edit)
    assert mutant != source
    ast.parse(mutant)
    undo = inverse(source, edit)
    assert apply_edit(mutant, undo) == source
    assert undo.kind == edit.kind
    assert undo in candidate_edits(mutant, span)


@pytest.mark.parametrize("index", range(len(MODULES)))
def test_every_candidate_is_a_unique_edit_call(index: int):
    source = MODULES[index]
    lines = source.split("\n")
    for span in find_functions(source):
        edits = candidate_edits(source, span)
        assert edits == candidate_edits(source, span)
        assert len({(edit.line, edit.old, edit.new) for edit in edits}) == len(edits)
        for edit in edits:
            assert edit.old
            assert edit.old != edit.new
            assert edit.old == edit.old.strip()
            assert span.start_line <= edit.line <= span.end_line
            assert lines[edit.line - 1].count(edit.old) == 1


def test_candidates_depend_on_the_function_only():
    span = find_functions(SAMPLE)[1]
    moved = "x = 1\n" + SAMPLE
    shifted = [Edit(e.kind, e.line - 1, e.old, e.new) for e in candidate_edits(moved, FunctionSpan("last", 21, 21))]
    assert shifted == candidate_edits(SAMPLE, span)


def test_kinds_filter_splits_the_list():
    span = find_functions(SAMPLE)[0]
    identifiers = candidate_edits(SAMPLE, span, IDENTIFIER_KINDS)
    rest = candidate_edits(SAMPLE, span, catalogue.TOKEN_KINDS)
    assert identifiers
    assert {edit.kind for edit in identifiers} <= set(IDENTIFIER_KINDS)
    assert sorted(map(repr, identifiers + rest)) == sorted(map(repr, candidate_edits(SAMPLE, span)))


@pytest.mark.parametrize(
    "table", [catalogue.COMPARISON, catalogue.ARITHMETIC, catalogue.FUNCTIONS, catalogue.METHODS, catalogue.EMPTY_STRINGS]
)
def test_tables_are_symmetric(table: dict[str, tuple[str, ...]]):
    for name, others in table.items():
        assert name not in others
        for other in others:
            assert name in table[other]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (Edit("x", 1, "b", "c"), "isn't in"),
        (Edit("x", 1, "a", "c"), "more than once"),
        (Edit("x", 9, "a", "c"), "2 lines"),
        (Edit("x", 0, "a", "c"), "2 lines"),
        (Edit("x", 1, "", "c"), "isn't in"),
    ],
)
def test_wrong_edits_are_refused(edit: Edit, words: str):
    with pytest.raises(TaskError, match=words):
        apply_edit("aa\nb", edit)


def test_old_may_span_lines():
    assert apply_edit("a = 1\nb = 2\n", Edit("x", 1, "1\nb", "2\nc")) == "a = 2\nc = 2\n"


def test_non_ascii_columns():
    source = 'def f(a, b):\n    return "äöü€" if a < b else g("ß", a, b)\n'
    span = find_functions(source)[0]
    edits = candidate_edits(source, span)
    assert Edit("argument_swap", 2, "a, b", "b, a") in edits
    assert Edit("variable", 2, "b)", "a)") in edits
    for edit in edits:
        assert inverse(source, edit) in candidate_edits(apply_edit(source, edit), span)


def test_digest_ignores_names_and_values_but_not_shape():
    one = 'def f(a, b):\n    """Doc."""\n    return a.x(b, 1)\n'
    two = "def other(left: int, right: str) -> int:\n    return left.x(right, 2)\n"
    digests = [
        normalised_digest(text, find_functions(text)[0])
        for text in (one, two, two.replace(".x(", ".y("), two.replace("right, 2", "left, 2"))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    method = textwrap.indent(one, "    ")
    source = f"class A:\n{method}"
    assert normalised_digest(source, find_functions(source)[0]) == digests[0]


def test_split_is_stable_and_about_a_fifth():
    assert split_of("stdlib", "textwrap") == split_of("stdlib", "textwrap")
    shares = [split_of("p", f"m{i}") for i in range(2000)].count("heldout") / 2000
    assert 0.16 < shares < 0.24
    # Pinned: changing the hash would leak held-out modules into a base that was trained before.
    assert [split_of("boltons", f"boltons.{name}") for name in ("strutils", "dictutils", "urlutils")] == ["train", "train", "heldout"]
    assert module_of("a/b/__init__.py") == "a.b"
    assert module_of("a/b.py") == "a.b"
