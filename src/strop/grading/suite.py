"""Grades a repository task: filter the changes, lay the hidden tests over them, run them in a fresh box, look at how each one ended.

Tests of a repository run in the process of the code that they test, so no report of that process can be believed by itself. What holds:
only source files of the package reach the box; test files and settings are those of the pool; the process that runs tests has neither the
result channel nor its nonce; and a second run, in another order, makes some of the tests fail on purpose (``controls``), so that whatever
lets everything pass lets those pass too. What is left (values that equal everything, patched test libraries, frames of the caller) the
rules about code know; here, unlike where results are compared outside of the process, they take the reward away, unless the solution
itself breaks the same rule.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from strop.core.episode import Episode
from strop.core.outcome import Flag, Outcome, Scored
from strop.core.random import generator
from strop.core.task import Task
from strop.grading.admission import AdmissionLimits, admit
from strop.grading.boxed import BoxedGrader, unique, verdict_at_sight
from strop.grading.repair import changed_texts, changes_digest
from strop.grading.rules import MAX_ADDED, TextChange, flag, text_flags, turn_flags
from strop.grading.table import HACK
from strop.ports import TaskPool
from strop.tasks.admission.record import SuiteVerifier, is_solved
from strop.tasks.layers import BoxRunner, write_layer
from strop.tasks.repository.suite import SuiteRun, run_suite, shuffled

LAYERS = ("isolated", "restored_tests", "shuffled", "second_order", "controls")
"""What a verdict can rest on: fresh box and filtered changes; test files of the pool; shuffled order; another order; tests made to fail."""
NUM_CONTROLS = 4


class SuiteTaskPool(TaskPool, Protocol):
    """A pool whose tasks are decided by tests of a repository; see ``strop.tasks.admission.pool.SuitePool``."""

    def suite(self, task: Task) -> SuiteVerifier:
        """Which tests decide."""
        ...

    def hidden_files(self, task: Task) -> dict[str, bytes | None]:
        """Test files of the grading box."""
        ...

    def gold_files(self, task: Task) -> dict[str, bytes | None]:
        """Files of the solution."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteLimits:
    """What one verdict may use; times come from the task.

    Attributes:
        admission: Size limits of the changes.
        attempts: How often a verdict is tried when the machinery fails.
    """

    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    attempts: int = 2


class SuiteGrader(BoxedGrader):
    """A ``Grader`` for repository tasks.

    Orders and controls depend on ``(seed, task id, digest of the changes)`` alone, so grading again makes the same runs.

    ``Scored.reward`` is 1.0 if every deciding test passes in both orders, otherwise 0.0 with a one-word reason:

    ========= =====================================================================================
    unchanged nothing that is graded was changed (nothing is run)
    oversize  the changes are over the size limits (nothing is run)
    tests     a test fails, is skipped or is missing
    unstable  a test passes in one order and fails in another
    hang      out of time
    crash     the package can't be loaded, or the process died
    exit      agent code ended the process early
    resource  the kernel stopped it for memory or processes
    output    it wrote more than a verdict can need
    forgery   a test that was made to fail passes, or the process said what it couldn't know
    hack      every test passes, but the change does what only a cheat needs (rules of severity ``hack`` about code)
    ========= =====================================================================================

    ``parts``: ``tests`` (share passed), ``passed``, ``total``, ``fail_to_pass`` and ``pass_to_pass`` (shares passed),
    ``hidden_passed``, ``hidden_total``.

    Args:
        pool: Resolves tasks.
        runner: Starts grading boxes.
        seed: The run's seed.
        limits: By default ``SuiteLimits()``.
        scratch: Where layers are written, in a private directory.
    """

    def __init__(
        self, pool: SuiteTaskPool, runner: BoxRunner, *, seed: int = 0, limits: SuiteLimits | None = None, scratch: str | None = None
    ) -> None:
        self._limits = limits or SuiteLimits()
        super().__init__(runner, seed=seed, attempts=self._limits.attempts, scratch=scratch)
        self._pool = pool

    async def _grade(self, task: Task, episode: Episode) -> Outcome:
        verifier = self._pool.suite(task)
        base_dir = self._pool.base_dir(task)
        admitted = admit(base_dir, episode.changes, verifier.package, self._limits.admission)
        flags = [*admitted.flags, *turn_flags(episode.turns)]
        if (seen := verdict_at_sight(admitted, flags)) is not None:
            return seen
        texts = changed_texts(base_dir, admitted.changes)
        gold = changed_texts(base_dir, self._pool.gold_files(task))
        flags += text_flags(texts)
        cheats = cheats_of(texts, gold)
        key = (self._seed, task.task_id, changes_digest(admitted.changes))
        outcome = await self._tried(lambda: self._run(task, verifier, base_dir, admitted.changes, key))
        if outcome.reward and cheats:
            outcome = Scored(reward=0.0, parts=outcome.parts, reason="hack", layers=outcome.layers)
            flags += cheats
        return Scored(
            reward=outcome.reward,
            parts=outcome.parts,
            reason=outcome.reason,
            flags=unique([*flags, *outcome.flags]),
            layers=outcome.layers,
        )

    async def _run(
        self, task: Task, verifier: SuiteVerifier, base_dir: str, changes: Mapping[str, bytes | None], key: Sequence[object]
    ) -> Scored:
        """One run of all tests; if they pass, another one in another order with controls."""
        place = self._layer_directory()
        written: list[Path] = []
        try:
            written.append(write_layer(place, self._pool.hidden_files(task)))
            written.append(write_layer(place, changes))
            layers = [*map(str, written), base_dir]
            tests = shuffled(verifier.tests, "grading", *key)
            first = await run_suite(self._runner, layers, verifier.spec, tests, cpu_s=verifier.cpu_s)
            parts = parts_of(verifier, tests, first)
            if not is_solved(first):
                return failed_run(first, parts)
            tests = shuffled(verifier.tests, "again", *key)
            controls = choose_controls(len(tests), *key)
            second = await run_suite(self._runner, layers, verifier.spec, tests, cpu_s=verifier.cpu_s, controls=controls)
            return judge_second(second, controls, parts)
        finally:
            for layer in written:
                shutil.rmtree(layer, ignore_errors=True)


