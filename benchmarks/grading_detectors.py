"""Recall and false-positive rate of every detector: rules on planted and honest episodes, and contrast within groups.

    python benchmarks/grading_detectors.py [--tasks 40]

Planted hacks go into the broken modules of real tasks: plainly spelled and evasively (``benchmarks/plants.py``), and fresh, by someone who
didn't know the rules' patterns (``benchmarks/plants_fresh.py``), which is the recall to expect of hacks to come. Honest episodes are gold
solutions, honest variants and wrong but honest edits of the same tasks. Rules about behaviour are counted over the attack suite instead
(``benchmarks/grading_attacks.py``). Nothing is run here. Writes docs/results/grader-detectors.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from honest import Repair, variants
from plants import PLANTS, Plant, Site, planted
from plants_fresh import FRESH

from strop.core.episode import Turn
from strop.core.outcome import Flag, Scored
from strop.core.random import generator
from strop.core.task import Task
from strop.grading.admission import admit, changed_sources
from strop.grading.contrast import contrast
from strop.grading.repair import STANDARD_LIBRARY
from strop.grading.rules import copy_flags, text_flags, turn_flags
from strop.grading.table import RULES
from strop.numerics.stats import Interval, proportion_interval
from strop.tasks.mutation import apply_edit
from strop.tasks.pool import open_pool
from strop.ui.results import write_result

Changes = dict[str, bytes | None]
UNRUN = Scored(reward=0.0)
HONEST_IN_GROUP = 5
KINDS = ("fresh", "plain", "evasive")


@dataclass(slots=True)
class Tally:
    """Counts of one detector: hits of each hack by kind, false alarms on honest episodes."""

    hits: dict[str, dict[Plant, list[bool]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    honest: list[bool] = field(default_factory=list)

    def add(self, plant: Plant, hit: bool) -> None:
        """Count one episode with a hack."""
        self.hits[kind_of(plant)].setdefault(plant, []).append(hit)

    def recall(self, kind: str) -> Interval | None:
        """Share of hacks found, ``None`` without any. Its interval counts hacks, since the same one in another task is found alike."""
        found = [sum(hits) / len(hits) for hits in self.hits[kind].values()]
        if not found:
            return None
        return replace(proportion_interval(round(sum(found)), len(found)), mean=sum(found) / len(found))

    def false_alarms(self) -> Interval | None:
        """Share of honest episodes that are flagged, ``None`` without any."""
        return proportion_interval(sum(self.honest), len(self.honest)) if self.honest else None


def kind_of(plant: Plant) -> str:
    """One of ``KINDS``."""
    return "fresh" if plant.is_fresh else "evasive" if plant.is_evasive else "plain"


def static_flags(pool: Any, task: Task, changes: Changes, turns: Sequence[Turn] = ()) -> list[Flag]:
    """Return every flag that needs no box, as ``RepairGrader`` finds them."""
    base, path = pool.base_dir(task), pool.verifier(task).path
    admitted = admit(base, changes, path)
    texts = changed_sources(base, {name: content for name, content in admitted.changes.items() if name.endswith(".py")})
    flags = [*admitted.flags, *turn_flags(turns), *text_flags(texts)]
    for text in texts:
        flags += copy_flags(text, is_standard_library=path.startswith(STANDARD_LIBRARY))
    return [item for item in flags if item.severity != "info"]


def honest_changes(pool: Any, task: Task) -> list[Changes]:
    """Honest episodes of a task: every variant of the gold solution, and three wrong edits."""
    path, span = pool.function(task)
    found = [changes for _, changes in variants(Repair(pool.gold_source(task), path, pool.verifier(task).module, span))]
    source, edits = pool.mutant_source(task), pool.candidates(task)
    for index in generator("detectors", task.task_id).permutation(len(edits))[:3]:
        found.append({path: apply_edit(source, edits[index]).encode()})
    return found


def site_of(pool: Any, task: Task) -> Site:
    """Where a task's hacks go."""
    path, span = pool.function(task)
    name = span.name.rpartition(".")[2]
    return Site(pool.mutant_source(task), path, name, span.start_line, Path(pool.function_record(task).test_path).name)


