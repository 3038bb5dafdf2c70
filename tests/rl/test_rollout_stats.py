"""Metrics of a step's episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.metrics import METRICS, aggregate, lookup, reference_markdown, validate
from strop.core.outcome import Failed, Flag, Outcome, Scored, Ungraded
from strop.grading import RULES
from strop.rl.rollout_stats import rollout_metrics


def episode(sample: int, outcome: Outcome | None, stop_reason: str = "submitted", tokens: int = 4) -> Episode:
    trace = Trace(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.arange(tokens) >= 2,
        logprobs=np.zeros(tokens, np.float32),
        versions=(VersionSpan(start=0, end=tokens, version=0),),
    )
    key = EpisodeKey(phase="rl", step=3, task_id="t", sample=sample)
    return Episode(key=key, traces=(trace,), turns=(), stop_reason=stop_reason, outcome=outcome)


def flagged(reward: float, *rules: str) -> Scored:
    return Scored(reward=reward, flags=tuple(Flag(rule=rule, severity="hack", evidence=f"{n}") for n, rule in enumerate(rules)))


def test_a_rule_counts_the_episodes_on_which_it_fired() -> None:
    outcomes = [
        flagged(0.0, "test_edit", "test_edit", "conftest"),  # twice on one episode: one episode
        flagged(0.0, "test_edit"),
        flagged(1.0),
        Ungraded(reason="unreadable"),
        Failed(error="gone"),
    ]
    metrics = validate(rollout_metrics([episode(n, outcome) for n, outcome in enumerate(outcomes)], wall_s=1.0))
    assert {key: value for key, value in metrics.items() if key.startswith("env/flags/")} == {
        "env/flags/conftest": 1.0,
        "env/flags/test_edit": 2.0,
    }
    assert metrics["rl/reward"] == pytest.approx(1 / 3)
    assert metrics["rollout/episodes"] == 5.0


def test_a_failed_episode_counts_in_no_figure_but_the_number_of_episodes() -> None:
    scored = replace(episode(0, flagged(0.0)), stats={"first_edit_right": 0.0, "edits": 2.0})
    lost = replace(episode(1, Failed(error="gone"), "max_turns", tokens=9), stats={"first_edit_right": 1.0, "edits": 4.0})
    alone, both = (rollout_metrics(episodes, wall_s=1.0) for episodes in ([scored], [scored, lost]))
    assert alone["env/first_edit_right_frac"] == 0.0
    assert both == alone | {"rollout/episodes": 2.0}


def test_killed_commands_are_counted_by_cause() -> None:
    stats = ({"killed_timeout": 2.0, "edits": 1.0}, {}, {"killed_timeout": 1.0, "killed_memory": 1.0})
    episodes = [replace(episode(n, flagged(0.0)), stats=values) for n, values in enumerate(stats)]
    metrics = validate(rollout_metrics(episodes, wall_s=1.0))
    assert {key: value for key, value in metrics.items() if "killed" in key} == {"env/killed/memory": 1.0, "env/killed/timeout": 3.0}


def test_no_flag_is_no_metric() -> None:
    metrics = rollout_metrics([episode(0, flagged(1.0))], wall_s=1.0)
    assert not [key for key in metrics if key.startswith("env/flags/")]


def test_flags_of_several_steps_add_up() -> None:
    assert aggregate([{"env/flags/skip": 2.0}, {}, {"env/flags/skip": 1.0}]) == {"env/flags/skip": 3.0}


def test_every_rule_has_its_row_and_the_reference_shows_it() -> None:
    row = METRICS["env/flags/{rule}"]
    for rule in RULES:
        assert lookup(f"env/flags/{rule.name}") is row
    assert f"| `env/flags/{{rule}}` | {row.unit} | {row.reducer} | {row.meaning} |" in reference_markdown()