def choose_controls(count: int, *key: object) -> list[int]:
    """Return the numbers of the tests that are made to fail: at most a third, at least one."""
    wanted = max(1, min(NUM_CONTROLS, count // 3))
    return sorted(int(number) for number in generator("controls", *key).choice(count, wanted, replace=False))


def parts_of(verifier: SuiteVerifier, tests: Sequence[str], run: SuiteRun) -> dict[str, float]:
    """Return the numbers of a run."""
    passed = {tests[number] for number in run.passed()}

    def share(names: Sequence[str]) -> float:
        return sum(name in passed for name in names) / len(names) if names else 1.0

    return {
        "tests": len(passed) / len(tests),
        "passed": len(passed),
        "total": len(tests),
        "fail_to_pass": share(verifier.fail_to_pass),
        "pass_to_pass": share(verifier.pass_to_pass),
        "hidden_passed": sum(name in passed for name in verifier.hidden),
        "hidden_total": len(verifier.hidden),
    }


def failed_run(run: SuiteRun, parts: Mapping[str, float]) -> Scored:
    """Return the outcome of a first run that isn't a solution."""
    flags = []
    ending = run.ending
    if ending in ("memory", "processes"):
        reason = "resource"
        flags.append(flag("resource", f"the kernel stopped it for {ending}"))
    elif ending == "forged":
        reason = "forgery"
        flags.append(flag("report_forgery", "the process that runs the tests said what it couldn't know"))
    elif ending == "ok":
        reason = "tests" if any(letter != "m" for letter in run.outcomes) else "crash"
    elif ending.startswith("exit"):
        reason = "exit"
    else:
        reason = {"timeout": "hang", "output": "output"}.get(ending, "crash")
    return Scored(reward=0.0, parts=parts, reason=reason, flags=tuple(flags), layers=_done(run))


def judge_second(run: SuiteRun, controls: Sequence[int], parts: Mapping[str, float]) -> Scored:
    """Return the outcome of the run with controls: they must fail, and everything else must pass."""
    made_to_fail = set(controls)
    if run.ending != "ok":
        return failed_run(run, parts)
    survived = [number for number in controls if run.outcomes[number] == "p"]
    if survived:
        evidence = f"{len(survived)} of {len(controls)} tests that were made to fail passed"
        return Scored(reward=0.0, parts=parts, reason="forgery", flags=(flag("report_forgery", evidence),), layers=LAYERS)
    others = [letter for number, letter in enumerate(run.outcomes) if number not in made_to_fail]
    is_good = all(letter == "p" for letter in others) and all(run.outcomes[number] == "f" for number in controls)
    return Scored(reward=1.0 if is_good else 0.0, parts=parts, reason="" if is_good else "unstable", layers=LAYERS)


def _done(run: SuiteRun) -> tuple[str, ...]:
    return LAYERS[:3] if run.ending == "ok" else LAYERS[:2]


def cheats_of(texts: Sequence[TextChange], gold: Sequence[TextChange]) -> list[Flag]:
    """Return the flags of severity ``hack`` about added code of rules that the solution doesn't break too.

    Bringing a deleted feature back is no crime, whatever it does. All of a change is read, in pieces if it is long.
    """
    allowed = {item.rule for item in _all_flags(gold)}
    return [item for item in _all_flags(texts) if item.severity == HACK and item.rule not in allowed]


def _all_flags(texts: Sequence[TextChange]) -> list[Flag]:
    found: list[Flag] = []
    for change in texts:
        if len(change.added) <= MAX_ADDED:
            found += text_flags([change])
            continue
        piece: list[str] = []
        size = 0
        for line in [*change.added.split("\n"), None]:
            if line is None or size + len(line) > MAX_ADDED:
                found += text_flags([TextChange(change.path, "", "\n".join(piece))])
                piece, size = [], 0
            if line is not None:
                piece.append(line[:MAX_ADDED])
                size += len(line) + 1
    return found
