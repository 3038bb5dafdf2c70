"""Field tables, TOML text and diffs: what was written is read back equal, and what is wrong is named."""

from __future__ import annotations

import datetime
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import TaskError
from strop.tasks.importers.diffs import files_of, reverse
from strop.tasks.importers.pool import decode_plain, encode_plain
from strop.tasks.importers.schema import Field, Nested, Table, integer, list_of, text
from strop.tasks.importers.toml_text import dump_toml

INNER = Table(name="inner", fields={"count": Field(check=integer(minimum=1), required=True)})
OUTER = Table(
    name="outer",
    fields={
        "name": Field(check=text(choices=("a", "b"))),
        "items": Field(check=Nested(INNER, is_list=True)),
        "words": Field(check=list_of(text())),
    },
)


def test_a_table_keeps_what_was_given_and_only_that() -> None:
    assert OUTER.read({"items": [{"count": 2}]}, "x") == {"items": [{"count": 2}]}
    assert OUTER.read({}, "x") == {}
    assert list(OUTER.paths()) == ["name", "items", "items[].count", "words"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"nam": "a"}, "x: unknown key 'nam'. Did you mean 'name'?"),
        ({"name": "c"}, "x.name is 'c'. Known: a, b."),
        ({"items": [{"count": 1}, {}]}, "x.items[1]: the key 'count' is missing; inner needs it"),
        ({"items": [{"count": True}]}, "x.items[0].count is True, expected an integer"),
        ({"items": [{"count": 0}]}, "x.items[0].count is 0, expected at least 1"),
        ({"items": [{"count": 1, "cuont": 1}]}, "x.items[0]: unknown key 'cuont'. Did you mean 'count'?"),
        ({"words": ["ok", "\ud800"]}, "x.words[1] is '\\ud800', expected text without lone surrogates"),
        ({"words": None}, "x.words is None, expected a list"),
        ([], "x is [], expected a table with the keys of outer"),
    ],
)
def test_what_is_wrong_is_named(data: Any, said: str) -> None:
    with pytest.raises(TaskError) as error:
        OUTER.read(data, "x")
    assert str(error.value) == said


SCALARS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.datetimes(timezones=st.just(datetime.UTC) | st.none())
    | st.dates()
    | st.times()
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.just("$toml")
DOCUMENTS = st.dictionaries(
    KEYS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8),
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(DOCUMENTS)
def test_toml_text_and_stored_data_come_back_equal(document: dict[str, Any]) -> None:
    assert tomllib.loads(dump_toml(document)) == document
    assert decode_plain(encode_plain(document)) == document


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TaskError, match="bytes has no TOML notation"):
        dump_toml({"a": b""})


# ------------------------------------------------------------------------------------------------ diffs


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    settings_ = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.autocrlf=false", "-c", "core.quotePath=true")
    return subprocess.run(["git", *settings_, *arguments], cwd=folder, input=stdin, capture_output=True, check=True).stdout


LINES = st.lists(st.sampled_from(["a", "b\r", "", "-x", "+y", " z", "\\q", "--- u", "+++ v", "@@ -1 +1 @@", "\x0cform"]), max_size=8)
TREES = st.dictionaries(st.sampled_from(["a.txt", "b c.txt", "dir/ü.txt"]), LINES.map("\n".join), max_size=3)


@settings(max_examples=8, deadline=None)
@given(TREES, TREES, st.booleans())
def test_git_applies_a_reversed_diff_and_gets_the_old_tree(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, str], new: dict[str, str], renames: bool
) -> None:
    folder = tmp_path_factory.mktemp("repo")
    git(folder, "init", "-q")
    trees = []
    for tree in (old, new):
        for path in [entry for entry in folder.rglob("*") if entry.is_file() and ".git" not in entry.parts]:
            path.unlink()
        for name, content in tree.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content.encode())
        git(folder, "add", "-A")
        trees.append(git(folder, "write-tree"))
    diff = git(folder, "diff-tree", "-p", *(["-M"] if renames else []), *(tree.decode().strip() for tree in trees)).decode()
    if not diff:
        return
    back = reverse(diff)
    assert reverse(back) == diff
    git(folder, "apply", "--cached", "-", stdin=back.encode())
    assert git(folder, "write-tree") == trees[0]


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ("", "empty diff"),
        ("hello\n", "no file in the diff"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 0\n", "binary"),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "copy"),
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n", "don't add up"),
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n*b\n", "expected one that begins"),
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ 1 @@\n", "expected '@@"),
    ],
)
def test_no_diff_is_turned_around_wrongly(diff: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        reverse(diff)


def test_the_files_of_a_diff() -> None:
    assert files_of("--- a/x y\n+++ b/x y\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new\n") == ("new", "x y")
