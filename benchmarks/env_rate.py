"""How many gated tasks a minute: mutations of packages whose suite takes under two seconds, gate included, probing left out.

    python benchmarks/env_rate.py [--tasks 40] [--packages cachetools==5.5.2 ...] [--workers N]

Prints the cost split (runs of the broken state, of the solution, of its mutants; everything else) and writes docs/results/env-rate.json.
A second figure counts probing too. Verdicts of earlier runs aren't used: the pool lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from strop.cli.envbuild import box_places, suite_boxes
from strop.grading.scratch import Scratch
from strop.tasks.admission.build import BuildOptions, SuiteBuild
from strop.tasks.admission.pool import SuitePool
from strop.ui.results import write_result

GOAL = 20.0
MAX_SUITE_S = 2.0
PACKAGES = ("cachetools==5.5.2", "toolz==1.0.0", "sqlparse==0.5.3")


async def measure(out: Path, packages: list[str], tasks: int, workers: int) -> tuple[list[dict[str, object]], list[str]]:
    """Build the packages one after the other; returns a row for each, and those whose suite is too slow for the bar."""
    limits = {"mutation": tasks, "combined": 0, "deletion": 0, "history": 0}
    provider = suite_boxes(workers)
    await provider.warm()
    scratch = Scratch(str(out.parent))
    rows: list[dict[str, object]] = []
    slow = []
    try:
        build = SuiteBuild(BuildOptions(out=out, limits=limits, workers=workers, places=box_places()), provider, scratch.path)
        for name in packages:
            tally = await build.add(name)
            if tally.problem:
                raise SystemExit(f"{name}: {tally.problem}")
            if tally.suite_s > MAX_SUITE_S:
                slow.append(tally.source)
            admitted = tally.number("mutation", "admitted")
            gate_s = tally.seconds - tally.probe_s
            rows.append(
                {
                    "source": tally.source,
                    "suite_s": round(tally.suite_s, 3),
                    "drafts": tally.made("mutation"),
                    "admitted": admitted,
                    "gate_s": round(gate_s, 1),
                    "probe_s": round(tally.probe_s, 1),
                    "per_minute": round(60 * admitted / gate_s, 1),
                }
            )
            print(rows[-1], flush=True)
    finally:
        scratch.close()
        await provider.close()
    return rows, slow


def cost_split(out: Path, cache: Path) -> dict[str, float]:
    """Seconds of an admitted task by what they went into, averaged."""
    pool = SuitePool(out, cache)
    spent: dict[str, float] = {}
    records = [pool.record(task) for task in pool.all_tasks()]
    for record in records:
        total = float(record.report["seconds"])
        for run in record.report["runs"]:
            side = f"runs: {run['side']}"
            spent[side] = spent.get(side, 0.0) + run["s"]
            total -= run["s"]
        spent["waiting, layers, text, leak scan"] = spent.get("waiting, layers, text, leak scan", 0.0) + total
    return {name: round(seconds / max(len(records), 1), 3) for name, seconds in sorted(spent.items())}


def main() -> int:
    """Run; returns 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=40, help="admitted tasks wanted of each package")
    parser.add_argument("--packages", nargs="*", default=list(PACKAGES))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="strop-env-rate") as name:
        out = Path(name) / "pool"
        rows, slow = asyncio.run(measure(out, arguments.packages, arguments.tasks, arguments.workers))
        split = cost_split(out, Path(name) / "cache")
    admitted = sum(int(row["admitted"]) for row in rows)  # type: ignore[call-overload]
    gate_s = sum(float(row["gate_s"]) for row in rows)  # type: ignore[arg-type]
    probe_s = sum(float(row["probe_s"]) for row in rows)  # type: ignore[arg-type]
    rate = 60 * admitted / gate_s
    print(f"{admitted} tasks, {rate:.1f} a minute ({60 * admitted / (gate_s + probe_s):.1f} with probing); seconds of a task: {split}")
    write_result(
        "env-rate",
        bar="gated tasks a minute",
        goal=f">= {GOAL:g}/min on two cores, suites under {MAX_SUITE_S:g} s",
        figure=round(rate, 1),
        unit="tasks/min",
        met=rate >= GOAL and not slow,
        command=f"python benchmarks/env_rate.py --tasks {arguments.tasks}",
        seeds=(0,),
        notes=f"suites over the limit: {', '.join(slow)}" if slow else "The time counts every draft, refused ones included.",
        details={
            "packages": rows,
            "seconds_of_an_admitted_task": split,
            "with_probing_per_minute": round(60 * admitted / (gate_s + probe_s), 1),
            "load": os.getloadavg()[0],
            "wall_s": round(time.perf_counter() - began, 1),
            "workers": arguments.workers,
        },
    )
    return 0 if rate >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
