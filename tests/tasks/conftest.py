"""A pool built from a small package by the real factory, in a real box, through the real gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.tasks.build import Build
from strop.tasks.factory import Candidate, Prepared, digests_of, find_candidates
from strop.tasks.sources import Source, Tree
from strop.tasks.trees import make_once, write_tree

TEXT_MODULE = '''\
"""Text helpers."""


def shorten(text, width, placeholder="..."):
    """Cut text to a width.

    >>> shorten("hello world", 8)
    'hello...'
    """
    if width < len(placeholder):
        raise ValueError("width too small")
    if len(text) <= width:
        return text
    end = width - len(placeholder)
    return text[:end].rstrip() + placeholder


def runs(items):
    """Yield (item, count) of equal neighbours."""
    last = None
    count = 0
    for item in items:
        if count and item == last:
            count += 1
            continue
        if count > 0:
            yield last, count
        last = item
        count = 1
    if count > 0:
        yield last, count
'''
NUMBER_MODULE = '''\
"""Number helpers."""

import time

from kit.text import shorten


def clamp_all(values, low, high):
    """Clamp every value into a range."""
    if low > high:
        raise ValueError("low is above high")
    result = []
    for value in values:
        if value < low:
            value = low
        elif value > high:
            value = high
        result.append(value)
    return result


def stamped(value, low=0, high=10):
    """Depends on the clock."""
    if value < low or value > high:
        return time.time() * 0 + value - 1
    return value + low * 2 + high


def labelled(value, width=6):
    """Uses another module."""
    text = str(value)
    if len(text) > width and width >= 3:
        return shorten(text, width)
    return text.rjust(width - 1) + "|" * (width % 3)


def renamed_runs(sequence):
    """The same as runs under other names."""
    previous = None
    number = 0
    for element in sequence:
        if number and element == previous:
            number += 1
            continue
        if number > 0:
            yield previous, number
        previous = element
        number = 1
    if number > 0:
        yield previous, number
'''
FILES = {
    "kit/__init__.py": b"",
    "kit/text.py": TEXT_MODULE.encode(),
    "kit/numbers.py": NUMBER_MODULE.encode(),
    "LICENSE": b"Do what you like.\n",
}


def kit_tree() -> Tree:
    return Tree(Source("kit", "1.0", "", "", "MIT", ()), dict(FILES))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, dict[str, list[Candidate]], list[Prepared]]:
    """The build after its slow first half, with its candidates and its prepared functions."""
    build = Build(out=tmp_path_factory.mktemp("pool") / "pool", seed=3, limit=0, workers=1)
    tree = kit_tree()
    build.trees[tree.tree_id] = tree
    make_once(build.work / "trees" / tree.tree_id, lambda folder: write_tree(tree.files, folder))
    for split, digest in digests_of(tree):
        build.digests[split].add(digest)
    candidates = {tree.tree_id: find_candidates(tree, [data.decode() for data in tree.files.values()], build.refused)}
    return build, candidates, build.prepare_all(candidates)


@pytest.fixture(scope="session")
def pool_dir(built: tuple[Build, dict[str, list[Candidate]], list[Prepared]]) -> Path:
    """The pool on disk: two mutants of each function."""
    build, _, prepared = built
    build.write(build.admit_all([("train", item, list(item.mutants[:2])) for item in prepared]))
    return build.out


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file rewritten within a second at the same size would be read from its stale bytecode; boxes write none either."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
