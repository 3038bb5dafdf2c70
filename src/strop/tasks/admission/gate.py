"""The gate of repository tasks: nothing enters a pool without it.

For each draft: the broken state fails and the solution passes, three times each, every time in another order and in a fresh box; a test
that differs between equal runs puts the task into quarantine with the runs as evidence; at least one other mutant of the solution fails;
the instruction doesn't hold a line of the solution; the workspace, with everything that its box shows, holds no copy of it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.core.errors import TaskError
from strop.core.random import key_of
from strop.tasks.admission.compose import compose
from strop.tasks.admission.leaks import LeakReport, scan
from strop.tasks.admission.mutants import gold_mutants
from strop.tasks.admission.needles import leak_in_text, needles_of
from strop.tasks.admission.record import SuiteTask, is_solved, resolve
from strop.tasks.layers import BoxRunner, write_layer
from strop.tasks.makers.draft import Draft
from strop.tasks.repository.layout import is_test_module
from strop.tasks.repository.probe import Repository
from strop.tasks.repository.suite import VENV, SuiteRun, file_of, list_suite, run_suite, shuffled
from strop.tasks.trees import link_tree

ROUNDS = 3
MAX_MUTANTS = 3
MAX_SUSPECTS = 300
EXTRA_TESTS = 40
EXTRA_MS = 600
"""Tests beside those that call what was changed: at most so many, with so much processor time, as it was measured under tracing."""
_SHOWN = 20


class _Refused(Exception):
    """A reason, and what it was seen in."""

    def __init__(self, reason: str, *, is_flaky: bool = False) -> None:
        super().__init__(reason)
        self.is_flaky = is_flaky


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the gate says about a draft.

    Attributes:
        status: ``"admitted"``, ``"refused"`` or ``"quarantined"``.
        reason: Why not, ``""`` for an admitted one.
        task: The task, if it is admitted.
        evidence: Every run with what failed in it, the mutants tried, the leak report.
        seconds: Wall seconds that the gate spent on it.
    """

    status: str
    reason: str = ""
    task: SuiteTask | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class _Sides:
    """Layers of the two states of a draft, topmost first."""

    broken: list[str]
    solved: list[str]


