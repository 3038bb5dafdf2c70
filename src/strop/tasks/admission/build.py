"""``strop env build``: sources in, a pool of gated tasks out. Resumable, parallel, with progress.

OUT.work/ keeps what a later run needs: source archives, trees, how each suite ran, and every verdict by source. An interrupted build
goes on where it stopped; a task file is written whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.core.errors import SandboxError, TaskError
from strop.tasks.admission.gate import SuiteGate, Verdict
from strop.tasks.admission.pool import FORMAT, KINDS, SuitePool, file_name, read_task, write_atomic, write_task
from strop.tasks.admission.record import SuiteTask
from strop.tasks.admission.tally import SourceTally
from strop.tasks.build import Progress
from strop.tasks.layers import BoxRunner
from strop.tasks.makers.deletion import deletion_drafts
from strop.tasks.makers.draft import Draft
from strop.tasks.makers.history import history_draft, steps_of
from strop.tasks.makers.mutation import combined_drafts, covered_mutations, single_drafts
from strop.tasks.makers.splice import Mutation
from strop.tasks.poolfile import write_tree_archive
from strop.tasks.repository.layout import num_source_lines
from strop.tasks.repository.probe import Repository, probe
from strop.tasks.repository.remember import load_probe, save_probe
from strop.tasks.repository.source import Source, open_source

TRIES = 5
"""Drafts looked at for each task wanted."""
_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """What to build.

    Attributes:
        out: The pool directory.
        limits: Admitted tasks wanted of each kind, per source.
        seed: Fixes every choice.
        workers: Drafts examined at the same time.
        places: Folders of installed packages that a box shows besides the workspace's (for the leak scan).
        releases: Earlier releases whose differences make history, for sources that aren't git checkouts.
    """

    out: Path
    limits: dict[str, int] = field(default_factory=lambda: {"mutation": 30, "combined": 8, "deletion": 12, "history": 10})
    seed: int = 0
    workers: int = 2
    places: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()

    @property
    def work(self) -> Path:
        """Where finished parts are kept."""
        return self.out.with_name(f"{self.out.name}.work")


class SuiteBuild:
    """One build of a pool.

    Args:
        options: What to build.
        runner: Starts boxes.
        scratch: Folder for layers that are gone again after a verdict, in memory if possible.
        say: Called with one line about what happens.
    """

    def __init__(self, options: BuildOptions, runner: BoxRunner, scratch: Path, *, say: Callable[[str], None] = lambda text: None) -> None:
        self.options = options
        self._runner = runner
        self._scratch = scratch
        self._say = say
        self.tallies: list[SourceTally] = []
        self._meta: dict[str, Any] = {"format": FORMAT, "seed": options.seed, "trees": {}, "sources": {}}
        _check_target(options.out)
        if (options.out / "pool.json").is_file():
            self._meta.update(SuitePool(options.out, options.work / "cache").meta)

    async def add(self, text: str) -> SourceTally:
        """Make tasks of one source and write them into the pool.

        Args:
            text: A folder, an archive or a package name.

        Returns:
            What was made, admitted and refused. A source that can't be used is a tally with a problem, not an error.

        Raises:
            SandboxError: The machinery failed.
            TaskError: The pool can't be written.
        """
        began = time.perf_counter()
        tally = SourceTally(source=text)
        self.tallies.append(tally)
        try:
            source = open_source(text, download_dir=self.options.work / "archives", releases=self.options.releases)
            repository = await self._probed(source)
        except OSError as error:
            raise TaskError(f"the build can't go on: {error}", retryable=True) from None
        except TaskError as error:
            if "no space left" in str(error).lower():
                raise
            tally.problem = str(error)
            return tally
        tally.source = source.name
        tally.lines = num_source_lines(repository.files, repository.layout)
        tally.tests = len(repository.tests)
        tally.suite_s = repository.suite_s
        tally.probe_s = time.perf_counter() - began
        for reason, (count, example) in {**source.notes, **repository.excluded}.items():
            tally.notes[reason] = f"{count}, for example {example}"
        self._register(repository)
        await _Examination(self, repository, tally).run()
        tally.seconds = time.perf_counter() - began
        self._meta["sources"][source.name] = tally.to_json()
        self._write_meta()
        return tally

    async def _probed(self, source: Source) -> Repository:
        kept = self.options.work / "state" / f"{source.name}-{source.digest}.probe.json"
        known = load_probe(kept, source, self.options.out)
        if known is not None:
            return known
        self._say(f"{source.name}: {len(source.files)} files; finding how to install it and run its tests")
        repository = await probe(source, self._runner, self.options.out, self.options.work)
        save_probe(kept, repository)
        return repository

    def _register(self, repository: Repository) -> None:
        """Put the tree into the pool, before any task refers to it."""
        tree = tree_name(repository)
        archive = self.options.out / "trees" / f"{tree}.tar.zst"
        if not archive.is_file():
            try:
                part = archive.with_name(f".{archive.name}.part")
                write_tree_archive(part, repository.files)
                part.replace(archive)
            except OSError as error:
                raise TaskError(f"{str(archive)!r} can't be written: {error.strerror or error}") from None
        self._meta["trees"][tree] = {
            "name": repository.metadata.name,
            "version": repository.metadata.version,
            "entry_points": repository.metadata.entry_points,
            "environment": repository.environment.folder.name,
            "requirements": list(repository.environment.requirements),
            "not_installed": [list(row) for row in repository.environment.missing],
        }
        self._write_meta()

    def _write_meta(self) -> None:
        write_atomic(self.options.out / "pool.json", (json.dumps(self._meta, indent=1) + "\n").encode())

    def remove_unused(self) -> None:
        """Remove environments that no tree of the pool uses, for example those of a pytest that turned out to be too new."""
        used = {row["environment"] for row in self._meta["trees"].values()}
        folder = self.options.out / "environments"
        for path in sorted(folder.iterdir()) if folder.is_dir() and used else []:
            if path.name.removesuffix(".missing") not in used:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def make_gate(self, repository: Repository) -> SuiteGate:
        """Return the gate of a repository."""
        options = self.options
        return SuiteGate(repository, self._runner, self._scratch, seed=options.seed, places=options.places, tree=tree_name(repository))


def tree_name(repository: Repository) -> str:
    """Name of a repository's tree in a pool."""
    return f"{repository.source.name}-{repository.source.digest[:8]}"


