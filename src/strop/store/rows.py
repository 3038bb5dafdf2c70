"""Episodes as table rows: what can be asked without reading tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement

from strop.core import metrics as metric_table
from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Failed, Scored, Ungraded
from strop.store.schema import episodes as table


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRow:
    """The columns of one episode.

    Attributes:
        phase, step, task_id, sample: The key.
        outcome: ``"scored"``, ``"ungraded"``, ``"failed"`` or ``"none"`` (not graded).
        reward: Only scored episodes have one.
        reason: Reason or error of the outcome.
        stop_reason: Why the episode ended.
        turns: Agent turns.
        tokens: Tokens of all traces.
        sampled_tokens: Those that the policy sampled.
        seconds: Wall seconds; where the cost book has none, the sum over turns.
        version_min, version_max: Oldest and newest policy version among its tokens.
        flags: Rules that fired, comma separated.
        stats: ``Episode.stats``.
        stored_bytes: Size of the stored episode.
    """

    phase: str
    step: int
    task_id: str
    sample: int
    outcome: str
    reward: float | None
    reason: str
    stop_reason: str
    turns: int
    tokens: int
    sampled_tokens: int
    seconds: float
    version_min: int
    version_max: int
    flags: str
    stats: Mapping[str, float]
    stored_bytes: int

    @property
    def key(self) -> EpisodeKey:
        """The episode's key."""
        return EpisodeKey(phase=self.phase, step=self.step, task_id=self.task_id, sample=self.sample)


def episode_values(episode: Episode, blob: bytes) -> dict[str, Any]:
    """Return the row of an episode."""
    outcome = episode.outcome
    versions = [span.version for trace in episode.traces for span in trace.versions] or [0]
    kind, reward, reason, flags = "none", None, "", ""
    if isinstance(outcome, Scored):
        kind, reward, reason, flags = "scored", float(outcome.reward), outcome.reason, ",".join(flag.rule for flag in outcome.flags)
    elif isinstance(outcome, Ungraded):
        kind, reason = "ungraded", outcome.reason
    elif isinstance(outcome, Failed):
        kind, reason = "failed", outcome.error
    return {
        "phase": episode.key.phase,
        "step": episode.key.step,
        "task_id": episode.key.task_id,
        "sample": episode.key.sample,
        "outcome": kind,
        "reward": reward,
        "reason": reason,
        "stop_reason": episode.stop_reason,
        "turns": len(episode.turns),
        "tokens": sum(len(trace) for trace in episode.traces),
        "sampled_tokens": sum(int(trace.loss_mask.sum()) for trace in episode.traces),
        "seconds": float(episode.costs.get("cost/wall_s", sum(turn.generate_s + turn.tool_s for turn in episode.turns))),
        "version_min": min(versions),
        "version_max": max(versions),
        "flags": flags,
        "stats": {key: float(value) for key, value in episode.stats.items()},
        "blob": blob,
    }


def cost_values(phase: str, step: int, values: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the rows of cost book entries.

    Raises:
        ConfigError: A key that isn't in the metrics table.
    """
    return [{"phase": phase, "step": step, "key": key, "value": value} for key, value in metric_table.validate(values).items()]


def row_condition(phase: str | None, step: int | None, task: str | None, reward: float | None) -> list[ColumnElement[bool]]:
    """Return the conditions of ``Store.rows``."""
    conditions: list[ColumnElement[bool]] = []
    if phase is not None:
        is_prefix = phase.endswith("*")
        conditions.append(table.c.phase.startswith(phase[:-1], autoescape=True) if is_prefix else table.c.phase == phase)
    if step is not None:
        conditions.append(table.c.step == step)
    if task is not None:
        conditions.append(table.c.task_id.contains(task, autoescape=True))
    if reward is not None:
        conditions.append(table.c.reward == reward)
    return conditions


def split_key(text: str) -> tuple[str, int, str, int] | None:
    """Take ``phase/step/task/sample`` apart (a task id may hold slashes), or return ``None``."""
    phase, _, rest = text.partition("/")
    step, _, rest = rest.partition("/")
    task_id, _, sample = rest.rpartition("/")
    if phase and task_id and step.isdecimal() and sample.isdecimal() and max(len(step), len(sample)) <= 15:
        return phase, int(step), task_id, int(sample)
    return None
