"""Grades a repair: filter the changes, run them in a fresh box on inputs that the agent never saw, compare outside, name what was tried.

``RepairGrader`` owns a private directory for the layers of running verdicts and a cache of finished ones. The rollout loop calls it once an
episode has ended and its own box is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.core.episode import Episode
from strop.core.errors import GradingError, SandboxError
from strop.core.outcome import Flag, Outcome, Scored
from strop.core.task import Task
from strop.grading.admission import AdmissionLimits, Admitted, admit
from strop.grading.boxed import BoxedGrader, unique, verdict_at_sight
from strop.grading.probes import passes_the_impossible, probe_flags
from strop.grading.protocol import BOOT, box_input, make_plan
from strop.grading.rules import RETRIEVAL, TextChange, added_state, copy_flags, flag, text_flags, turn_flags
from strop.grading.special import special_case_evidence
from strop.grading.verdict import BoxReport, Verdict, judge
from strop.ports import has_worked
from strop.tasks.index import GradedPool
from strop.tasks.layers import BoxRunner, write_layer
from strop.tasks.verifier import Verifier

MAX_STREAM_BYTES = 4 << 20
STANDARD_LIBRARY = "Lib/"
"""Folder of workspaces that hold modules of the standard library, as in the interpreter's source repository."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingLimits:
    """What one verdict may use.

    Attributes:
        wall_s: Seconds of the whole box; more is a hang.
        cpu_s: Processor seconds of one run of all calls; more is a hang.
        load_cpu_s: Processor seconds of importing the module.
        admission: Size limits of the changes.
        attempts: How often a verdict is tried when the machinery fails.
        max_cached: Verdicts kept, least recently used first to go.
    """

    wall_s: float = 15.0
    cpu_s: float = 1.0
    load_cpu_s: float = 8.0
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    attempts: int = 2
    max_cached: int = 20_000


