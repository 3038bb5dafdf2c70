"""The experiment on what router replay buys and costs: a few tiny runs, resumed, and the report made of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("routes_tradeoff")
    monkeypatch.setattr(module, "SMALL", module.Scale(steps=2, groups=4, group_size=4, warm_steps=4, eval_tasks=16))
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["routes_tradeoff.py", *arguments])
    script.main()


def test_the_walk_can_be_won(script: ModuleType) -> None:
    bed = sys.modules["routes_bed"]
    for number in range(200):
        target, place = bed.start_of(f"t{number}")
        for _ in range(bed.MAX_TURNS):
            place = bed.move(place, bed.best_action(target, place))
            if place == target:
                break
        assert place == target
    assert bed.move(3, [bed.LEFT, bed.LEFT]) == 3


def test_small_grid_resumes_and_reports(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, monkeypatch, "--small", "--out", str(tmp_path))
    printed = capsys.readouterr().out
    assert "8 runs, 0 of them done before" in printed
    assert "8/8 4-bf16-4-r3-1" in printed
    assert "left" in printed
    folder = tmp_path / "small"
    record = json.loads((folder / "routes-tradeoff.json").read_text(encoding="utf-8"))
    assert record["figure"] == "4 of 4 cells, at least 2 seeds each"
    assert record["met"] is False  # two seeds of four cells aren't the grid
    assert record["details"]["runs stopped by a check"] == {}
    assert record["details"]["warnings about the record"] == 0
    ElementTree.fromstring((folder / "routes-tradeoff.svg").read_text(encoding="utf-8"))
    page = (folder / "routes-tradeoff.md").read_text(encoding="utf-8")
    assert page.count("| 4 | bf16 |") == 4 + 2  # cells, and what auto takes
    (folder / "cells" / "4-bf16-1-r3-0.json").unlink()
    run(script, monkeypatch, "--small", "--out", str(tmp_path))
    assert "8 runs, 7 of them done before" in capsys.readouterr().out


def test_same_cell_same_figures(script: ModuleType, tmp_path: Path) -> None:
    cell = script.Cell(layers=4, precision="int8", updates=2, mode="r3", seed=3)
    first, second = (script.run_cell(cell, script.SMALL, tmp_path / "warm") for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["k3"] > 0
    assert not first["stopped"]
