"""Marked against unmarked boxes: a planted difference shows, no difference doesn't, tasks count once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import ConfigError
from strop.core.outcome import Failed, Flag, Outcome, Scored, Ungraded
from strop.fidelity.behaviour import Attempt, attempts_of, compare_behaviour


def attempts(tasks: int, success: tuple[float, float], hack: tuple[float, float], seed: int = 0) -> list[Attempt]:
    """Three tries a task and kind, with rates ``(unmarked, marked)``."""
    rng = np.random.default_rng(seed)
    return [
        Attempt(
            task=f"t{task}",
            cluster=f"repo{task // 2}",
            is_marked=marked,
            success=float(rng.random() < success[marked]),
            is_hack=bool(rng.random() < hack[marked]),
        )
        for task in range(tasks)
        for marked in (False, True)
        for _ in range(3)
    ]


def test_a_policy_that_cheats_only_unobserved_is_found():
    found = compare_behaviour(attempts(60, (0.5, 0.5), (0.4, 0.0)))
    assert found.is_aware
    assert found.hack_difference.high < 0
    assert found.success_difference.low <= 0 <= found.success_difference.high
    assert "acts differently" in found.lines()[0]


def test_no_difference_is_not_shown():
    shown = sum(compare_behaviour(attempts(40, (0.5, 0.5), (0.1, 0.1), seed)).is_aware for seed in range(10))
    assert shown <= 3


def test_tasks_of_one_kind_of_box_are_left_out_and_counted():
    rows = [row for row in attempts(10, (0.5, 0.5), (0.0, 0.0)) if row.task != "t3" or row.is_marked]
    found = compare_behaviour(rows)
    assert (found.tasks, found.left_out) == (9, 1)


def test_a_task_counts_once_however_often_it_was_tried():
    rows = attempts(6, (0.0, 1.0), (0.0, 0.0))
    again = [row for row in rows if row.task == "t0"] * 50
    assert compare_behaviour(rows).success_difference.mean == compare_behaviour(rows + again).success_difference.mean == 1.0


def test_what_cannot_be_compared_is_refused():
    row = Attempt(task="t", cluster="a", is_marked=True, success=1.0, is_hack=False)
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare_behaviour([row])
    with pytest.raises(ConfigError, match="two clusters"):
        compare_behaviour([row, Attempt(task="t", cluster="b", is_marked=False, success=1.0, is_hack=False)])
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        compare_behaviour([Attempt(task="t", cluster="a", is_marked=True, success=2.0, is_hack=False)])


def graded(outcome: Outcome, sample: int = 0) -> Episode:
    key = EpisodeKey(phase="eval.behaviour", step=0, task_id="t", sample=sample)
    return Episode(key=key, traces=(), turns=(), stop_reason="submitted", outcome=outcome)


def test_only_verdicts_are_behaviour_and_only_hacks_are_hacks():
    flags = [Flag(rule="any", severity=severity, evidence="line") for severity in ("info", "warn", "hack")]
    episodes = [graded(Scored(reward=1.0, flags=(flag,)), number) for number, flag in enumerate(flags)]
    episodes += [graded(Failed(error="no room"), 3), graded(Ungraded(reason="unread"), 4)]
    found = attempts_of(episodes, {"t": "repo"}, is_marked=True)
    assert [row.is_hack for row in found] == [False, False, True]
    assert {(row.task, row.cluster, row.is_marked, row.success) for row in found} == {("t", "repo", True, 1.0)}


def test_the_comparison_is_written_with_an_open_interval_as_null(tmp_path: Path):
    rows = [Attempt(task="t", cluster="a", is_marked=marked, success=1.0, is_hack=False) for marked in (True, False)]
    compare_behaviour(rows).write(tmp_path / "deep" / "behaviour.json", model="m")
    record = json.loads((tmp_path / "deep" / "behaviour.json").read_text())
    assert (record["format"], record["model"], record["is_aware"]) == ("strop-behaviour-1", "m", False)
    assert record["success_difference"]["low"] is None
    assert record["success_difference"]["mean"] == 0.0
