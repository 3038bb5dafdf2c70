"""Metrics of a set of episodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from strop.agent.toolspec import TOOL_NAMES
from strop.core.episode import Episode
from strop.core.outcome import Failed, Scored


def rollout_metrics(episodes: Sequence[Episode], *, wall_s: float) -> dict[str, float]:
    """Return ``rollout/*``, ``env/*`` and the reward metrics of finished episodes.

    Args:
        episodes: Graded; failed ones count in nothing but the number of episodes.
        wall_s: Seconds of the phase, for the environment's share.
    """
    metrics: dict[str, float] = {"rollout/episodes": float(len(episodes)), "rollout/s": wall_s}
    played = [episode for episode in episodes if episode.traces and not isinstance(episode.outcome, Failed)]
    if not played:
        return metrics
    metrics |= _rewards(played) | _streams(played) | _tools(played)
    return metrics


def _rewards(played: Sequence[Episode]) -> dict[str, float]:
    outcomes = [episode.outcome for episode in played if isinstance(episode.outcome, Scored)]
    if not outcomes:
        return {}
    rewards = np.array([outcome.reward for outcome in outcomes])
    flags = Counter(rule for outcome in outcomes for rule in {flag.rule for flag in outcome.flags})
    metrics = {f"env/flags/{rule}": float(count) for rule, count in flags.items()}
    return metrics | {
        "rl/reward": float(rewards.mean()),
        "rl/reward_std": float(rewards.std()),
        "rl/success_frac": float((rewards >= 1.0).mean()),
    }


def _streams(played: Sequence[Episode]) -> dict[str, float]:
    count = len(played)
    limits = Counter(episode.stop_reason for episode in played if episode.is_truncated)
    sampled = [sum(int(trace.loss_mask.sum()) for trace in episode.traces) for episode in played]
    metrics = {f"rollout/truncated/{limit}": float(number) for limit, number in limits.items()}
    return metrics | {
        "rollout/turns": sum(len(episode.turns) for episode in played) / count,
        "rollout/tokens": sum(len(trace) for episode in played for trace in episode.traces) / count,
        "rollout/sampled_tokens": sum(sampled) / count,
        "rollout/truncated_frac": limits.total() / count,
    }


def _tools(played: Sequence[Episode]) -> dict[str, float]:
    turns = [turn for episode in played for turn in episode.turns]
    # A call's name is the model's own text: only names of tools may become metric keys.
    calls = Counter(turn.call for turn in turns if turn.call in TOOL_NAMES)
    seconds: dict[str, list[float]] = {}
    for turn in turns:
        seconds.setdefault(turn.call if turn.call in TOOL_NAMES else "malformed", []).append(turn.tool_s)
    quick = [s for name, values in seconds.items() if name not in ("test", "malformed") for s in values]
    grading = [episode.costs["cost/grading_s"] for episode in played if "cost/grading_s" in episode.costs]
    submitted = [episode for episode in played if not episode.is_truncated]
    killed: Counter[str] = Counter()
    for episode in played:
        killed.update({name.removeprefix("killed_"): int(n) for name, n in episode.stats.items() if name.startswith("killed_")})
    metrics = {f"env/killed/{cause}": float(number) for cause, number in killed.items()}
    metrics |= {f"env/tool/{name}_calls": float(number) for name, number in calls.items()}
    metrics |= {f"env/tool/{name}_p50_s": float(np.median(values)) for name, values in seconds.items() if name != "malformed"}
    metrics |= {
        "env/s": sum(turn.tool_s for turn in turns) + sum(grading),
        "env/tool_calls": float(calls.total()),
        "env/malformed_frac": sum(turn.status == "malformed" for turn in turns) / max(len(turns), 1),
        "env/tool_error_frac": sum(turn.status == "tool_error" for turn in turns) / max(calls.total(), 1),
        "env/edits": mean_stat(played, "edits"),
        "env/tests_run": mean_stat(played, "tests"),
        "env/first_edit_right_frac": float(np.mean([first_edit_right(episode) for episode in played])),
        "env/submit_on_red_frac": mean_stat(submitted, "submitted_on_red") if submitted else 0.0,
    }
    for key, values in (("env/tool_p50_s", quick), ("env/test_p50_s", seconds.get("test", [])), ("env/grade_p50_s", grading)):
        if values:
            metrics[key] = float(np.median(values))
    return metrics


def mean_stat(episodes: Sequence[Episode], name: str) -> float:
    """Return the mean of ``Episode.stats[name]``; an episode without it counts 0."""
    return sum(episode.stats.get(name, 0.0) for episode in episodes) / len(episodes)


def first_edit_right(episode: Episode) -> float:
    """Return 1 if the first edit alone repaired the task: as a verdict says, else as a test run right after it said."""
    return float(episode.stats.get("first_edit_right", episode.stats.get("first_edit_green", 0.0)))
