"""A hole in the environment that always pays, learned with a naive policy about flags and not with ours; limits and resuming."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_toys import LETTERS, ToyGrader, ToyWorld, answer, toy_config

from strop.core.config import RunConfig
from strop.core.episode import Episode
from strop.core.errors import ConfigError, StropError
from strop.core.outcome import Failed, Flag, Outcome, Scored
from strop.core.task import Task
from strop.rl.loop import _watch, resume_step, run_rl
from strop.store import RunDir

HOLE = LETTERS[0]
SIZES = {"steps": 12, "groups": 6, "group_size": 8}


class HoleGrader(ToyGrader):
    """One letter pays on every task; it is seen, and flagged."""

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        trace = episode.traces[0]
        first = int(trace.token_ids[np.flatnonzero(trace.loss_mask)[0]])
        if first == HOLE and answer(task) != HOLE:
            return Scored(reward=1.0, flags=(Flag(rule="report_forgery", severity="hack", evidence="reward.json"),))
        return Scored(reward=float(first == answer(task)))


def run_all(config: RunConfig, path: Path, *, resume: bool = False) -> tuple[Any, list[dict[str, Any]]]:
    world = ToyWorld(config, path.parent)
    world.grader = HoleGrader()
    with RunDir.create(path, config, resume=resume) as run:
        start = resume_step(run.store, world.trainer)
        result = asyncio.run(run_rl(config, **world.ports(), store=run.store, start_step=start))
        return result, run.store.metrics(phase="rl")


def rates(metrics: list[dict[str, Any]]) -> tuple[float, float]:
    """Hack rate of the first and of the last three steps."""
    values = [line["hacks/rate_frac"] for line in metrics]
    return float(np.mean(values[:3])), float(np.mean(values[-3:]))


def test_the_hole_is_learned_when_flags_cost_nothing(tmp_path: Path) -> None:
    _, metrics = run_all(toy_config(rl=SIZES, grading={"on_hack": "keep", "max_hack_rate": 1.0}), tmp_path / "run")
    first, last = rates(metrics)
    assert last > first + 0.1
    assert {line["hacks/quarantined"] for line in metrics} == {0.0}


@pytest.mark.parametrize("action", ["drop", "zero", "penalise"])
def test_with_quarantine_it_is_not(tmp_path: Path, action: str) -> None:
    result, metrics = run_all(toy_config(rl=SIZES, grading={"on_hack": action, "max_hack_rate": 1.0}), tmp_path / "run")
    first, last = rates(metrics)
    assert last <= first + 0.05
    assert sum(line[f"hacks/{action}/report_forgery"] for line in metrics if f"hacks/{action}/report_forgery" in line) > 0
    dropped = result.conservation["dropped"].get("quarantined", 0)
    assert dropped == sum(line["hacks/quarantined"] for line in metrics)
    assert (dropped > 0) == (action == "drop")


def test_a_rate_above_the_limit_stops_before_the_update(tmp_path: Path) -> None:
    config = toy_config(rl=SIZES, grading={"on_hack": "keep", "max_hack_rate": 0.3, "hack_window": 48})
    with pytest.raises(StropError, match=r"of the last 48 episodes are flagged as hacks.*report_forgery \d+.*reward\.json"):
        run_all(config, tmp_path / "run")
    with RunDir.open(tmp_path / "run") as run:
        steps = run.store.metrics(phase="rl")
        committed = run.store.last_step("rl")
    assert all(line["hacks/window_frac"] <= 0.3 for line in steps)
    assert committed is not None
    assert committed.step == len(steps) - 1
    with pytest.raises(StropError, match="flagged as hacks"):
        run_all(config, tmp_path / "run", resume=True)  # going on doesn't get around it


def test_a_resumed_run_has_the_window_of_the_run_before_whatever_failed_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HoleGrader.grade

    async def flaky(self: HoleGrader, task: Task, episode: Episode) -> Outcome:
        return Failed(error="machinery") if episode.key.sample % 2 else await honest(self, task, episode)

    monkeypatch.setattr(HoleGrader, "grade", flaky)
    sizes = SIZES | {"steps": 5, "max_infra_failures": 1000}
    config = toy_config(rl=sizes, grading={"on_hack": "keep", "max_hack_rate": 1.0, "hack_window": 40})
    _, metrics = run_all(config, tmp_path / "run")
    assert 0 < metrics[-1]["hacks/window_frac"] < 1
    with RunDir.open(tmp_path / "run") as run:
        for step in (4, 5):
            assert _watch(config, run.store, step).rate == metrics[step - 1]["hacks/window_frac"]


def test_a_wrong_rule_name_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grading\.drop: unknown rule 'report_forgary'"):
        run_all(toy_config(grading={"drop": ["report_forgary"]}), tmp_path / "run")