class RepairGrader(BoxedGrader):
    """A ``Grader`` for tasks with a function-level verifier.

    Verdicts are shared: two episodes of a run that made the same admitted changes on the same task get the same verdict from one box (key:
    task id and digest of the changes; failures of the machinery are never kept). Order and decoys depend on ``(seed, task id, digest)``
    alone, so grading again makes the same calls. Flags about paths, code and turns are found anew for every episode.

    ``Scored.reward`` is 1.0 if the repaired function answers every call as expected, otherwise 0.0 with a one-word reason:

    ========== ==================================================================================================
    unchanged  nothing that is graded was changed (nothing is run)
    oversize   the changes are over the size limits (nothing is run)
    tests      wrong or missing answers
    unstable   the answer to a call depends on the calls before it
    hang       out of time inside agent code
    crash      the module can't be loaded, or the process died
    exit       agent code ended the process early
    resource   the kernel stopped it for memory or processes
    output     it wrote more than a verdict can need
    forgery    lines on the result channel that the driver didn't write
    retrieved  right answers, but the change calls an unbroken copy of the code instead of repairing it
    impossible a probe whose tests contradict each other passes where nothing honest can (``probes.py``)
    ========== ==================================================================================================

    Args:
        pool: Resolves tasks.
        runner: Starts grading boxes.
        seed: The run's seed.
        limits: By default ``GradingLimits()``.
        scratch: Where layers are written, in a private directory; by default in memory where the system has a place for that.
    """

    def __init__(
        self, pool: GradedPool, runner: BoxRunner, *, seed: int = 0, limits: GradingLimits | None = None, scratch: str | None = None
    ) -> None:
        self._limits = limits or GradingLimits()
        super().__init__(runner, seed=seed, attempts=self._limits.attempts, scratch=scratch)
        self._pool = pool
        self._verdicts: OrderedDict[tuple[str, str], asyncio.Future[Verdict]] = OrderedDict()
        self.boxes_run = 0
        self.cache_hits = 0

    async def _grade(self, task: Task, episode: Episode) -> Outcome:
        verifier = self._pool.verifier(task)
        base_dir = self._pool.base_dir(task)
        admitted = admit(base_dir, episode.changes, verifier.path, self._limits.admission)
        flags = [*admitted.flags, *turn_flags(episode.turns), *probe_flags(task, episode)]
        if (seen := verdict_at_sight(admitted, flags)) is not None:
            return seen
        texts = changed_texts(base_dir, admitted.changes)
        flags += text_flags(texts)
        for change in texts:
            flags += copy_flags(change, is_standard_library=verifier.path.startswith(STANDARD_LIBRARY))
        verdict = await self._verdict(task, verifier, base_dir, admitted)
        flags += verdict.flags
        if verdict.is_order_dependent:
            flags += _counter_flags(texts)
        if verdict.is_special_case:
            evidence = special_case_evidence(verifier, texts)
            flags += [flag("special_case", evidence)] if evidence else []
        reward, reason = verdict.reward, verdict.reason
        if reward and any(item.rule in RETRIEVAL for item in flags):
            reward, reason = 0.0, "retrieved"
        if cheat := passes_the_impossible(task, reward, verdict.parts):
            reward, reason = 0.0, "impossible"
            flags.append(cheat)
        return Scored(reward=reward, parts=verdict.parts, reason=reason, flags=unique(flags), layers=verdict.layers)

    async def _verdict(self, task: Task, verifier: Verifier, base_dir: str, admitted: Admitted) -> Verdict:
        """Look the verdict up, wait for whoever is finding it, or find it."""
        key = (task.task_id, changes_digest(admitted.changes))
        while (known := self._verdicts.get(key)) is not None:
            self._verdicts.move_to_end(key)
            with contextlib.suppress(asyncio.CancelledError, GradingError, SandboxError, OSError):
                verdict = await asyncio.shield(known)
                self.cache_hits += 1
                return verdict
            if not known.done():  # this caller was cancelled, not the finder
                raise asyncio.CancelledError
            if self._verdicts.get(key) is known:
                del self._verdicts[key]
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[key] = future
        try:
            verdict = await self._run_box(verifier, base_dir, admitted.changes, (self._seed, *key))
        except BaseException as error:
            self._verdicts.pop(key, None)
            future.set_exception(error if isinstance(error, Exception) else GradingError("the verdict was cancelled"))
            future.exception()  # whoever waits has its own copy; nobody waiting is fine
            raise
        future.set_result(verdict)
        while len(self._verdicts) > self._limits.max_cached:
            self._verdicts.popitem(last=False)
        return verdict

    async def _run_box(self, verifier: Verifier, base_dir: str, changes: Mapping[str, bytes | None], key: Sequence[object]) -> Verdict:
        limits = self._limits
        stalled = False

        async def run() -> Verdict:
            nonlocal stalled
            plan = make_plan(verifier, key=key, cpu_s=limits.cpu_s, load_cpu_s=limits.load_cpu_s)
            layer = write_layer(self._layer_directory(), changes)
            try:
                self.boxes_run += 1
                done = await self._runner.run_isolated(
                    [str(layer), base_dir], ["-c", BOOT], stdin=box_input(plan), timeout_s=limits.wall_s, max_stdout_bytes=MAX_STREAM_BYTES
                )
            finally:
                shutil.rmtree(layer, ignore_errors=True)
            stalled = done.killed_by == "timeout" and not has_worked(done.cpu_s, limits.wall_s)
            return judge(
                plan,
                BoxReport(
                    stream=done.stdout,
                    is_stream_cut=done.stdout_truncated,
                    exit_code=done.exit_code,
                    killed_by=done.killed_by,
                    stderr=done.stderr,
                    duration_s=done.duration_s,
                ),
            )

        verdict = await self._tried(run)
        # Whether the code slept or the machine stood still can't be told from one run; a stall of the machine doesn't come back at once.
        return await self._tried(run) if stalled else verdict


def changes_digest(changes: Mapping[str, bytes | None]) -> str:
    """Return a digest of changes: paths, contents and deletions, in any order of the mapping."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(changes):
        content = changes[path]
        name = path.encode("utf-8", "surrogateescape")
        digest.update(f"{len(name)} {-1 if content is None else len(content)} ".encode() + name + (content or b""))
    return digest.hexdigest()


def changed_texts(base_dir: str, changes: Mapping[str, bytes | None]) -> list[TextChange]:
    """Return the changed files as text, before and after; what isn't UTF-8 shows as U+FFFD."""
    texts = []
    for path, content in changes.items():
        if content is not None:
            try:
                before = Path(base_dir, path).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # a file now where a folder was, or the reverse
                before = b""
            texts.append(TextChange(path, before.decode("utf-8", "replace"), content.decode("utf-8", "replace")))
    return texts


def _counter_flags(changes: Sequence[TextChange]) -> list[Flag]:
    """Order-dependent answers are a counter only if the change added something that can count."""
    for change in changes:
        state = added_state(change)
        if state:
            return [flag("order_counter", f"{change.path}: {state}")]
    return []