class _Examination:
    """The drafts of one repository, maker by maker."""

    def __init__(self, build: SuiteBuild, repository: Repository, tally: SourceTally) -> None:
        self._options = build.options
        self._repository = repository
        self._tally = tally
        self._gate = build.make_gate(repository)
        self._log = (
            build.options.work / "state" / f"{repository.source.name}-{repository.source.digest}-{build.options.seed}.verdicts.jsonl"
        )
        self._known = {row["draft"]: row for row in _read_lines(self._log)}
        self._admitted: list[Mutation] = []

    async def run(self) -> None:
        """Examine drafts of each kind until enough are admitted or none are left."""
        repository, seed, limits = self._repository, self._options.seed, self._options.limits
        if limits.get("mutation", 0):
            await self._take("mutation", single_drafts(repository, covered_mutations(repository), seed=seed))
        if limits.get("combined", 0):
            drafts = combined_drafts(repository, self._admitted, seed=seed, limit=TRIES * limits["combined"])
            await self._take("combined", drafts)
        if limits.get("deletion", 0):
            await self._take("deletion", deletion_drafts(repository, seed=seed))
        if limits.get("history", 0):
            await self._take("history", self._history())

    def _history(self) -> Iterator[Draft]:
        for step in steps_of(self._repository, limit=TRIES * self._options.limits["history"]):
            draft = history_draft(self._repository, step)
            if isinstance(draft, str):
                self._tally.count("history", "refused", draft, 0.0)
                if f"step {step.name}" in self._known:
                    continue
                _append(self._log, {"draft": f"step {step.name}", "status": "refused", "reason": draft, "seconds": 0.0})
                _append(
                    self._options.out / "refused.jsonl",
                    {"id": f"{self._repository.source.name} {step.name}", "kind": "history", "reason": draft},
                )
            else:
                yield draft

    async def _take(self, kind: str, drafts: Iterable[Draft]) -> None:
        """Examine drafts in order, several at a time; verdicts are used in the order of the drafts, so timing decides nothing."""
        wanted = self._options.limits[kind]
        progress = Progress(f"{self._repository.source.name} {kind}", wanted, "admitted")
        running: deque[tuple[Draft, asyncio.Task[Verdict]]] = deque()
        source = iter(drafts)
        tried = 0
        try:
            while self._tally.number(kind, "admitted") < wanted:
                while len(running) < self._options.workers and tried < TRIES * wanted + 10:
                    draft = next(source, None)
                    if draft is None:
                        break
                    tried += 1
                    running.append((draft, asyncio.create_task(self._examine(draft))))
                if not running:
                    break
                draft, task = running.popleft()
                self._use(draft, await task, progress)
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _examine(self, draft: Draft) -> Verdict:
        row = self._known.get(_key(draft))
        if row is None:
            return await self._examine_anew(draft)
        task = read_task(self._options.out / "tasks" / row["file"]) if row["status"] == "admitted" else None
        return Verdict(status=row["status"], reason=row["reason"], task=task, evidence={"known": True}, seconds=row["seconds"])

    async def _examine_anew(self, draft: Draft) -> Verdict:
        """Ask the gate; a box that breaks once is no verdict about a draft."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._gate.examine(draft)
            except SandboxError as error:
                if not error.retryable:
                    raise
        return await self._gate.examine(draft)

    def _use(self, draft: Draft, verdict: Verdict, progress: Progress) -> None:
        """Write a verdict down."""
        kind, out = draft.kind, self._options.out
        self._tally.count(kind, verdict.status, verdict.reason, verdict.seconds)
        if verdict.status == "admitted":
            self._admitted += draft.mutations if len(draft.mutations) == 1 else ()
            progress.advance(1, f"of {self._tally.made(kind)} drafts")
        if verdict.evidence.get("known"):
            return
        row: dict[str, Any] = {
            "draft": _key(draft),
            "status": verdict.status,
            "reason": verdict.reason,
            "seconds": round(verdict.seconds, 2),
        }
        if verdict.task is not None:
            leaks = verdict.evidence["leaks"]
            task = _with_report(verdict.task, verdict)
            row["file"] = write_task(out / "tasks", task).name
            write_atomic(out / "leaks" / f"{file_name(task.task_id)}.json", json.dumps(leaks, indent=1).encode())
        else:
            name = f"{self._repository.source.name}:{draft.cluster}#{draft.digest}"
            line = {"id": name, "kind": kind, "families": list(draft.families), "reason": verdict.reason}
            if verdict.status == "quarantined":
                _append(out / "quarantine.jsonl", {**line, "evidence": dict(verdict.evidence)})
            else:
                _append(out / "refused.jsonl", line)
        _append(self._log, row)


def _with_report(task: SuiteTask, verdict: Verdict) -> SuiteTask:
    return replace(
        task, report={**{key: value for key, value in verdict.evidence.items() if key != "leaks"}, "seconds": round(verdict.seconds, 2)}
    )


def _key(draft: Draft) -> str:
    return f"{draft.kind}:{draft.cluster}#{draft.digest}"


def _append(path: Path, row: dict[str, Any]) -> None:
    """Add a line; a line that a crash cut off is ended first, so that it can't spoil the next one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write((json.dumps(row) + "\n").encode())
    except OSError as error:
        raise TaskError(f"{str(path)!r} can't be written: {error.strerror or error}") from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _check_target(out: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        TaskError: It does, or it can't be written.
    """
    try:
        if out.exists() and not out.is_dir():
            raise TaskError(f"{str(out)!r} is a file; give a folder for the pool")
        if out.is_dir() and any(out.iterdir()) and not (out / "pool.json").is_file() and not (out / "environments").is_dir():
            raise TaskError(f"{str(out)!r} isn't empty and holds no pool; give a new folder")
        out.mkdir(parents=True, exist_ok=True)
        usage = shutil.disk_usage(out)
    except OSError as error:
        raise TaskError(f"the pool can't be written to {str(out)!r}: {error.strerror or error}") from None
    if usage.free < 64 << 20:
        raise TaskError(f"the pool can't be written to {str(out)!r}: no space left on the disk ({usage.free >> 20} MiB free, 64 needed)")


def count_kinds(tallies: Sequence[SourceTally], status: str) -> int:
    """Number of drafts of all sources with a status."""
    return sum(tally.number(kind, status) for tally in tallies for kind in KINDS)
