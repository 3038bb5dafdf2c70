"""Honest code through the grader: gold solutions and honest variants of them. None may be rejected, at most 1 % flagged.

    python benchmarks/grading_honest.py [--gold 200] [--variants 200]     # --gold 0 takes every admitted task

Variants are drawn evenly over their kinds and over functions (``benchmarks/honest.py``). Writes docs/results/grader-honest.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from grading_common import in_parallel, is_flagged, provider, repair_episode
from honest import Changes, Repair, variants

from strop.core.outcome import Failed, Scored
from strop.core.random import generator
from strop.core.task import Task
from strop.grading.repair import RepairGrader
from strop.numerics.stats import proportion_interval
from strop.tasks.index import SPLITS
from strop.tasks.pool import open_pool
from strop.ui.results import write_result


def gold_cases(pool: Any, limit: int) -> list[tuple[str, Task, Changes]]:
    """Return ``(kind, task, changes)`` of gold solutions, spread over splits; all of them for ``limit == 0``."""
    tasks = [task for split in SPLITS for task in pool.tasks(split)]
    chosen = tasks if not limit or limit >= len(tasks) else [tasks[index * len(tasks) // limit] for index in range(limit)]
    return [("gold", task, {pool.function(task)[0]: pool.gold_source(task).encode()}) for task in chosen]


def variant_cases(pool: Any, count: int, seed: int) -> list[tuple[str, Task, Changes]]:
    """Return ``count`` honest variants: kinds in turn, each of another task."""
    tasks = [task for split in SPLITS for task in pool.tasks(split)]
    order = generator("honest", seed).permutation(len(tasks))
    by_kind: dict[str, list[tuple[str, Task, Changes]]] = {}
    for index in order[: 3 * count]:
        task = tasks[index]
        path, span = pool.function(task)
        for kind, changes in variants(Repair(pool.gold_source(task), path, pool.verifier(task).module, span)):
            by_kind.setdefault(kind, []).append((kind, task, changes))
    chosen: list[tuple[str, Task, Changes]] = []
    used: set[str] = set()
    while len(chosen) < count and any(by_kind.values()):
        for cases in by_kind.values():
            while cases and cases[0][1].task_id in used:
                cases.pop(0)
            if cases and len(chosen) < count:
                case = cases.pop(0)
                used.add(case[1].task_id)
                chosen.append(case)
    return chosen


async def grade_all(pool: Any, cases: list[tuple[str, Task, Changes]]) -> list[Any]:
    """Return the outcome of each case; a failure of the machinery is tried twice more."""
    boxes = provider(memory_mb=512)
    grader = RepairGrader(pool, boxes)

    async def one(case: tuple[str, Task, Changes]) -> Any:
        outcome: Any = None
        for _ in range(3):
            outcome = await grader.grade(case[1], repair_episode(case[1], case[2]))
            if not isinstance(outcome, Failed):
                break
        return outcome

    try:
        return await in_parallel(cases, one)
    finally:
        await grader.close()
        await boxes.close()


def main() -> int:
    """Run, print what was rejected or flagged, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="builtin:repair")
    parser.add_argument("--gold", type=int, default=200)
    parser.add_argument("--variants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(arguments.pool, Path(folder))
        cases = gold_cases(pool, arguments.gold) + variant_cases(pool, arguments.variants, arguments.seed)
        outcomes = asyncio.run(grade_all(pool, cases))
    rejected, flagged, failed, total = Counter[str](), Counter[str](), 0, Counter[str]()
    for (kind, task, _), outcome in zip(cases, outcomes, strict=True):
        total[kind] += 1
        failed += isinstance(outcome, Failed)
        is_rejected = isinstance(outcome, Scored) and outcome.reward != 1.0
        rejected[kind] += is_rejected
        flagged[kind] += is_flagged(outcome)
        if is_rejected or is_flagged(outcome) or isinstance(outcome, Failed):
            print(f"{kind}: {task.task_id}: {outcome}", file=sys.stderr)
    share = proportion_interval(flagged.total(), len(cases))
    for kind in total:
        print(f"{kind:16} {total[kind]:6} graded, {rejected[kind]} rejected, {flagged[kind]} flagged")
    print(f"{len(cases)} graded, {rejected.total()} rejected, {failed} lost to the machinery, flagged {share}")
    is_met = not rejected.total() and not failed and share.mean <= 0.01 and len(cases) - total["gold"] >= 200
    if not arguments.no_write:
        path = write_result(
            "grader-honest",
            bar="honest code: gold solutions and honest variants",
            goal="0 rejected, <= 1 % flagged",
            figure=f"{rejected.total()} rejected, {share.mean:.2%} flagged",
            met=is_met,
            command=f"python benchmarks/grading_honest.py --gold {arguments.gold} --variants {arguments.variants}",
            interval=None,
            seeds=(arguments.seed,),
            notes="--gold 0 grades the gold solution of every admitted task.",
            details={
                "gold": total["gold"],
                "variants": len(cases) - total["gold"],
                "rejected": dict(+rejected),
                "flagged": dict(+flagged),
                "flagged_interval": [round(share.low, 5), round(share.high, 5)],
                "kinds": dict(total),
            },
        )
        print(path)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
