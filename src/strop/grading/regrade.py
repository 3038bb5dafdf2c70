"""Grades finished episodes again from what is stored and says what changed.

An episode holds everything that a verdict needs (task, changes, turns), and orders are keyed by the run's seed, so the same grader gives
the same outcome; a difference means that the verifier, the rules or the machinery changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Outcome, Scored
from strop.core.task import Task
from strop.ports import Grader


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An episode whose outcome is another one now."""

    key: EpisodeKey
    before: Outcome | None
    after: Outcome

    def __str__(self) -> str:
        return f"{self.key}: {describe(self.before)} -> {describe(self.after)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrade:
    """Result of grading a run again.

    Attributes:
        graded: Episodes graded.
        changes: Those with another outcome.
        skipped: Episodes whose task the pool doesn't have, by task id.
    """

    graded: int
    changes: tuple[Change, ...]
    skipped: Mapping[str, int]

    def lines(self) -> Iterator[str]:
        """Yield the report: a summary, then one line a change."""
        yield f"{self.graded} episodes graded again, {len(self.changes)} outcomes changed"
        for task_id, count in self.skipped.items():
            yield f"{count} episodes of {task_id} skipped: the pool has no such task"
        yield from map(str, self.changes)


async def regrade(episodes: Iterable[Episode], tasks: Iterable[Task], grader: Grader) -> Regrade:
    """Grade stored episodes again.

    Args:
        episodes: For example ``Store.episodes(phase="rl")``.
        tasks: The tasks of the pool, all splits.
        grader: Built with the run's seed.
    """
    by_id = {task.task_id: task for task in tasks}
    graded, changes = 0, []
    skipped: Counter[str] = Counter()
    for episode in episodes:
        task = by_id.get(episode.key.task_id)
        if task is None:
            skipped[episode.key.task_id] += 1
            continue
        graded += 1
        after = await grader.grade(task, episode)
        if after != episode.outcome:
            changes.append(Change(key=episode.key, before=episode.outcome, after=after))
    return Regrade(graded=graded, changes=tuple(changes), skipped=dict(skipped))


def describe(outcome: Outcome | None) -> str:
    """Return an outcome in a few words: ``"1.0"``, ``"0.0 tests 18/26 [special_case]"``, ``"failed: ..."``."""
    if outcome is None:
        return "not graded"
    if not isinstance(outcome, Scored):
        return f"{type(outcome).__name__.lower()}: {getattr(outcome, 'error', getattr(outcome, 'reason', ''))}"
    words = [f"{outcome.reward:g}", outcome.reason]
    if outcome.parts:
        words.append(f"{outcome.parts['passed']:g}/{outcome.parts['total']:g}")
    flags = sorted({flag.rule for flag in outcome.flags})
    return " ".join(filter(None, [*words, f"[{', '.join(flags)}]" if flags else ""]))
