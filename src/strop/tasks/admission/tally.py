"""What a build made of a source: numbers by kind, reasons, seconds. Pure data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STATUSES = ("admitted", "refused", "quarantined")


@dataclass(slots=True)
class SourceTally:
    """Numbers of one source.

    Attributes:
        source: Its name.
        problem: Why it can't be used, ``""`` if it can.
        lines: Lines of its packages' code.
        tests: Tests that passed three times.
        suite_s: Processor seconds of all of them.
        probe_s: Seconds until its suite ran.
        seconds: Seconds in all.
        counts: (kind, status) -> drafts.
        reasons: (kind, status, reason) -> drafts.
        spent: (kind, status) -> seconds of the gate.
        notes: What was left out while reading and running, by reason.
    """

    source: str
    problem: str = ""
    lines: int = 0
    tests: int = 0
    suite_s: float = 0.0
    probe_s: float = 0.0
    seconds: float = 0.0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    spent: dict[tuple[str, str], float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str, status: str, reason: str, seconds: float) -> None:
        """Count a verdict."""
        self.counts[kind, status] += 1
        self.spent[kind, status] = self.spent.get((kind, status), 0.0) + seconds
        if reason:
            self.reasons[kind, status, short_reason(reason)] += 1

    def number(self, kind: str, status: str) -> int:
        """Drafts of a kind with a status."""
        return self.counts[kind, status]

    def made(self, kind: str) -> int:
        """Drafts of a kind."""
        return sum(self.counts[kind, status] for status in STATUSES)

    def gate_s(self, kind: str) -> float:
        """Seconds that the gate spent on a kind."""
        return sum(seconds for (name, _), seconds in self.spent.items() if name == kind)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        kinds = sorted({kind for kind, _ in self.counts})
        return {
            "problem": self.problem,
            "lines": self.lines,
            "tests": self.tests,
            "suite_s": round(self.suite_s, 3),
            "probe_s": round(self.probe_s, 1),
            "seconds": round(self.seconds, 1),
            "kinds": {kind: {status: self.counts[kind, status] for status in STATUSES} for kind in kinds},
            "gate_s": {kind: round(self.gate_s(kind), 1) for kind in kinds},
            "reasons": [[*key, number] for key, number in self.reasons.most_common()],
            "notes": dict(self.notes),
        }


def short_reason(reason: str) -> str:
    """The part of a reason that many drafts share: up to the first colon or number of tests."""
    head = reason.split(":")[0].strip()
    words = ["N" if word.isdigit() else word for word in head.split()]
    return " ".join(words)[:120]
