"""The report says what gives a kind away, and its gate holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fidelity_kit import world

from strop.core.errors import CheckpointError
from strop.fidelity.report import FidelityError, FidelityReport, make_report, read_report, require
from strop.fidelity.twosample import two_sample


def report_of(plant: str | None, boxes: int = 16) -> FidelityReport:
    rows = world(boxes, 8, 0, lambda prod, rng: {"hostname": (plant or "box") if prod else "box"})
    return make_report(two_sample(rows, permutations=40), rows, train="bubblewrap", production="docker")


def test_a_planted_difference_fails_the_gate_and_says_what_to_do():
    report = report_of("web-7")
    assert not report.passes
    finding = report.findings[0]
    assert (finding.probe, finding.train, finding.production, finding.randomise) == ("hostname", "box", "web-7", "hostname")
    text = "\n".join(report.lines())
    assert "can be told apart" in text
    assert 'domain = ["hostname"]' in text
    assert "gate: FAIL" in text


def test_equal_kinds_name_nothing():
    report = report_of(None)
    assert report.findings == ()
    assert "not told apart" in report.verdict


def test_few_boxes_are_warned_about():
    assert "only 16 boxes" in report_of(None).warning
    assert replace(report_of(None), boxes=(130, 130)).warning == ""


@pytest.mark.parametrize(("high", "passes"), [(0.6, True), (0.6001, False)])
def test_the_gate_is_the_upper_bound(high: float, passes: bool):
    assert replace(report_of(None), high=high).passes is passes


def test_a_report_comes_back_as_it_was_written(tmp_path: Path):
    report = report_of("web-7")
    report.write(tmp_path / "sub/report.json")
    assert read_report(tmp_path / "sub/report.json") == report


def test_the_page_shows_a_hostile_answer_as_text(tmp_path: Path):
    report = report_of("<script>alert(1)</script>")
    report.write_page(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "strop-fidelity-1"}', "[" * 100_000])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a fidelity report"):
        read_report(tmp_path / "report.json")


def test_a_recipe_takes_only_a_report_that_is_about_its_boxes_and_good_enough(tmp_path: Path):
    path = tmp_path / "report.json"
    with pytest.raises(CheckpointError, match="strop fidelity"):
        require(path, train="bubblewrap", max_auc=0.6)
    report_of("web-7").write(path)
    with pytest.raises(FidelityError, match=r"1\.000 > 0\.6 \(hostname"):
        require(path, train="bubblewrap", max_auc=0.6)
    with pytest.raises(FidelityError, match="audit those"):
        require(path, train="bubblewrap:uptime", max_auc=1.0)
    replace(report_of(None), high=0.55).write(path)
    assert require(path, train="bubblewrap", max_auc=0.6).high == 0.55
