"""What the environment costs in an RL step: the recorded calls of a finished run, made again without a model.

    python benchmarks/environment.py RUN [--steps 8] [--no-write]

Every episode of some steps, spread evenly over the RL phase, gets a fresh box as in the run, makes the calls that the policy made, and
is graded, as many at once as in the run. The seconds of that alone, over the seconds of the whole step in the run, are the environment's
share. One more pass makes the calls of some episodes one after the other, in boxes that answer nothing from memory, for the time of a
single call. Run it on an otherwise idle machine, as the run itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.agent.tools import Toolbox
from strop.agent.workspace import TreeCache
from strop.cli.models import pool_dir
from strop.core.episode import Episode
from strop.core.outcome import Scored
from strop.core.task import Task
from strop.grading.repair import RepairGrader
from strop.ports import SandboxProvider
from strop.runtime.build import agent_boxes, build_grading
from strop.store import RunDir
from strop.ui.results import write_result

GOAL_SHARE, GOAL_CALL_MS, GOAL_TEST_MS = 0.30, 1.0, 12.0
ALONE = 48
"""Episodes whose calls are timed one after the other."""


@dataclass(slots=True)
class Measured:
    """Seconds by tool, and how often the world answered otherwise than in the run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)


async def again(
    episode: Episode, task: Task, base: str, provider: SandboxProvider, grader: RepairGrader, cache: TreeCache, found: Measured
) -> None:
    """Make an episode's calls in a fresh box over ``base`` and grade what they left."""
    box = await provider.start(base)
    try:
        tools = Toolbox(task, box, base=base, cache=cache)
        for turn in episode.turns:
            if turn.status == "malformed":
                continue
            began = time.perf_counter()
            result = await tools.call(turn.call, turn.arguments)
            found.seconds.setdefault(turn.call if turn.status == "ok" else "refused", []).append(time.perf_counter() - began)
            found.answers["same" if result.status == turn.status else "other status"] += 1
        changes = box.changes()
    finally:
        await box.stop()
    found.answers["same files" if changes == dict(episode.changes) else "other files"] += 1
    began = time.perf_counter()
    outcome = await grader.grade(task, episode)
    found.seconds.setdefault("grading", []).append(time.perf_counter() - began)
    is_same = isinstance(outcome, Scored) and isinstance(episode.outcome, Scored) and outcome.reward == episode.outcome.reward
    found.answers["same verdict" if is_same else "other verdict"] += 1


async def measure(run: RunDir, steps: int) -> tuple[list[float], list[float], Measured, Measured]:
    """Return the environment's seconds and the step's seconds for each step, and the times of calls together and alone."""
    opened, provider, grader = build_grading(run.config, pool_dir(run.config.tasks.pool))
    tasks = {task.task_id: task for task in opened.pool.tasks("train")}
    together, alone = Measured(), Measured()
    logged = {int(line["step"]): line["train/step_s"] for line in run.store.metrics(phase="rl") if "train/step_s" in line}
    wall: list[float] = []
    known = sorted(logged)
    count = min(steps, len(known))
    chosen = [known[(2 * part + 1) * len(known) // (2 * count)] for part in range(count)]
    slots = asyncio.Semaphore(run.config.engine.max_sessions)

    async def one(episode: Episode, boxes: SandboxProvider, cache: TreeCache, found: Measured) -> None:
        task = tasks[episode.key.task_id]
        async with slots:
            await again(episode, task, opened.pool.base_dir(task), boxes, grader, cache, found)

    try:
        await provider.warm()
        for step in chosen:
            episodes = list(run.store.episodes(phase="rl", step=step))
            boxes, cache = agent_boxes(run.config, provider), TreeCache()
            began = time.perf_counter()
            await asyncio.gather(*(one(episode, boxes, cache, together) for episode in episodes))
            wall.append(time.perf_counter() - began)
            print(f"step {step}: environment {wall[-1]:.2f} s of {logged[step]:.2f} s, {len(episodes)} episodes", flush=True)
        for episode in list(run.store.episodes(phase="rl", step=chosen[-1]))[:ALONE]:
            await one(episode, provider, TreeCache(), alone)
    finally:
        await grader.close()
        await provider.close()
    return wall, [logged[step] for step in chosen], together, alone


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=8, help="how many, spread over the phase")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    with RunDir.open(options.run) as run:
        wall, whole, together, alone = asyncio.run(measure(run, options.steps))
    share = sum(wall) / sum(whole)
    calls = [value for tool, values in alone.seconds.items() if tool not in ("test", "grading") for value in values]
    call_ms, test_ms = 1e3 * statistics.median(calls), 1e3 * statistics.median(alone.seconds["test"])
    p50 = {tool: round(1e3 * statistics.median(values), 3) for tool, values in sorted(alone.seconds.items())}
    details: dict[str, Any] = {
        "p50_ms_alone": p50,
        "answers": dict(together.answers + alone.answers),
        "load": [round(value, 2) for value in os.getloadavg()],
    }
    print(f"environment alone {share:.1%} of the step; call p50 {call_ms:.3f} ms, test run p50 {test_ms:.2f} ms; {details}")
    if options.no_write:
        return
    command = f"python benchmarks/environment.py {options.run} --steps {options.steps}"
    write_result(
        "main-environment-share",
        bar="environment, alone, as a share of an RL step",
        goal="<= 0.30",
        figure=round(share, 4),
        met=share <= GOAL_SHARE,
        command=command,
        details=details,
    )
    write_result(
        "main-tool-latency",
        bar="tool call p50 (without test runs), with a test run's p50 in the details",
        goal="calls <= 1 ms, test runs <= 12 ms",
        figure=round(call_ms, 3),
        unit="ms",
        met=call_ms <= GOAL_CALL_MS and test_ms <= GOAL_TEST_MS,
        command=command,
        details={"test_p50_ms": round(test_ms, 3), **details},
    )


if __name__ == "__main__":
    main()
