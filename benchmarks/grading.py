"""Time of one verdict: p50 and p99 over distinct repairs of real tasks, through the real sandbox with all layers on.

    python benchmarks/grading.py [--pool POOL] [--tasks 64] [--repeats 4] [--run RUN]

Every verdict has its own box (no verdict is shared): right repairs and wrong ones (candidate edits) alternate. With
--run, the share that grading has in the wall time of a finished run's RL is added. Writes docs/results/main-grading-speed.json and
docs/results/grader-speed.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Scored
from strop.core.random import generator
from strop.core.task import Task
from strop.grading.repair import RepairGrader
from strop.sandboxes import BubblewrapProvider
from strop.store import RunDir
from strop.tasks.mutation import apply_edit
from strop.tasks.pool import open_pool
from strop.ui.results import write_result

GOAL_S = 0.060
GOAL_SHARE = 0.25


def episodes(pool: Any, tasks: list[Task], repeats: int) -> Iterator[tuple[Task, Episode, bool]]:
    """Yield ``(task, episode, whether it is the gold repair)``; a trailing comment makes every gold repair a different change."""
    for round_number in range(repeats):
        for task in tasks:
            path, _ = pool.function(task)
            is_gold = round_number % 2 == 0
            if is_gold:
                text = f"{pool.gold_source(task)}\n# {round_number}\n"
            else:
                edits = pool.candidates(task)
                rng = generator("benchmark", task.task_id, round_number)
                text = apply_edit(pool.mutant_source(task), edits[int(rng.integers(len(edits)))])
            key = EpisodeKey(phase="bench", step=0, task_id=task.task_id, sample=round_number)
            yield task, Episode(key=key, traces=(), turns=(), stop_reason="submitted", changes={path: text.encode()}), is_gold


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of unsorted values, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def share_of_run(path: Path, verdict_s: float) -> float:
    """Return what all verdicts of a run's RL, one after the other and none from memory, are of the wall seconds of its steps.

    The seconds that the run itself noted are waits beside other work, and add up to more than there are.
    """
    with RunDir.open(path) as run:
        wall = sum(line["train/step_s"] for line in run.store.metrics(phase="rl") if "train/step_s" in line)
        verdicts = len(run.store.rows(phase="rl"))
    return verdict_s * verdicts / wall if wall else 0.0


async def measure(pool: Any, num_tasks: int, repeats: int, workers: int) -> dict[str, Any]:
    """Grade one after the other; returns seconds by kind, and counts of outcomes."""
    tasks = list(pool.tasks("train"))[:num_tasks]
    for task in tasks:
        pool.base_dir(task)
    provider = BubblewrapProvider(SandboxConfig.model_validate({"workers": workers}))
    grader = RepairGrader(pool, provider)
    seconds: dict[str, list[float]] = {"gold": [], "candidate": []}
    outcomes: Counter[str] = Counter()
    try:
        await provider.warm()
        for number, (task, episode, is_gold) in enumerate(episodes(pool, tasks, repeats)):
            start = time.perf_counter()
            outcome = await grader.grade(task, episode)
            elapsed = time.perf_counter() - start
            if not isinstance(outcome, Scored):
                raise SystemExit(f"{episode.key}: {outcome}")
            if is_gold and outcome.reward != 1.0:
                print(f"gold rejected: {episode.key}: {outcome}", file=sys.stderr)
            outcomes[f"{'gold' if is_gold else 'candidate'} {outcome.reason or 'passed'}"] += 1
            outcomes["flagged"] += any(flag.severity != "info" for flag in outcome.flags)
            if number >= workers:  # the first run of a worker pays for its start
                seconds["gold" if is_gold else "candidate"].append(elapsed)
    finally:
        await grader.close()
        await provider.close()
    return {"seconds": seconds, "outcomes": dict(outcomes)}


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", default="builtin:repair")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(arguments.pool, Path(folder))
        found = asyncio.run(measure(pool, arguments.tasks, arguments.repeats, 1))
    everything = [value for values in found["seconds"].values() for value in values]
    p50, p99 = statistics.median(everything), quantile(everything, 0.99)
    details = {
        "p50_ms": round(p50 * 1e3, 2),
        "p99_ms": round(p99 * 1e3, 2),
        "verdicts": len(everything),
        "load": [round(value, 2) for value in os.getloadavg()],
        "outcomes": found["outcomes"],
        **{f"{kind}_p50_ms": round(statistics.median(values) * 1e3, 2) for kind, values in found["seconds"].items() if values},
    }
    if arguments.run is not None:
        details["share_of_run"] = round(share_of_run(arguments.run, statistics.fmean(everything)), 4)
    for key, value in details.items():
        print(f"{key}: {value}")
    if not arguments.no_write:
        bars = [("main-grading-speed", "p50 <= 60 ms", p50 <= GOAL_S)]
        if "share_of_run" in details:  # a bar about a run isn't met, nor missed, without one
            bars.append(("grader-speed", "p50 <= 60 ms, at most 25 % of a run", p50 <= GOAL_S and details["share_of_run"] <= GOAL_SHARE))
        for name, goal, is_met in bars:
            path = write_result(
                name,
                bar="grading a quickstart task, one verdict with all layers, warm box",
                goal=goal,
                figure=details["p50_ms"],
                unit="ms",
                met=is_met,
                command=f"python benchmarks/grading.py --pool {arguments.pool} --tasks {arguments.tasks} --repeats {arguments.repeats}",
                notes="Wall time, one verdict after the other, a box for each. Candidate edits that hang cost processor seconds.",
                details=details,
            )
            print(path)


if __name__ == "__main__":
    main()