def measure(pool: Any, tasks: Sequence[Task], misses: Counter[str]) -> dict[str, Tally]:
    """Count hits and false alarms by rule, and for ``any rule``, ``contrast`` and ``rules or contrast``."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for number, task in enumerate(tasks):
        site, fair = site_of(pool, task), honest_changes(pool, task)
        samples = [(changed_sources(pool.base_dir(task), changes), sorted(changes), UNRUN) for changes in fair]
        fair_rules = [{item.rule for item in static_flags(pool, task, changes)} for changes in fair]
        for rules in fair_rules:
            for name in {rule.name for rule in RULES} | {"any rule"}:
                tallies[name].honest.append(name in rules or (name == "any rule" and bool(rules)))
        for plant in (*PLANTS[number % 2 :: 2], *FRESH[number % 2 :: 2]):
            changes, turns = planted(plant, site)
            rules = {item.rule for item in static_flags(pool, task, changes, turns)}
            stands_out, alarms = in_group(pool, task, changes, samples)
            for name, hit in {
                plant.rule: plant.rule in rules,
                "any rule": bool(rules),
                "contrast": stands_out,
                "rules or contrast": bool(rules) or stands_out,
            }.items():
                tallies[name].add(plant, hit)
            tallies["contrast"].honest += alarms.values()
            tallies["rules or contrast"].honest += [alarm or bool(fair_rules[index]) for index, alarm in alarms.items()]
            if not rules and not stands_out:
                misses[describe(plant)] += 1
    return tallies


def in_group(pool: Any, task: Task, changes: Changes, fair: Sequence[Any]) -> tuple[bool, dict[int, bool]]:
    """Compare a hack with honest samples of its task; returns whether it stands out, and whether each honest one (by index) does."""
    order = generator("groups", task.task_id, len(changes)).permutation(len(fair))[:HONEST_IN_GROUP]
    members = [(changed_sources(pool.base_dir(task), changes), sorted(changes), UNRUN), *(fair[index] for index in order)]
    flagged = contrast(dict(enumerate(members)))
    return 0 in flagged, {int(index): n in flagged for n, index in enumerate(order, 1)}


def describe(plant: Plant) -> str:
    """One line for a list of misses."""
    return f"{plant.rule} ({kind_of(plant)}): {(plant.code or str(list(plant.files) or plant.calls))[:90]!r}"


def main() -> int:
    """Run, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="builtin:repair")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    misses: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(arguments.pool, Path(folder))
        tallies = measure(pool, list(pool.tasks("heldout"))[: arguments.tasks], misses)
    table = {}
    for name in sorted(tallies):
        tally = tallies[name]
        columns = {f"{kind} recall": tally.recall(kind) for kind in KINDS} | {"false positives": tally.false_alarms()}
        table[name] = {key: [round(value.mean, 4), round(value.low, 4), round(value.high, 4)] for key, value in columns.items() if value}
        print(f"{name:18} " + "  ".join(f"{key} {value if value else '-'!s:22}" for key, value in columns.items()))
    for text, count in misses.most_common(24):
        print(f"missed {count} times by everything: {text}")
    every = {name: f"{value[0]:.1%}" for name, value in table["any rule"].items()}
    if not arguments.no_write:
        path = write_result(
            "grader-detectors",
            bar="detectors on planted and honest episodes",
            goal="recall and false-positive rate of every rule, from one command",
            figure=", ".join(f"{name} {value}" for name, value in every.items()),
            met=None,
            command=f"python benchmarks/grading_detectors.py --tasks {arguments.tasks}",
            notes="Fresh hacks were written without knowing the patterns, evasive ones avoid them. Behaviour: see grader-attacks.",
            details={"detectors": table, "missed_by_everything": dict(misses.most_common(60)), "tasks": arguments.tasks},
        )
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
