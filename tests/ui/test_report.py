"""The report: complete, self-contained, and never made of what agents wrote."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Flag, Scored
from strop.ledger import CostBook
from strop.store import RunDir
from strop.ui.report import build_report
from strop.ui.svg import Series, heat_map, line_chart, nice_ticks, standalone


class Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        assert tag not in ("script", "img", "iframe")
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path):
    opened = RunDir.create(tmp_path / "r", RunConfig(name="<b>my run</b>"))
    yield opened
    opened.close()


def fill(run: RunDir) -> None:
    for step in range(3):
        flags = (Flag(rule="<script>alert(1)</script>", severity="hack", evidence="x"),) if step == 1 else ()
        key = EpisodeKey(phase="rl", step=step, task_id="t", sample=0)
        run.store.put_episode(Episode(key=key, traces=(), turns=(), stop_reason="submitted", outcome=Scored(reward=1.0, flags=flags)))
        loads = {f"routes/load_layer{layer}_expert{expert}": 0.25 for layer in range(2) for expert in range(4)}
        run.store.log(
            step, {"rl/success_frac": 0.1 * step, "numerics/logprob_diff_max_nats": 0.0, "numerics/route_mismatch_frac": 0.0} | loads
        )
        CostBook(run.store).add("rl", step, {"cost/wall_s": 10.0, "cost/cpu_s": 19.0})
        run.store.commit_step(step)
    trained = {"policy": "rl", "success_frac": 0.42, "low_frac": 0.4, "high_frac": 0.44}
    run.store.put_fact("evaluations", [{"policy": "base", "success_frac": 0.01}, trained])
    run.store.put_fact("baselines", [{"policy": "random edits", "success_frac": 0.31}])
    interval = {"mean": 0.41, "low": 0.3, "high": 0.5}
    run.store.put_fact("promotion", {"promote": True, "gain": 0.41, "interval": interval, "reason": "rl is better"})
    run.store.set_stage("rl_eval")


def test_an_empty_run_has_a_report(run):
    page = build_report(run.store)
    Checker().feed(page)
    assert "not finished, last stage done: none" in page


def test_every_section_and_nothing_from_outside(run):
    fill(run)
    page = build_report(run.store)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(link.startswith("#") for link in checker.links)
    assert "http" not in page
    for part in ("Result", "Learning", "Routers", "Numerics and certificate", "Cost", "Episodes and flags", "Use it", "Configuration"):
        assert f"<h2>{part}" in page
    for part in ("1.0 → 42.0 %", "+41.0 points", "40.0 to 44.0 %", "random edits 31.0 %", "30 s", "57 CPU s", "Promotion gate: promoted"):
        assert part in page, part
    assert page.count('class="cell"') == 2 * 4 * 3


def test_what_agents_wrote_is_never_markup(run):
    fill(run)
    page = build_report(run.store)
    assert "<script>" not in page
    assert "<b>my run</b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_missing_points_break_the_line():
    chart = line_chart([Series(label="a", points=[(0, 1), (1, 2), (2, float("nan")), (3, 1), (4, 2)])], x_label="x", y_label="y")
    assert chart.count("<polyline") == 2
    assert "nan" not in chart


def test_labels_of_close_baselines_do_not_overlap():
    chart = line_chart(
        [Series(label="a", points=[(0, 0), (1, 1)])], x_label="x", y_label="y", lines=[("p", 0.5), ("q", 0.501), ("r", 0.502)]
    )
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start">[pqr] ', chart))
    assert len(heights) == 3
    assert all(b - a >= 13.9 for a, b in itertools.pairwise(heights))


def test_a_chart_without_points_is_empty():
    assert line_chart([], x_label="x", y_label="y") == ""


def test_a_chart_as_a_file_is_one_document_with_title_and_legend():
    series = [Series(label="a < b", points=[(0, 1), (1, 2)], color="#123456", dashed=True)]
    root = ElementTree.fromstring(standalone(line_chart(series, x_label="x", y_label="y"), series, "T & U"))
    texts = ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["T & U", "a < b"]
    assert {"x", "y"} <= set(texts)


@pytest.mark.parametrize("chart", ["", "<svg></svg>"])
def test_only_a_line_chart_becomes_a_file(chart: str):
    with pytest.raises(ValueError, match="not a line chart"):
        standalone(chart, [], "t")


def test_heat_map_cells_are_bounded():
    cells = re.findall(r'fill-opacity="([\d.]+)"', heat_map([[0.0, 9.0, float("nan")]], title="t", x_label="x", y_label="y", top=1.0))
    assert [float(cell) for cell in cells] == [0.0, 1.0]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.13), (-3, 400), (5, 5)])
def test_ticks_cover_the_range(low, high):
    ticks = nice_ticks(low, high, 5)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= 12
