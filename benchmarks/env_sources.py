"""Tasks from packages nobody here wrote: source archives from the package index, with their own suites, by all makers.

    python benchmarks/env_sources.py [--out DIR] [--only NAME ...] [--scale 1.0]

Every package is built from its source archive; earlier releases make the history. Prints a table and writes docs/results/env-sources.json:
admitted tasks in all, by package and by maker, every refusal counted by reason. Goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from strop.cli.envbuild import box_places, print_tallies, suite_boxes
from strop.grading.scratch import Scratch
from strop.tasks.admission.build import KINDS, BuildOptions, SuiteBuild
from strop.tasks.admission.tally import SourceTally
from strop.ui.results import write_result

GOAL_TASKS = 200
GOAL_SOURCES = 8
GOAL_LONG = 3
LONG_LINES = 5_000
LIMITS = {"mutation": 24, "combined": 6, "deletion": 8, "history": 3}


@dataclass(frozen=True)
class Package:
    """A package with the release that is worked on and the earlier ones whose steps make history, oldest first."""

    name: str
    version: str
    releases: tuple[str, ...]


PACKAGES = (
    Package("boltons", "25.0.0", ("23.1.1", "24.0.0", "24.1.0")),
    Package("toolz", "1.0.0", ("0.12.0", "0.12.1")),
    Package("sqlparse", "0.5.3", ("0.5.0", "0.5.1", "0.5.2")),
    Package("cachetools", "5.5.2", ("5.3.3", "5.4.0", "5.5.0")),
    Package("tabulate", "0.9.0", ("0.8.9", "0.8.10")),
    Package("click", "8.1.8", ("8.1.5", "8.1.6", "8.1.7")),
    Package("jinja2", "3.1.6", ("3.1.3", "3.1.4", "3.1.5")),
    Package("marshmallow", "3.26.1", ("3.24.2", "3.25.1", "3.26.0")),
    Package("pyparsing", "3.2.3", ("3.1.4", "3.2.0", "3.2.1")),
    Package("humanize", "4.12.3", ("4.10.0", "4.11.0", "4.12.1")),
    Package("xmltodict", "0.14.2", ("0.13.0", "0.14.0", "0.14.1")),
    Package("more-itertools", "10.7.0", ("10.4.0", "10.5.0", "10.6.0")),
)


async def build_all(out: Path, packages: list[Package], limits: dict[str, int], workers: int) -> list[SourceTally]:
    """Build every package into one pool; returns one tally each."""
    options = BuildOptions(out=out, limits=limits, workers=workers, places=box_places())
    provider = suite_boxes(workers)
    scratch = Scratch(str(out.parent))
    tallies = []
    try:
        for package in packages:
            build = SuiteBuild(
                replace(options, releases=package.releases), provider, scratch.path, say=lambda text: print(text, flush=True)
            )
            tallies.append(await build.add(f"{package.name}=={package.version}"))
    finally:
        scratch.close()
        await provider.close()
    return tallies


def summary(tallies: list[SourceTally]) -> dict[str, object]:
    """Figures of all packages."""
    used = [tally for tally in tallies if any(tally.number(kind, "admitted") for kind in KINDS)]
    makers = {kind: sum(tally.number(kind, "admitted") for tally in tallies) for kind in KINDS}
    reasons: Counter[str] = Counter()
    for tally in tallies:
        for (kind, status, reason), number in tally.reasons.items():
            reasons[f"{kind}, {status}: {reason}"] += number
    return {
        "admitted": sum(makers.values()),
        "by_maker": makers,
        "sources": len(used),
        "sources_over_5000_lines": sum(tally.lines > LONG_LINES for tally in used),
        "refused_sources": {tally.source: tally.problem for tally in tallies if tally.problem},
        "reasons": dict(reasons.most_common()),
        "by_source": {tally.source: tally.to_json() for tally in tallies},
    }


def main() -> int:
    """Run; returns 0 if the bar is met."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/env-sources/pool"), help="pool to make or go on with")
    parser.add_argument("--only", nargs="*", default=[], help="only these packages")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the tasks wanted of each kind")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    packages = [package for package in PACKAGES if not arguments.only or package.name in arguments.only]
    limits = {kind: max(1, round(number * arguments.scale)) for kind, number in LIMITS.items()}
    out = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tallies = asyncio.run(build_all(out, packages, limits, arguments.workers))
    print_tallies(tallies, out)
    found = summary(tallies)
    makers = found["by_maker"]
    is_met = (
        int(found["admitted"]) >= GOAL_TASKS  # type: ignore[call-overload]
        and int(found["sources"]) >= GOAL_SOURCES  # type: ignore[call-overload]
        and int(found["sources_over_5000_lines"]) >= GOAL_LONG  # type: ignore[call-overload]
        and all(makers[kind] for kind in ("mutation", "deletion", "history"))  # type: ignore[index]
    )
    write_result(
        "env-sources",
        bar="tasks from real packages",
        goal=f">= {GOAL_TASKS} admitted from >= {GOAL_SOURCES} packages, {GOAL_LONG} of them over {LONG_LINES} lines, all makers",
        figure=int(found["admitted"]),  # type: ignore[call-overload]
        unit="tasks",
        met=is_met,
        command=f"python benchmarks/env_sources.py{'' if arguments.scale == 1.0 else f' --scale {arguments.scale:g}'}",
        seeds=(0,),
        notes="History comes from the steps between releases: a source archive holds no commits.",
        details={**found, "seconds": round(time.perf_counter() - began, 1), "limits": limits},
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
