"""What the report shows, read from a run's store. Kept apart from the page, so that tests and other pages can use it.

The pipeline leaves these facts (``store.put_fact``), each optional:

- ``evaluations``: rows in order of the pipeline, ``{"policy": "base", "success_frac": .03, "low_frac": .01, "high_frac": .05,
  "first_edit_right_frac": .02, "best_of_8_frac": .1, "no_system_frac": .03, "hard_frac": .01, "tasks": 128, "samples": 8}``;
- ``baselines``: rows of the same form, policies ``unchanged``, ``random edits``, ``expert``, ...;
- ``promotion``: the gate's ``Decision`` as a dict;
- ``promoted``: name of the checkpoint that serves.

The certificate is ``certificate.json`` of the run directory (``strop.numerics.certificate``).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.ledger import CostBook
from strop.store.store import Store

_LOAD = re.compile(r"routes/load_layer(\d+)_expert(\d+)")

EVALUATION_COLUMNS = (
    ("policy", "policy"),
    ("success_frac", "held-out success"),
    ("interval", "95 % interval"),
    ("first_edit_right_frac", "first edit right"),
    ("best_of_8_frac", "best of 8"),
    ("no_system_frac", "without system prompt"),
    ("hard_frac", "harder split"),
    ("tasks", "tasks"),
    ("samples", "samples each"),
)
"""Keys of an evaluation row and their headings; a column without values is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything the report shows.

    Attributes:
        config: The configuration as JSON values.
        facts: Revision, versions, machine, creation time.
        stage: The last stage that is done.
        evaluations, baselines: Evaluation rows.
        rl: The metrics of RL steps in order.
        loads: Load by layer: ``{layer: [[share by step] by expert]}``.
        certificate, promotion: Names and values.
        costs: Rows of the cost book.
        phases: Phases in the cost book.
        flags: Rows ``{"rule", "episodes", "share of episodes", "mean reward"}``.
        outcomes: Rows ``{"phase", "episodes", "scored", "ungraded", "failed"}``.
    """

    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    stage: str
    evaluations: Sequence[Mapping[str, Any]]
    baselines: Sequence[Mapping[str, Any]]
    rl: Sequence[Mapping[str, Any]]
    loads: Mapping[int, Sequence[Sequence[float]]]
    certificate: Mapping[str, Any]
    promotion: Mapping[str, Any]
    costs: Sequence[Mapping[str, Any]]
    phases: Sequence[str]
    flags: Sequence[Mapping[str, Any]]
    outcomes: Sequence[Mapping[str, Any]]


def collect(store: Store) -> ReportData:
    """Read the report's data from a store."""
    record = json.loads((store.path / "config.json").read_text(encoding="utf-8"))
    rl = store.metrics(phase="rl")
    book = CostBook(store)
    flags, outcomes = _flags_and_outcomes(store)
    return ReportData(
        config=record["config"],
        facts={key: value for key, value in record.items() if key != "config"},
        stage=store.stage(),
        evaluations=store.fact("evaluations", []),
        baselines=store.fact("baselines", []),
        rl=rl,
        loads=_loads(rl),
        certificate=_certificate(store.path / "certificate.json"),
        promotion=store.fact("promotion", {}),
        costs=book.table(),
        phases=list(book.by_phase()),
        flags=flags,
        outcomes=outcomes,
    )


def _certificate(path: Path) -> dict[str, Any]:
    """Return what a person wants to see of the certificate; the file has every tensor."""
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    body = record["body"]
    shown = {
        "file": path.name,
        "certificate digest": record["digest"],
        "mode": body["mode"],
        "tensors certified": len(body["tensors"]),
        **{f"weights sent to {name}": engine["sent"] for name, engine in body["engines"].items()},
        **{f"weights {name} holds": engine["loaded"] for name, engine in body["engines"].items()},
        "certificate before it": body["previous"] or "none",
        "equivalence class": body["fingerprint"].get("digest", ""),
        "steps in the chain of digests": len(body["chain"]),
        "weights after the last step": body["chain"][-1][1] if body["chain"] else "",
    }
    canary = body.get("canary") or {}
    if canary:
        shown["canary"] = f"{canary['tokens']} tokens, largest difference {canary['logprob_diff_max_nats']:g} nats"
    return shown


def curve(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return ``(step, value)`` of the records that have a key."""
    return [(float(record["step"]), float(record[key])) for record in records if key in record]


def _loads(records: Sequence[Mapping[str, Any]]) -> dict[int, list[list[float]]]:
    found: dict[tuple[int, int], dict[int, float]] = {}
    with_loads = []
    for record in records:
        hits = {(int(m[1]), int(m[2])): value for key, value in record.items() if (m := _LOAD.fullmatch(key))}
        if hits:
            for place, value in hits.items():
                found.setdefault(place, {})[len(with_loads)] = value
            with_loads.append(record)
    layers: dict[int, list[list[float]]] = {}
    for layer, expert in sorted(found):
        row = [found[layer, expert].get(column, math.nan) for column in range(len(with_loads))]
        layers.setdefault(layer, []).append(row)
    return layers


def _flags_and_outcomes(store: Store) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rules: Counter[str] = Counter()
    rewards: dict[str, list[float]] = {}
    kinds: dict[str, Counter[str]] = {}
    total = 0
    for row in store.rows():
        total += 1
        kinds.setdefault(row.phase, Counter())[row.outcome] += 1
        for rule in {name for name in row.flags.split(",") if name}:
            rules[rule] += 1
            rewards.setdefault(rule, []).append(row.reward or 0.0)
    flags = [
        {"rule": rule, "episodes": count, "share_frac": count / total, "mean reward": sum(rewards[rule]) / count}
        for rule, count in rules.most_common()
    ]
    names = ("scored", "ungraded", "failed", "none")
    outcomes = []
    for phase, counts in kinds.items():
        shown = {("not graded" if name == "none" else name): counts[name] for name in names}
        outcomes.append({"phase": phase, "episodes": counts.total(), **shown})
    return flags, outcomes
