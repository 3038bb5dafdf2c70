"""Figures with their evidence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strop.core.errors import ConfigError
from strop.ui.results import KEYS, read_results, results_page, write_result

ROOT = Path(__file__).resolve().parents[2]
RESULT = {"bar": "decode", "goal": ">= 5x", "figure": 6.1234567, "met": True, "command": "python benchmarks/decode.py"}


def test_a_result_carries_its_evidence(tmp_path: Path):
    path = write_result(
        "main-decode", **RESULT, unit="x", interval=(5.8, 6.4), seeds=(0, 1), details={"batch": np.int64(32)}, directory=tmp_path
    )
    record = json.loads(path.read_text())
    assert set(KEYS) <= set(record)
    assert record["interval"] == [5.8, 6.4]
    assert record["details"] == {"batch": 32}
    assert record["versions"]["python"] == sys.version.split()[0]
    assert record["machine"]["cores"] >= 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["main-decode.json"]


def test_the_page_lists_every_bar(tmp_path: Path):
    write_result("main-decode", **RESULT, unit="x", interval=(5.8, 6.4), directory=tmp_path)
    write_result(
        "main-errors", **(RESULT | {"bar": "errors | all", "figure": "7 of 8", "met": False}), notes="quota untested", directory=tmp_path
    )
    write_result("main-share", **(RESULT | {"met": None}), directory=tmp_path)
    page = results_page(read_results(tmp_path))
    assert "1 of 2 bars met." in page
    assert "| decode | >= 5x | 6.123 x | 5.8 to 6.4 | yes | [main-decode](#main-decode) |" in page
    assert "| errors \\| all | >= 5x | 7 of 8 | - | **no** |" in page
    assert "quota untested" in page


@pytest.mark.parametrize(("suffix", "shown"), [("", "`0123456789ab`"), ("+dirty", "`0123456789ab+`")])
def test_the_page_says_whether_the_checkout_was_the_commit(tmp_path: Path, suffix: str, shown: str):
    write_result("main-x", **RESULT, directory=tmp_path)
    results = read_results(tmp_path)
    results["main-x"]["revision"] = "0123456789abcdef" + suffix
    page = results_page(results)
    assert f"revision {shown}," in page
    assert "A `+` after a revision" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Main_X"}, "lower case"),
        ({"interval": (2.0, 1.0)}, r"\(low, high\)"),
        ({"figure": float("nan")}, "JSON"),
        ({"details": {"x": object()}}, "not a JSON value"),
    ],
)
def test_what_can_not_be_written_is_refused(tmp_path: Path, change, message):
    arguments = {"name": "main-x", **RESULT} | change
    with pytest.raises(ConfigError, match=message):
        write_result(arguments.pop("name"), **arguments, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_result_is_named(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"bar": 1}')
    with pytest.raises(ConfigError, match=r"x.json is not a result: missing goal"):
        read_results(tmp_path)


def test_the_check_finds_an_old_page(tmp_path: Path):
    def run(*arguments: str) -> int:
        command = [sys.executable, "-m", "strop.ui.results", "--directory", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode

    write_result("main-x", **RESULT, directory=tmp_path)
    assert run("--check") == 1
    assert run() == 0
    assert run("--check") == 0


def test_the_results_of_this_repository_can_be_read():
    results_page(read_results(ROOT / "docs/results"))
