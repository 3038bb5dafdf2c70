"""Grades finished episodes again from what is stored and says what changed.

An episode holds everything that a verdict needs (task, changes, turns), and orders are keyed by the run's seed, so the same grader gives
the same outcome; a difference means that the verifier, the rules or the machinery changed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice

from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Failed, Outcome, Scored
from strop.core.task import Task
from strop.ports import Grader


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An episode whose outcome is another one now."""

    key: EpisodeKey
    before: Outcome | None
    after: Outcome

    def __str__(self) -> str:
        reasons = "; ".join(why(self.before, self.after))
        return f"{self.key}: {describe(self.before)} -> {describe(self.after)}" + (f" ({reasons})" if reasons else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrade:
    """Result of grading a run again.

    Attributes:
        graded: Episodes graded.
        changes: Those with another outcome.
        skipped: Episodes whose task the pool doesn't have, by task id.
        lost: Episodes that the machinery lost before there was anything to grade; they stay what they are.
        ungraded: Episodes that never had a verdict, such as those of mid-training's expert; there is nothing to compare.
    """

    graded: int
    changes: tuple[Change, ...]
    skipped: Mapping[str, int]
    lost: int = 0
    ungraded: int = 0

    def lines(self) -> Iterator[str]:
        """Yield the report: a summary, then one line a change."""
        yield f"{self.graded} episodes graded again, {len(self.changes)} outcomes changed"
        if self.lost:
            yield f"{self.lost} episodes skipped: the machinery lost them before there was anything to grade"
        if self.ungraded:
            yield f"{self.ungraded} episodes skipped: they were never graded"
        for task_id, count in self.skipped.items():
            yield f"{count} episodes of {task_id} skipped: the pool has no such task"
        yield from map(str, self.changes)


async def regrade(episodes: Iterable[Episode], tasks: Iterable[Task], grader: Grader, *, at_once: int = 1) -> Regrade:
    """Grade stored episodes again.

    Args:
        episodes: For example ``Store.episodes(phase="rl")``; read as they are needed.
        tasks: The tasks of the pool, all splits.
        grader: Built with the run's seed.
        at_once: Episodes graded at the same time.
    """
    by_id = {task.task_id: task for task in tasks}
    graded, lost, ungraded, changes = 0, 0, 0, []
    skipped: Counter[str] = Counter()
    remaining = iter(episodes)
    while batch := list(islice(remaining, at_once)):
        work: list[tuple[Task, Episode]] = []
        for episode in batch:
            task = by_id.get(episode.key.task_id)
            if isinstance(episode.outcome, Failed) and not episode.traces:
                lost += 1
            elif task is None:
                skipped[episode.key.task_id] += 1
            elif episode.outcome is None:
                ungraded += 1
            else:
                work.append((task, episode))
        outcomes = await asyncio.gather(*(grader.grade(task, episode) for task, episode in work))
        graded += len(work)
        for (_, episode), after in zip(work, outcomes, strict=True):
            if after != episode.outcome:
                changes.append(Change(key=episode.key, before=episode.outcome, after=after))
    return Regrade(graded=graded, changes=tuple(changes), skipped=dict(skipped), lost=lost, ungraded=ungraded)


def why(before: Outcome | None, after: Outcome) -> Iterator[str]:
    """Yield what differs between two verdicts beyond what ``describe`` says: parts, then flags with their evidence, then other fields."""
    if not isinstance(before, Scored) or not isinstance(after, Scored):
        return
    for name in sorted({*before.parts, *after.parts}):
        old, new = before.parts.get(name), after.parts.get(name)
        if old != new:
            yield f"{name} {'none' if old is None else f'{old:g}'} -> {'none' if new is None else f'{new:g}'}"
    for word, flags, others in (("no longer", before.flags, after.flags), ("now", after.flags, before.flags)):
        yield from (f"{word} {flag.rule}: {flag.evidence}" for flag in flags if flag not in others)
    for item in fields(Scored):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if item.name not in ("reward", "reason", "parts", "flags") and old != new:
            yield f"{item.name} {old!r} -> {new!r}"


def describe(outcome: Outcome | None) -> str:
    """Return an outcome in a few words: ``"1 26/26"``, ``"0 tests 18/26 [special_case]"``, ``"failed: ..."``."""
    if outcome is None:
        return "not graded"
    if not isinstance(outcome, Scored):
        return f"{type(outcome).__name__.lower()}: {getattr(outcome, 'error', getattr(outcome, 'reason', ''))}"
    words = [f"{outcome.reward:g}", outcome.reason]
    if outcome.parts:
        words.append(f"{outcome.parts['passed']:g}/{outcome.parts['total']:g}")
    flags = sorted({flag.rule for flag in outcome.flags})
    return " ".join(filter(None, [*words, f"[{', '.join(flags)}]" if flags else ""]))
