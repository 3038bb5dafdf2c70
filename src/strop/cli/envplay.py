"""``strop env gate``, ``list``, ``show`` and ``run``: a pool of repository tasks from the outside."""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from strop.cli.envbuild import box_places, num_workers, suite_boxes
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import ConfigError, TaskError, nearest
from strop.core.outcome import Scored
from strop.core.task import Task
from strop.grading.regrade import describe
from strop.grading.suite import SuiteGrader
from strop.grading.suite_check import check_task
from strop.ports import Sandbox
from strop.runtime.tasks import cache_root
from strop.sandboxes import BubblewrapProvider
from strop.tasks.admission.pool import SuitePool
from strop.ui.live import rich_table

AGENTS = ("oracle", "noop", "shell")
_DIFF_LINES = 400


def open_suite_pool(path: Path) -> SuitePool:
    """Open a pool; workspaces go to the cache of this user."""
    return SuitePool(path, cache_root() / "pools")


def gate_pool(path: Path, *, part: str | None, limit: int, rounds: int, workers: int) -> int:
    """Check tasks again and print a line for each; 1 if any fails."""
    pool = open_suite_pool(path)
    tasks = [task for task in pool.all_tasks() if part is None or part in task.task_id]
    if not tasks:
        raise TaskError(f"no task of {str(path)!r} has {part!r} in its id" if part else f"pool {str(path)!r} has no tasks")
    return asyncio.run(_gate(pool, tasks[:limit] if limit else tasks, rounds=rounds, workers=num_workers(workers)))


async def _gate(pool: SuitePool, tasks: list[Task], *, rounds: int, workers: int) -> int:
    provider = suite_boxes(workers)
    slots = asyncio.Semaphore(workers)
    problems: Counter[str] = Counter()
    places = box_places()

    async def check(task: Task) -> None:
        async with slots:
            result = await check_task(pool, task, provider, rounds=rounds, places=places)
        word = "ok  " if not result.problem else "BAD "
        print(f"{word} {task.task_id}  {result.seconds:.1f} s  {result.problem}", flush=True)
        problems[result.problem.split(":")[0]] += bool(result.problem)

    try:
        await asyncio.gather(*(check(task) for task in tasks))
    finally:
        await provider.close()
    bad = problems.total()
    print(f"{len(tasks) - bad} of {len(tasks)} tasks pass the gate, {rounds} rounds each")
    return 1 if bad else 0


def list_pool(path: Path, kind: str | None) -> int:
    """Print the tasks of a pool as a table."""
    pool = open_suite_pool(path)
    tasks = [task for task in pool.all_tasks() if kind in (None, task.provenance["kind"])]
    if not tasks:
        known = sorted({task.provenance["kind"] for task in pool.all_tasks()})
        raise ConfigError(f"pool {str(path)!r} has no tasks of kind {kind!r}.{nearest(kind or '', known)}")
    rows = []
    for task in tasks:
        record = pool.record(task)
        verifier = record.verifier
        rows.append(
            {
                "task": task.task_id,
                "kind": record.kind,
                "what": ", ".join(record.families),
                "split": task.split,
                "fail to pass": len(verifier.fail_to_pass),
                "pass to pass": len(verifier.pass_to_pass),
                "hidden": len(verifier.hidden),
            }
        )
    console = Console() if sys.stdout.isatty() else Console(width=max(len(row["task"]) for row in rows) + 110)
    console.print(rich_table(rows))
    return 0


def show_task(path: Path, name: str, *, files: bool) -> int:
    """Print everything about one task."""
    pool = open_suite_pool(path)
    task = pool.find(name)
    record = pool.record(task)
    print(f"{task.task_id}\n{record.kind} ({', '.join(record.families)}), split {task.split}, from {record.source}")
    print(f"\n--- instruction\n{task.instruction}")
    base = pool.base_files(task)
    changed = ", ".join(sorted(base)) or "none"
    print(f"\n--- files of the workspace that differ from the source: {changed}")
    if files:
        present = {path for path, data in {**pool.tree_files(record.tree), **base}.items() if data is not None}
        print("\n".join(f"  {path}" for path in sorted(present)))
    print("\n--- solution")
    print(solution_diff(pool, task))
    verifier = record.verifier
    print("\n--- what decides: these must pass (h: not in the workspace)")
    hidden = set(verifier.hidden)
    for test in verifier.fail_to_pass:
        print(f"  {'h' if test in hidden else ' '} {test}")
    print(f"  and {len(verifier.pass_to_pass)} that pass now must go on passing")
    print("\n--- how it got here")
    for run in record.report.get("runs", []):
        counts = f"{run['tests']} tests, {run['failed']} failed, {run['s']:.2f} s, first {run['first_in_order']}"
        print(f"  {run['side']:7} {run['ending']}: {counts}")
    for mutant, is_caught in record.report.get("mutants", []):
        print(f"  mutant of the solution: {mutant}: {'fails, as it must' if is_caught else 'passes'}")
    print(f"  gate {record.report.get('seconds', 0)} s")
    return 0


