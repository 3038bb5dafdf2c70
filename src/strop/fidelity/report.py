"""What an audit says: the verdict, the gate, the probes that give a kind away, and what to do about each. As text, JSON and a page."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strop.core.errors import CheckpointError, StropError
from strop.fidelity.collect import Observation
from strop.fidelity.probes import PROBES, Value, printable
from strop.fidelity.twosample import ProbeScore, TwoSample

ENOUGH_BOXES = 130
"""Boxes a side that find an area of 0.6 with 80 % power, two-sided at 5 %. Source: Hanley and McNeil, "The meaning and use of the area
under a receiver operating characteristic curve", Radiology 143, 1982, for the variance."""
MAX_AUC = 0.6
FORMAT = "strop-fidelity-1"
_NAMED_P = 0.05


class FidelityError(StropError):
    """The boxes of training can be told from those of production, or it isn't known whether they can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One probe that tells the kinds apart.

    Attributes:
        probe: Its name.
        kind: ``"static"``, ``"dynamic"`` or ``"transcript"``.
        auc: Held-out area with this probe alone.
        p_value: Of the best of all probes on equal kinds.
        drop: What the full classifier loses without it.
        train: What boxes of training answer.
        production: What boxes of production answer.
        equalise: How to make them answer alike.
        randomise: Setting of ``sandbox.domain`` that draws it, or empty.
    """

    probe: str
    kind: str
    auc: float
    p_value: float
    drop: float
    train: str
    production: str
    equalise: str
    randomise: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """An audit.

    Attributes:
        train: Kind of the training boxes, as given.
        production: Kind of the production boxes, as given.
        auc: Held-out area under the ROC curve.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: Of the permutation test.
        boxes: Boxes of each kind, training first.
        groups: Tasks.
        max_auc: The gate: ``high`` may be at most this.
        seed: Of everything drawn.
        findings: Probes that tell the kinds apart, best first.
        ranking: Every probe whose answers differ between boxes: ``{"probe", "auc", "p_value", "drop"}``, best first.
    """

    train: str
    production: str
    auc: float
    low: float
    high: float
    p_value: float
    boxes: tuple[int, int]
    groups: int
    max_auc: float
    seed: int
    findings: tuple[Finding, ...]
    ranking: tuple[Mapping[str, Any], ...]

    @property
    def passes(self) -> bool:
        """Whether the gate lets it through."""
        return self.high <= self.max_auc

    @property
    def warning(self) -> str:
        """What the number of boxes can't support; empty if it is enough."""
        if min(self.boxes) >= ENOUGH_BOXES:
            return ""
        return (
            f"only {min(self.boxes)} boxes a side: an area of 0.6 is found with 80 % power from {ENOUGH_BOXES} on, "
            "so that 'not told apart' means no more than 'not shown to differ'"
        )

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.low > 0.5 and self.p_value <= _NAMED_P:
            return "the kinds can be told apart"
        return "the kinds were not told apart" if self.passes else "the kinds were not told apart, but not shown to be alike either"

    def lines(self) -> list[str]:
        """The report as text."""
        head = f"{self.train} against {self.production}: {self.boxes[0]} + {self.boxes[1]} boxes, {self.groups} tasks"
        found = [head, f"AUC {self.auc:.3f} [{self.low:.3f}, {self.high:.3f}], permutation p = {self.p_value:.3f}: {self.verdict}"]
        if self.warning:
            found.append(f"warning: {self.warning}")
        if self.findings:
            found += ["", f"{'probe':24}{'kind':12}{'AUC alone':>10}{'p':>8}{'loss':>8}  training | production"]
        for row in self.findings:
            found.append(f"{row.probe:24}{row.kind:12}{row.auc:>10.3f}{row.p_value:>8.3f}{row.drop:>8.3f}  {row.train} | {row.production}")
        if self.findings:
            found += ["", "to equalise:", *(f"  {row.probe}: {row.equalise}" for row in self.findings)]
        if settings := self.settings:
            found += ["or to randomise, on both sides, where production itself varies:", f"  [sandbox] domain = {json.dumps(settings)}"]
        sign, word = ("<=", "pass") if self.passes else (">", "FAIL")
        return [*found, "", f"gate: {word}, upper bound {self.high:.3f} {sign} {self.max_auc:g}"]

    @property
    def settings(self) -> list[str]:
        """Settings of ``sandbox.domain`` that draw what the findings name."""
        return list(dict.fromkeys(row.randomise for row in self.findings if row.randomise))

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, **asdict(self), "passes": self.passes, "verdict": self.verdict, "warning": self.warning}
        path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    def write_page(self, path: Path) -> None:
        """Write the report as one HTML file."""
        columns = ("probe", "kind", "auc", "p_value", "drop", "train", "production", "equalise", "randomise")
        found = _table(columns, [[_cell(getattr(row, name)) for name in columns] for row in self.findings])
        alone = _table(("probe", "auc", ""), [[_cell(row["probe"]), _cell(row["auc"]), _bar(row["auc"])] for row in self.ranking[:30]])
        title = html.escape(f"{self.train} against {self.production}")
        summary = html.escape("\n".join(line for line in (*self.lines()[:3], self.lines()[-1]) if line))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>body{{font:15px system-ui;margin:2em auto;'
            "max-width:75em;padding:0 1em}table{border-collapse:collapse;margin:1em 0}td,th{border-bottom:1px solid #ccc;padding:.3em .7em;"
            "text-align:left;vertical-align:top;overflow-wrap:anywhere}.bar{background:#3b6ea5;height:.8em}</style>"
            f"<h1>{title}</h1><pre>{summary}</pre><h2>What gives a kind away</h2>{found}"
            f"<h2>Each probe alone</h2>{alone}</html>\n",
            encoding="utf-8",
        )


def _cell(value: object) -> str:
    return html.escape(f"{value:.3f}" if isinstance(value, float) else str(value))


def _bar(auc: float) -> str:
    return f'<div style="width:20em"><div class="bar" style="width:{100 * max(0.0, 2 * auc - 1):.0f}%"></div></div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns)
    return f"<table><tr>{head}</tr>{''.join('<tr>' + ''.join(f'<td>{cell}</td>' for cell in row) + '</tr>' for row in rows)}</table>"


def make_report(
    test: TwoSample, observations: Sequence[Observation], *, train: str, production: str, max_auc: float = MAX_AUC, seed: int = 0
) -> FidelityReport:
    """Put the result of a test into words.

    Args:
        test: The result.
        observations: What it is the result of.
        train: Kind of the training boxes.
        production: Kind of the production boxes.
        max_auc: The gate.
        seed: Written into the report.
    """
    named = [row for row in test.probes if row.p_value <= _NAMED_P and row.auc > 0.5]
    return FidelityReport(
        train=train,
        production=production,
        auc=test.auc,
        low=test.low,
        high=test.high,
        p_value=test.p_value,
        boxes=test.boxes,
        groups=test.groups,
        max_auc=max_auc,
        seed=seed,
        findings=tuple(_finding(row, observations) for row in named),
        ranking=tuple({"probe": row.name, "auc": row.auc, "p_value": row.p_value, "drop": row.drop} for row in test.probes),
    )


def _finding(row: ProbeScore, observations: Sequence[Observation]) -> Finding:
    probe = PROBES[row.name]
    sides = [[box.values[row.name] for box in observations if box.is_production == side] for side in (False, True)]
    train, production = _summaries(*sides)
    return Finding(
        probe=row.name,
        kind=probe.kind,
        auc=row.auc,
        p_value=row.p_value,
        drop=row.drop,
        train=train,
        production=production,
        equalise=probe.equalise,
        randomise=probe.randomise,
    )


def _summaries(train: Sequence[Value], production: Sequence[Value]) -> tuple[str, str]:
    """What the two sides answer: medians of numbers; the members of sets in which they differ most; the commonest text."""
    if all(isinstance(value, tuple) for value in (*train, *production)):
        shares = [Counter(item for value in side if isinstance(value, tuple) for item in set(value)) for side in (train, production)]
        gaps = {item: shares[0][item] / len(train) - shares[1][item] / len(production) for item in {*shares[0], *shares[1]}}
        worst = sorted(gaps, key=lambda item: (-abs(gaps[item]), item))[:3]
        more = [", ".join(item for item in worst if sign * gaps[item] > 0) for sign in (1, -1)]
        return _cut(more[0] or "-"), _cut(more[1] or "-")
    return _summary(train), _summary(production)


def _summary(values: Sequence[Value]) -> str:
    numbers = sorted(value for value in values if isinstance(value, float))
    if len(numbers) * 2 > len(values):
        low, middle, high = (numbers[math.floor(share * (len(numbers) - 1))] for share in (0.1, 0.5, 0.9))
        return f"{middle:.4g} ({low:.4g} to {high:.4g})"
    counts = Counter(", ".join(value) if isinstance(value, tuple) else str(value) for value in values)
    (text, count), kinds = counts.most_common(1)[0], len(counts)
    return _cut(text) + (f" ({count} of {len(values)}, {kinds} forms)" if kinds > 1 else "")


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def read_report(path: Path) -> FidelityReport:
    """Read what ``FidelityReport.write`` wrote.

    Raises:
        CheckpointError: No such file, or not a report.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT!r}")
        for derived in ("format", "passes", "verdict", "warning"):
            record.pop(derived, None)
        record["boxes"] = (int(record["boxes"][0]), int(record["boxes"][1]))
        record["findings"] = tuple(Finding(**row) for row in record["findings"])
        record["ranking"] = tuple(record["ranking"])
        report = FidelityReport(**record)
        if not all(isinstance(value, float) and math.isfinite(value) for value in (report.low, report.high, report.auc)):
            raise ValueError("an area is not a number")
    except FileNotFoundError:
        raise CheckpointError(
            f"fidelity report {path} does not exist; make it with: strop fidelity TRAIN PRODUCTION --out {path}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a fidelity report: {error}") from None
    return report


def require(path: Path, *, train: str, max_auc: float) -> FidelityReport:
    """Return the report of a recipe that requires one.

    Args:
        path: The report.
        train: Kind of box that the recipe trains in.
        max_auc: The recipe's gate.

    Raises:
        CheckpointError: No report there.
        FidelityError: It is about other boxes, or its upper bound lies above the gate.
    """
    report = read_report(path)
    if report.train != train:
        raise FidelityError(f"{path} is about boxes of kind {report.train!r}, but this recipe trains in {train!r}; audit those")
    if not report.high <= max_auc:
        worst = ", ".join(row.probe for row in report.findings[:3]) or "no single probe; ask more boxes"
        raise FidelityError(
            f"{path}: training and production boxes may be told apart: upper bound of the AUC {report.high:.3f} > {max_auc:g} ({worst})"
        )
    return report