class SuiteGate:
    """Examines drafts of one repository; many may run at the same time.

    Args:
        repository: The repository.
        runner: Starts boxes.
        scratch: Folder for layers and workspaces that are gone again when a verdict is there.
        seed: Fixes orders and choices.
        places: Folders of installed packages that the box shows besides the workspace's.
        tree: Name of the repository's tree in the pool.
    """

    def __init__(self, repository: Repository, runner: BoxRunner, scratch: Path, *, seed: int, places: Sequence[str], tree: str) -> None:
        self._repository = repository
        self._runner = runner
        self._scratch = scratch
        self._seed = seed
        self._places = list(places)
        self._tree = tree
        self._spent = dict(zip(repository.tests, repository.milliseconds, strict=True))

    async def examine(self, draft: Draft) -> Verdict:
        """Return the verdict of a draft.

        Raises:
            SandboxError: The machinery failed.
            TaskError: A layer can't be written, for example because the disk is full.
        """
        began = time.perf_counter()
        evidence: dict[str, Any] = {"runs": []}
        try:
            task = await self._examine(draft, evidence)
        except _Refused as refused:
            status = "quarantined" if refused.is_flaky else "refused"
            return Verdict(status=status, reason=str(refused), evidence=evidence, seconds=time.perf_counter() - began)
        except OSError as error:
            raise TaskError(f"the gate can't write its layers: {error.strerror or error}", retryable=True) from None
        return Verdict(status="admitted", task=task, evidence=evidence, seconds=time.perf_counter() - began)

    async def _examine(self, draft: Draft, evidence: dict[str, Any]) -> SuiteTask:
        self._check_shape(draft)
        with self._sides(draft) as sides:
            if draft.kind == "history":
                tests = await self._decided_by_solution(draft, sides, evidence)
            else:
                tests = self._concerned(draft)
            fails = await self._failing(draft, sides, tests, evidence)
            if draft.kind != "history":
                await self._passing(draft, sides, tests, evidence)
            await self._check_mutants(draft, sides, tests, evidence)
        task = compose(self._repository, draft, tests, fails, tree=self._tree, seed=self._seed)
        self._check_text(draft, task)
        evidence["leaks"] = self._check_leaks(draft, task).to_json()
        return task

    # ------------------------------------------------------------------------------------------------ what is asked

    def _check_shape(self, draft: Draft) -> None:
        packages = {path.split("/")[0] for path in draft.gold}
        if not draft.gold:
            raise _Refused("changes nothing")
        if len(packages) > 1:
            raise _Refused("changes two packages")

    def _concerned(self, draft: Draft) -> list[str]:
        """Tests that call what was changed, and others beside them, most of them in the same files."""
        repository = self._repository
        numbers: set[int] = set()
        for path, first, last in draft.regions:
            numbers |= repository.coverage.tests_of(path, first, last)
        if not numbers:
            raise _Refused("no test calls it")
        concerned = [repository.tests[number] for number in sorted(numbers)]
        if len(concerned) > MAX_SUSPECTS:
            concerned = sorted(concerned, key=lambda test: key_of("concerned", self._seed, draft.digest, test))[:MAX_SUSPECTS]
        files = {file_of(test) for test in concerned}
        others = [test for number, test in enumerate(repository.tests) if number not in numbers]
        others.sort(key=lambda test: (file_of(test) not in files, key_of("beside", self._seed, test)))
        near = [test for test in others if file_of(test) in files][: EXTRA_TESTS // 2]
        far_files = list(dict.fromkeys(file_of(test) for test in others if file_of(test) not in files))[:2]
        far = [test for test in others if file_of(test) in far_files][: EXTRA_TESTS - len(near)]
        budget, kept = EXTRA_MS, []
        for test in (*near, *far):
            budget -= self._spent[test]
            if budget >= 0:
                kept.append(test)
        return [*concerned, *kept]

    async def _decided_by_solution(self, draft: Draft, sides: _Sides, evidence: dict[str, Any]) -> list[str]:
        """For a step of history: the tests that pass on the solution, three times."""
        changed = [path for path, data in draft.tests.items() if is_test_module(path) and data is not None]
        known = [path for path in self._repository.layout.tests if path not in draft.tests and draft.base.get(path, b"") is not None]
        beside = sorted(known, key=lambda path: key_of("history", self._seed, draft.digest, path))[:8]
        try:
            listing = await list_suite(self._runner, sides.solved, self._repository.spec, [*changed, *beside])
        except TaskError as error:
            raise _Refused(f"the solution's tests can't be listed: {error}") from None
        tests = list(listing.tests)[: 4 * MAX_SUSPECTS]
        if not tests:
            raise _Refused("the solution has no tests that can be collected")
        passed = []
        for order in range(ROUNDS):
            mixed = shuffled(tests, "solved", self._seed, draft.digest, order)
            run = await self._run(sides.solved, mixed, "solved", evidence)
            if run.ending != "ok":
                raise _Refused(f"the solution's tests end before the last one ({run.ending})")
            passed.append({mixed[number] for number in run.passed()})
        kept = [test for test in tests if all(test in names for names in passed)]
        evidence["varies"] = sorted(set.union(*passed) - set(kept))[:_SHOWN]
        if not kept:
            raise _Refused("no test passes on the solution")
        return kept

    # ------------------------------------------------------------------------------------------------ runs

    async def _run(self, layers: list[str], tests: list[str], side: str, evidence: dict[str, Any]) -> SuiteRun:
        expected_s = sum(self._spent.get(test, 50) for test in tests) / 1000
        run = await run_suite(self._runner, layers, self._repository.spec, tests, cpu_s=3 + 5 * expected_s)
        failed = sorted(test for test, letter in zip(tests, run.outcomes, strict=True) if letter != "p")
        evidence["runs"].append(
            {
                "side": side,
                "ending": run.ending,
                "tests": len(tests),
                "failed": len(failed),
                "first_failed": failed[:_SHOWN],
                "first_in_order": tests[0],
                "s": round(run.duration_s, 3),
            }
        )
        return run

    async def _failing(self, draft: Draft, sides: _Sides, tests: list[str], evidence: dict[str, Any]) -> list[str]:
        """The tests that fail on the broken state, each of three times."""
        seen: list[set[str]] = []
        for order in range(ROUNDS):
            mixed = shuffled(tests, "broken", self._seed, draft.digest, order)
            run = await self._run(sides.broken, mixed, "broken", evidence)
            if run.ending != "ok":
                if seen:
                    raise _Refused(f"without a change the run ends differently ({run.ending})", is_flaky=True)
                raise _Refused(f"without a change the run ends early ({run.ending})")
            failed = {mixed[number] for number in range(len(mixed))} - {mixed[number] for number in run.passed()}
            if not failed:
                if seen:
                    raise _Refused("without a change it sometimes passes", is_flaky=True)
                raise _Refused("no test notices it")
            if seen and failed != seen[0]:
                evidence["flaky"] = sorted(failed ^ seen[0])[:_SHOWN]
                raise _Refused(f"without a change {len(failed ^ seen[0])} tests pass in one order and fail in another", is_flaky=True)
            if len(failed) == len(tests):
                raise _Refused("nothing passes without it")
            seen.append(failed)
        return [test for test in tests if test in seen[0]]

    async def _passing(self, draft: Draft, sides: _Sides, tests: list[str], evidence: dict[str, Any]) -> None:
        """The solution passes everything, three times."""
        solved = []
        for order in range(ROUNDS):
            run = await self._run(sides.solved, shuffled(tests, "solved", self._seed, draft.digest, order), "solved", evidence)
            solved.append(is_solved(run))
        if not any(solved):
            raise _Refused("the solution fails")
        if not all(solved):
            raise _Refused("the solution passes in one order and fails in another", is_flaky=True)

    async def _check_mutants(self, draft: Draft, sides: _Sides, tests: list[str], evidence: dict[str, Any]) -> None:
        """At least one other mutant of the solution fails."""
        evidence["mutants"] = []
        for name, files in gold_mutants(self._repository.files, draft, seed=self._seed, limit=MAX_MUTANTS):
            layer = write_layer(self._scratch, files)
            try:
                mixed = shuffled(tests, "mutant", self._seed, draft.digest, name)
                run = await self._run([str(layer), *sides.solved], mixed, "mutant", evidence)
            finally:
                shutil.rmtree(layer, ignore_errors=True)
            evidence["mutants"].append([name, not is_solved(run)])
            if not is_solved(run):
                return
        raise _Refused("no mutant of the solution fails" if evidence["mutants"] else "no mutant of the solution can be made")

    # ------------------------------------------------------------------------------------------------ text and places

    def _check_text(self, draft: Draft, task: SuiteTask) -> None:
        before = self._workspace_texts(draft)
        pairs = [(before.get(path) or b"", data) for path, data in draft.gold.items() if data is not None]
        if line := leak_in_text(task.instruction, pairs):
            raise _Refused(f"the instruction holds a line of the solution: {line[:80]}")

    def _workspace_texts(self, draft: Draft) -> dict[str, bytes | None]:
        return {path: draft.base[path] if path in draft.base else self._repository.files.get(path) for path in draft.gold}

    def _check_leaks(self, draft: Draft, task: SuiteTask) -> LeakReport:
        """Lay the workspace as the agent will find it and look for the solution in it."""
        workspace = self._scratch / f"workspace-{draft.digest}"
        shutil.rmtree(workspace, ignore_errors=True)
        try:
            link_tree(self._repository.tree, workspace, resolve(task.base, self._repository.files))
            needles = needles_of(self._workspace_texts(draft), draft.gold)
            shared = {VENV: str(self._repository.environment.folder)}
            report = scan(workspace, needles, outside=self._places, shared=shared)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
        if report.leaks:
            leak = report.leaks[0]
            raise _Refused(f"the solution can be read elsewhere ({leak.kind}): {leak.path}: {leak.evidence}")
        return report

    @contextmanager
    def _sides(self, draft: Draft) -> Iterator[_Sides]:
        """Write the layers of a draft; they are gone at the end."""
        written = []
        try:
            tree = str(self._repository.tree)
            base = write_layer(self._scratch, draft.base)
            written.append(base)
            gold = write_layer(self._scratch, draft.gold)
            written.append(gold)
            tests = []
            if draft.tests:
                layer = write_layer(self._scratch, draft.tests)
                written.append(layer)
                tests = [str(layer)]
            yield _Sides([*tests, str(base), tree], [*tests, str(gold), str(base), tree])
        finally:
            for layer in written:
                shutil.rmtree(layer, ignore_errors=True)
