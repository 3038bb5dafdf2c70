"""What the scripts of the end-to-end bars see: planted differences are found, a clean pair is silent."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.outcome import Scored
from strop.numerics.certificate import Evidence, issue_certificate
from strop.runtime.replay import ReplayReport
from strop.store import RunDir

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def script(name: str) -> ModuleType:
    """Load a script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def episode(sample: int, token: int = 3, logprob: float = -1.0, reward: float = 1.0) -> Episode:
    trace = Trace(
        token_ids=np.array([1, 2, token], np.int32),
        loss_mask=np.array([False, False, True]),
        logprobs=np.array([0, 0, logprob], np.float32),
        versions=(VersionSpan(start=0, end=3, version=0),),
    )
    key = EpisodeKey(phase="rl", step=0, task_id="t", sample=sample)
    return Episode(
        key=key, traces=(trace,), turns=(), stop_reason="submitted", outcome=Scored(reward=reward), costs={"cost/wall_s": sample}
    )


def make_run(path: Path, *, episodes: list[Episode] | None = None, steps: int = 1, difference: float = 0.0, idle: bool = False) -> Path:
    """A finished run of one trained step a ``steps``, written as the pipeline writes it."""
    state = {"version": 1, "weights": {"a": np.linspace(0, 1, 12, dtype=np.float32)}}
    with RunDir.create(path, RunConfig()) as run:
        store = run.store
        for item in episodes if episodes is not None else [episode(0), episode(1)]:
            store.put_episode(item)
        for step in range(steps):
            compared = {"numerics/tokens": 2.0, "numerics/is_exact": float(not difference), "numerics/logprob_diff_max_nats": difference}
            store.log(step, {"rl/skipped_steps": 1.0} if idle else compared)
            store.save_state(f"rl-{step}", state, {}, rolling=True)
            facts = {"weights_digest": f"d{step}", "conservation": {"dispatched": 2}, "seconds": 1.5}
            store.commit_step(step, checkpoint=f"rl-{step}", **facts)
        issue_certificate(path / "certificate.json", store, Evidence(state=state), mode="tolerant")
        store.put_fact("success.rl", {"tasks": [1]})
        store.set_stage("report")
    return path


# ------------------------------------------------------------------------------------------------ kill and resume


def test_equal_runs_have_equal_fingerprints_whatever_the_clock_said(tmp_path: Path) -> None:
    bars = script("kill_and_resume")
    slow = [replace(episode(n), costs={"cost/wall_s": 99.0}, stats={}) for n in (0, 1)]
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", episodes=slow)
    assert bars.compare(bars.fingerprint(first), bars.fingerprint(second)) == []


def lose_an_episode(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as database:
        database.execute("DELETE FROM episodes WHERE sample = 1")


def repeat_a_line_of_metrics(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")


def change_a_tensor(run: Path) -> None:
    record = json.loads((run / "certificate.json").read_text())
    record["body"]["tensors"]["weights/a"] = "0" * 64
    (run / "certificate.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lose_an_episode, ["episode rl/0/t/1 is missing", "number of episodes of rl is 1"]),
        (repeat_a_line_of_metrics, ["metrics lines of rl step 0 is 2"]),
        (change_a_tensor, ["tensor weights/a is 0000"]),
    ],
)
def test_what_was_lost_or_counted_twice_is_found(tmp_path: Path, plant: Callable[[Path], None], expected: list[str]) -> None:
    bars = script("kill_and_resume")
    good, bad = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    plant(bad)
    found = bars.compare(bars.fingerprint(good), bars.fingerprint(bad))
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("change", [{"token": 4}, {"logprob": -1.0000001}, {"reward": 0.0}])
def test_one_other_token_probability_or_reward_is_found(tmp_path: Path, change: dict[str, Any]) -> None:
    bars = script("kill_and_resume")
    good, bad = make_run(tmp_path / "a"), make_run(tmp_path / "b", episodes=[episode(0), episode(1, **change)])
    (line,) = bars.compare(bars.fingerprint(good), bars.fingerprint(bad))
    assert line.startswith("episode rl/0/t/1 is ")


def test_another_digest_in_the_chain_is_found(tmp_path: Path) -> None:
    bars = script("kill_and_resume")
    short, long = bars.fingerprint(make_run(tmp_path / "a")), bars.fingerprint(make_run(tmp_path / "b", steps=2))
    assert any(line.startswith("commit point rl 1 is ") for line in bars.compare(short, long))


# ------------------------------------------------------------------------------------------------ exact and replay


@pytest.mark.parametrize(
    ("options", "met", "figure"),
    [
        ({}, True, 0.0),
        ({"steps": 3}, True, 0.0),
        ({"difference": 1e-7}, False, 1e-7),
        ({"idle": True}, False, 0.0),  # nothing was compared
    ],
)
def test_exact_needs_a_comparison_of_every_step_that_trained(tmp_path: Path, options: dict[str, Any], met: bool, figure: float) -> None:
    bars = script("replay_exact")
    with RunDir.open(make_run(tmp_path / "run", **options)) as run:
        assert bars.report_exact(run, directory=tmp_path / "results") is met
    record = json.loads((tmp_path / "results/main-exact.json").read_text())
    assert (record["met"], record["figure"]) == (met, figure)
    assert record["details"]["tokens sampled in RL"] == 2


@pytest.mark.parametrize(
    ("report", "met"),
    [
        (ReplayReport(episodes=2, tokens=6, commits=1, digests=1), True),
        (ReplayReport(episodes=1, unplayed=1, tokens=3, commits=1, digests=1), True),
        (ReplayReport(episodes=1, tokens=3, commits=1, digests=1), False),  # an episode was never reached
        (ReplayReport(episodes=2, tokens=6, commits=1, digests=0), False),
        (ReplayReport(episodes=2, tokens=6, commits=1, digests=1, differences=["token 3 is 4, the record has 3"]), False),
    ],
)
def test_a_replay_is_met_only_if_everything_was_compared(tmp_path: Path, report: ReplayReport, met: bool) -> None:
    bars = script("replay_exact")
    with RunDir.open(make_run(tmp_path / "run")) as run:
        assert bars.report_replay(run, report, 1.0, directory=tmp_path / "results") is met
    record = json.loads((tmp_path / "results/main-replay.json").read_text())
    assert record["met"] is met
    assert record["figure"] == (report.differences or ["no difference"])[0]
