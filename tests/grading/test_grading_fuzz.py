"""A few thousand random inputs; ``benchmarks/grading_fuzz.py`` does a hundred thousand."""

from __future__ import annotations

from pathlib import Path

from fuzz_world import Fuzz


def test_random_trees(tmp_path: Path) -> None:
    fuzz = Fuzz(1, tmp_path)
    for _ in range(1000):
        fuzz.tree()
    assert fuzz.written > 0


def test_random_diffs(tmp_path: Path) -> None:
    fuzz = Fuzz(2, tmp_path)
    for _ in range(300):
        fuzz.diff()


def test_random_streams(tmp_path: Path) -> None:
    fuzz = Fuzz(3, tmp_path)
    for _ in range(1500):
        fuzz.stream()
    assert fuzz.rewarded > 50, "the honest stream must be among them"
