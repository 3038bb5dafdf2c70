"""``strop replay``: run a finished run again and compare every token, reward and weight digest with the record.

The run's own code is executed with its stored configuration, over a scratch directory. ``ReplayStore`` stands where the run's store stood
and compares whatever is written; in-flight swaps are forced to their recorded positions; episodes that machinery lost in the record are
lost again. The first difference stops the replay, since everything after it follows from it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey, Trace
from strop.core.errors import CheckpointError, NumericsError
from strop.core.outcome import Failed, Outcome, Ungraded
from strop.core.task import Task
from strop.ports import Engine, Grader
from strop.rl.pack import trace_versions
from strop.runtime.forced import ForcedEngine
from strop.store import RunDir, Store

COMPARED_FACTS = ("conservation", "policy_version")


class ReplayDifference(NumericsError):
    """The first thing that differs between a replay and its record."""


@dataclass(slots=True)
class ReplayReport:
    """What a replay found.

    Attributes:
        episodes: Episodes compared token by token.
        tokens: Their tokens.
        unplayed: Episodes that the record lost to machinery, so that there is nothing to compare.
        commits: Commit points compared.
        digests: Weight digests compared.
        differences: Empty, or the first difference with the ids involved.
    """

    episodes: int = 0
    tokens: int = 0
    unplayed: int = 0
    commits: int = 0
    digests: int = 0
    differences: list[str] = field(default_factory=list)


class ReplayStore(Store):
    """A store over a scratch directory that holds everything written against a record.

    Args:
        path: The scratch directory.
        recorded: The finished run.
    """

    def __init__(self, path: str | Path, recorded: Store) -> None:
        super().__init__(path, recover=True)
        self.recorded = recorded
        self.report = ReplayReport()

    def put_episode(self, episode: Episode) -> None:
        """Compare, then keep.

        Raises:
            ReplayDifference: A token, log-probability, route, version, change or verdict differs; names the place.
        """
        try:
            record = self.recorded.get(episode.key)
        except CheckpointError:
            raise ReplayDifference(f"episode {episode.key} is not in the record") from None
        if record.traces:
            difference = compare_episodes(record, episode)
            if difference:
                raise ReplayDifference(f"episode {episode.key}: {difference}", ids={"episode": str(episode.key)})
            self.report.episodes += 1
            self.report.tokens += sum(len(trace) for trace in episode.traces)
        else:
            self.report.unplayed += 1
        super().put_episode(episode)

    def commit_step(self, step: int, *, phase: str = "rl", checkpoint: str = "", stage: str = "", **facts: Any) -> None:
        """Compare digests and counts, then commit.

        Raises:
            ReplayDifference: A fact of the step differs or the record has no such commit.
        """
        found = [c for c in self.recorded.commits(phase=phase) if c.step == step and c.stage == stage]
        if not found:
            raise ReplayDifference(f"step {step} of {phase} {stage} is not in the record")
        for name, value in facts.items():
            if "digest" in name or name in COMPARED_FACTS:
                expected = found[-1].facts.get(name)
                if expected != value:
                    raise ReplayDifference(f"step {step} of {phase} {stage}: {name} is {value!r}, the record has {expected!r}")
                self.report.digests += "digest" in name
        self.report.commits += 1
        super().commit_step(step, phase=phase, checkpoint=checkpoint, stage=stage, **facts)

    def finish(self) -> ReplayReport:
        """Compare the number of episodes of every phase and return the report.

        Raises:
            ReplayDifference: The record holds episodes that the replay didn't reach.
        """
        expected, actual = self.recorded.counts(), self.counts()
        for phase in sorted(expected | actual):
            if expected.get(phase, 0) != actual.get(phase, 0):
                raise ReplayDifference(f"phase {phase} has {actual.get(phase, 0)} episodes, the record has {expected.get(phase, 0)}")
        return self.report

    # ------------------------------------------------------------------------------------------------ forcing

    def forced_engine(self, engine: Engine, config: RunConfig) -> Engine:
        """Wrap the engine so that swaps fall where they fell; with alternating phases the engine is returned as it is."""
        if config.rl.max_staleness == 0:
            return engine

        def versions(key: EpisodeKey) -> np.ndarray | None:
            if key.phase != "rl":
                return None
            record = self.recorded.get(key)
            return trace_versions(record.traces[0]) if record.traces else None

        rows = [(row.key, row.version_min) for row in self.recorded.rows(phase="rl") if row.tokens]
        return ForcedEngine(engine, versions, lambda version: [key for key, oldest in rows if oldest < version])

    def forced_grader(self, grader: Grader) -> Grader:
        """Wrap the grader so that what the record lost is lost again."""
        return _ForcedGrader(grader, self.recorded)


class _ForcedGrader:
    """Repeats recorded ``Failed`` and ``Ungraded``; grades everything else."""

    def __init__(self, inner: Grader, recorded: Store) -> None:
        self._inner, self._recorded = inner, recorded

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        outcome = self._recorded.get(episode.key).outcome
        return outcome if isinstance(outcome, (Failed, Ungraded)) else await self._inner.grade(task, episode)

    async def close(self) -> None:
        await self._inner.close()


def replay(run: RunDir, execute: Callable[[RunDir, ReplayStore], object], *, scratch: str | Path | None = None) -> ReplayReport:
    """Execute a finished run again and compare.

    Args:
        run: The record, opened for reading.
        execute: Does what the run did, from the beginning, into the given run directory, whose store is the given one; it wraps its engine
            with ``store.forced_engine`` and its grader with ``store.forced_grader``.
        scratch: An empty directory for the copy; by default a temporary one that is removed.

    Returns:
        The report; ``differences`` is empty if everything was reproduced.
    """
    place = Path(scratch) if scratch is not None else Path(tempfile.mkdtemp(prefix="strop-replay-"))
    place.mkdir(parents=True, exist_ok=True)
    (place / "logs").mkdir(exist_ok=True)
    store = ReplayStore(place, run.store)
    try:
        execute(RunDir(place, run.config, store, dict(run.facts), False, None), store)
        return store.finish()
    except ReplayDifference as difference:
        store.report.differences.append(str(difference))
        return store.report
    finally:
        store.close()
        if scratch is None:
            shutil.rmtree(place, ignore_errors=True)


def compare_episodes(record: Episode, episode: Episode) -> str:
    """Return what differs first, in the order in which one causes the other, or ``""``."""
    if len(record.traces) != len(episode.traces):
        return f"{len(episode.traces)} traces, the record has {len(record.traces)}"
    for number, (expected, actual) in enumerate(zip(record.traces, episode.traces, strict=True)):
        difference = _compare_traces(expected, actual)
        if difference:
            return f"trace {number}: {difference}"
    if record.stop_reason != episode.stop_reason:
        return f"stop reason {episode.stop_reason!r}, the record has {record.stop_reason!r}"
    if dict(record.changes) != dict(episode.changes):
        return f"changed files {_files(episode.changes)}, the record has {_files(record.changes)}"
    if record.outcome != episode.outcome:
        return f"outcome {episode.outcome}, the record has {record.outcome}"
    return ""


def _compare_traces(expected: Trace, actual: Trace) -> str:
    pairs = [
        ("token", expected.token_ids, actual.token_ids),
        ("loss mask", expected.loss_mask, actual.loss_mask),
        ("log-probability", expected.logprobs, actual.logprobs),
        ("version", trace_versions(expected), trace_versions(actual)),
    ]
    if expected.routes is not None and actual.routes is not None:
        pairs.append(("routes of row", expected.routes.expert_ids, actual.routes.expert_ids))
    for name, one, two in pairs:
        common = min(len(one), len(two))
        at = np.flatnonzero((one[:common] != two[:common]).reshape(common, -1).any(1))
        if len(at):
            return f"{name} {int(at[0])} is {two[at[0]].tolist()}, the record has {one[at[0]].tolist()}"
        if len(one) != len(two):
            return f"{len(two)} tokens, the record has {len(one)}"
    if (expected.routes is None) != (actual.routes is None):
        return "routes are missing on one side"
    return ""


def _files(changes: Mapping[str, bytes | None]) -> str:
    return ", ".join(f"{path} ({'deleted' if data is None else f'{len(data)} bytes'})" for path, data in sorted(changes.items())) or "none"
