"""The leak scan: a leak of every kind planted into real workspaces is found, and no admitted task gives a false alarm.

    python benchmarks/env_leaks.py --pool DIR [--workspaces 5] [--limit 0]

Plants every kind (tests/tasks/suites/leak_plants.py) into copies of workspaces of the pool, one at a time, then scans every admitted task
as it is. Writes docs/results/env-leaks.json.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tasks" / "suites"))

from leak_plants import PLANTS, make_checkout

from strop.cli.envbuild import box_places
from strop.core.random import key_of
from strop.core.task import Task
from strop.tasks.admission.leaks import KINDS, scan
from strop.tasks.admission.needles import Needle, needles_of
from strop.tasks.admission.pool import SuitePool
from strop.tasks.repository.suite import VENV
from strop.ui.results import write_result


def needles(pool: SuitePool, task: Task) -> list[Needle]:
    """What must not be found in a task's workspace."""
    base = {**pool.tree_files(pool.record(task).tree), **pool.base_files(task)}
    gold = pool.gold_files(task)
    return needles_of({path: base.get(path) for path in gold}, gold)


def planted(pool: SuitePool, task: Task, work: Path) -> dict[str, bool]:
    """Plant every kind into a copy of a workspace, one at a time; returns which were found."""
    looked_for = needles(pool, task)
    path, gold = next((path, data) for path, data in pool.gold_files(task).items() if data is not None)
    found = {}
    for name, (plant, kind) in PLANTS.items():
        folder = work / name.replace(" ", "-")
        shutil.copytree(pool.base_dir(task), folder, ignore=shutil.ignore_patterns(".venv"))
        make_checkout(folder)
        if leaks := scan(folder, looked_for).leaks:
            raise SystemExit(f"{task.task_id}: a clean checkout gives a false alarm: {leaks[0]}")
        plant(folder, path, gold)
        found[name] = kind in {leak.kind for leak in scan(folder, looked_for).leaks}
        shutil.rmtree(folder)
    return found


def main() -> int:
    """Run; returns 0 if every planted leak is found and no task gives an alarm."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--workspaces", type=int, default=5, help="workspaces that leaks are planted into")
    parser.add_argument("--limit", type=int, default=0, help="scan at most so many admitted tasks; 0 means all")
    arguments = parser.parse_args()
    began = time.perf_counter()
    places = box_places()
    missed: list[str] = []
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="strop-env-leaks") as name:
        pool = SuitePool(arguments.pool, Path(name) / "cache")
        tasks = sorted(pool.all_tasks(), key=lambda task: key_of("leaks", task.task_id))
        chosen = [task for task in tasks if any(data is not None for data in pool.gold_files(task).values())][: arguments.workspaces]
        for task in chosen:
            for plant, is_found in planted(pool, task, Path(name)).items():
                tried[PLANTS[plant][1]] += 1
                if not is_found:
                    missed.append(f"{task.task_id}: {plant}")
                    print(f"missed: {missed[-1]}", flush=True)
        checked = tasks[: arguments.limit] if arguments.limit else tasks
        alarms = []
        for task in checked:
            environment = pool.path / "environments" / pool.meta["trees"][pool.record(task).tree]["environment"]
            report = scan(pool.base_dir(task), needles(pool, task), outside=places, shared={VENV: str(environment)})
            alarms += [f"{task.task_id}: {leak.kind}: {leak.path}" for leak in report.leaks]
            shutil.rmtree(pool.base_dir(task), ignore_errors=True)
    total = tried.total()
    print(f"{total - len(missed)} of {total} planted leaks found in {len(chosen)} workspaces; {len(alarms)} alarms on {len(checked)} tasks")
    is_met = not missed and not alarms and set(tried) == set(KINDS)
    write_result(
        "env-leaks",
        bar="leak scan",
        goal="every planted leak of every kind found, no alarm on admitted tasks",
        figure=f"{total - len(missed)}/{total} found, {len(alarms)} alarms on {len(checked)} tasks",
        met=is_met,
        command=f"python benchmarks/env_leaks.py --pool {arguments.pool}",
        details={
            "planted_by_kind": dict(tried),
            "ways": {name: kind for name, (_, kind) in PLANTS.items()},
            "missed": missed,
            "alarms": alarms[:50],
            "workspaces": len(chosen),
            "seconds": round(time.perf_counter() - began, 1),
        },
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