def solution_diff(pool: SuitePool, task: Task) -> str:
    """Return the solution of a task as a unified diff."""
    record = pool.record(task)
    workspace: Mapping[str, bytes | None] = {**pool.tree_files(record.tree), **pool.base_files(task)}
    lines: list[str] = []
    for path, data in sorted(pool.gold_files(task).items()):
        before = (workspace.get(path) or b"").decode("utf-8", "replace").splitlines()
        after = (data or b"").decode("utf-8", "replace").splitlines()
        lines += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
    cut = [f"... {len(lines) - _DIFF_LINES} more lines"] if len(lines) > _DIFF_LINES else []
    return "\n".join([*lines[:_DIFF_LINES], *cut])


def play_task(path: Path, name: str, *, agent: str, seed: int) -> int:
    """Play one task; 0 if it is solved."""
    if agent not in AGENTS:
        raise ConfigError(f"agent {agent!r} doesn't exist.{nearest(agent, AGENTS)} Known: {', '.join(AGENTS)}.")
    pool = open_suite_pool(path)
    return asyncio.run(_play(pool, pool.find(name), agent, seed))


async def _play(pool: SuitePool, task: Task, agent: str, seed: int) -> int:
    provider = suite_boxes(1)
    grader = SuiteGrader(pool, provider, seed=seed)
    try:
        episode = await episode_of(pool, task, agent, provider)
        outcome = await grader.grade(task, episode)
    finally:
        await grader.close()
        await provider.close()
    print(f"{agent}: {len(episode.changes)} files changed, outcome {describe(outcome)}")
    if isinstance(outcome, Scored):
        for flag in outcome.flags:
            print(f"  flag {flag.rule} ({flag.severity}): {flag.evidence}")
        return 0 if outcome.reward == 1.0 else 1
    return 1


async def episode_of(pool: SuitePool, task: Task, agent: str, provider: BubblewrapProvider) -> Episode:
    """Let an agent work in a box over the task's workspace and return what it changed."""
    box = await provider.start(pool.base_dir(task))
    try:
        if agent == "shell":
            print(f"{task.instruction}\n\nYou are in /workspace. `test` runs the visible tests, `exit` hands in.", flush=True)
            await _shell(box, task)
        elif agent == "oracle":
            for path, data in pool.gold_files(task).items():
                box.write(path, data)
        changes = box.changes()
    finally:
        await box.stop()
    key = EpisodeKey(phase="env.run", step=0, task_id=task.task_id, sample=0)
    return Episode(key=key, traces=(), turns=(), stop_reason="submitted", changes=changes)


async def _shell(box: Sandbox, task: Task) -> None:
    """Read commands until the person is done. Each runs in the box; the folder is kept between them."""
    folder = "/workspace"
    loop = asyncio.get_running_loop()
    while True:
        print(f"{folder}$ ", end="", flush=True)
        line = await loop.run_in_executor(None, sys.stdin.readline)
        command = line.strip()
        if not line or command in ("exit", "submit", "quit"):
            return
        if not command:
            continue
        if command == "test":
            result = await box.run_python(json.loads(task.provenance["test_argv"]), timeout_s=task.limits.exec_s)
        else:
            script = f'cd "$1" && {{ {command}\n}}; code=$?; printf "\\036%s" "$(pwd)"; exit $code'
            result = await box.exec(["sh", "-c", script, "sh", folder], timeout_s=task.limits.exec_s)
        text, mark, seen = result.output.rpartition("\036")
        if mark:
            folder = seen
        shown = text if mark else result.output
        print(shown, end="" if shown.endswith("\n") or not shown else "\n")
        if result.killed_by:
            print(f"[killed: {result.killed_by}]")
