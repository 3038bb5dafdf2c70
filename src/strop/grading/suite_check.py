"""The gate for a task that is in a pool already: the solution scores 1, no change scores 0, and nothing in the workspace gives it away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import StropError
from strop.core.outcome import Scored
from strop.core.task import Task
from strop.grading.regrade import describe
from strop.grading.scratch import Scratch
from strop.grading.suite import SuiteGrader
from strop.tasks.admission.leaks import scan
from strop.tasks.admission.needles import leak_in_text, needles_of
from strop.tasks.admission.pool import SuitePool
from strop.tasks.admission.record import is_solved
from strop.tasks.layers import BoxRunner, write_layer
from strop.tasks.repository.suite import run_suite, shuffled


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What is wrong with a task, ``""`` for nothing, and the seconds that it took to find out."""

    problem: str
    seconds: float


async def check_task(pool: SuitePool, task: Task, runner: BoxRunner, *, rounds: int = 3, places: Sequence[str] = ()) -> CheckResult:
    """Check one task. What can't be checked is a problem, not an error.

    Args:
        pool: Its pool.
        task: The task.
        runner: Starts boxes.
        rounds: How often each side is run, each time in another order.
        places: Folders of installed packages that a box shows besides the workspace's.
    """
    began = time.perf_counter()
    try:
        problem = await _problem(pool, task, runner, rounds, places)
    except (StropError, OSError) as error:
        problem = f"can't be checked: {error}"
    return CheckResult(problem, time.perf_counter() - began)


async def _problem(pool: SuitePool, task: Task, runner: BoxRunner, rounds: int, places: Sequence[str]) -> str:
    gold = pool.gold_files(task)
    base = {**pool.tree_files(pool.record(task).tree), **pool.base_files(task)}
    workspace = {path: base.get(path) for path in gold}
    if line := leak_in_text(task.instruction, [(workspace[path] or b"", data) for path, data in gold.items() if data is not None]):
        return f"the instruction holds a line of the solution: {line[:80]}"
    report = scan(pool.base_dir(task), needles_of(workspace, gold), outside=places)
    if report.leaks:
        leak = report.leaks[0]
        return f"the solution can be read elsewhere: {leak.kind}: {leak.path}: {leak.evidence}"
    key = EpisodeKey(phase="env.gate", step=0, task_id=task.task_id, sample=0)
    episode = Episode(key=key, traces=(), turns=(), stop_reason="submitted", changes=gold)
    for number in range(rounds):
        grader = SuiteGrader(pool, runner, seed=number)
        try:
            outcome = await grader.grade(task, episode)
        finally:
            await grader.close()
        if not isinstance(outcome, Scored) or outcome.reward != 1.0:
            return f"the solution doesn't score 1: {describe(outcome)}"
        if await _passes_untouched(pool, task, runner, number):
            return "no change scores 1: every deciding test passes on the workspace"
    return ""


async def _passes_untouched(pool: SuitePool, task: Task, runner: BoxRunner, number: int) -> bool:
    verifier = pool.suite(task)
    scratch = Scratch()
    try:
        layer = write_layer(scratch.path, pool.hidden_files(task))
        tests = shuffled(verifier.tests, "untouched", number, task.task_id)
        return is_solved(await run_suite(runner, [str(layer), pool.base_dir(task)], verifier.spec, tests, cpu_s=verifier.cpu_s))
    finally:
        scratch.close()
