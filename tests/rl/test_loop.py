"""The loop over the real engine, trainer and store, in a toy world."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rl_toys import ToyWorld, toy_config

from strop.core.config import RunConfig
from strop.core.episode import Episode
from strop.core.errors import ConfigError, NumericsError, StropError
from strop.core.outcome import Failed
from strop.rl import loop
from strop.rl.loop import resume_step, run_rl
from strop.store import RunDir


def run_all(config: RunConfig, path: Any, *, resume: bool = False, **options: Any) -> tuple[Any, list[Episode], list[dict[str, Any]]]:
    """A whole run (or its rest) in a directory: result, RL episodes, metrics."""
    world = ToyWorld(config, path.parent, **options)
    with RunDir.create(path, config, resume=resume) as run:
        start = resume_step(run.store, world.trainer)
        result = asyncio.run(run_rl(config, **world.ports(), store=run.store, start_step=start))
        return result, list(run.store.episodes(phase="rl")), run.store.metrics(phase="rl")


def fingerprint(episodes: list[Episode]) -> list[Any]:
    return [(str(e.key), [t.token_ids.tolist() for t in e.traces], [t.logprobs.tolist() for t in e.traces], e.outcome) for e in episodes]


def test_learns_and_every_log_probability_agrees(tmp_path: Any) -> None:
    config = toy_config(rl={"steps": 12, "groups": 6, "group_size": 8})
    result, episodes, metrics = run_all(config, tmp_path / "run")
    rewards = [record["rl/reward"] for record in metrics]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert {record["numerics/logprob_diff_max_nats"] for record in metrics} == {0.0}
    assert {record["rl/ratio_max"] for record in metrics} == {1.0}
    assert {record["routes/mismatch_frac"] for record in metrics} == {0.0}
    assert len(episodes) == 12 * 48
    assert result.policy_version == 12


def test_permuted_rewards_teach_nothing(tmp_path: Any) -> None:
    gains = {True: [], False: []}
    for permute, found in gains.items():
        for seed in range(5 if permute else 2):
            config = toy_config(seed=seed, rl={"steps": 12, "groups": 6, "group_size": 8, "permute_rewards": permute})
            rewards = [record["rl/reward"] for record in run_all(config, tmp_path / f"{permute}-{seed}")[2]]
            found.append(np.mean(rewards[-3:]) - np.mean(rewards[:3]))
    assert np.mean(gains[False]) > 0.25
    assert abs(np.mean(gains[True])) < 0.3 * np.mean(gains[False])


def test_completion_order_changes_nothing(tmp_path: Any) -> None:
    first = run_all(toy_config(), tmp_path / "one")
    second = run_all(toy_config(), tmp_path / "two", jitter=True, offload=True)
    assert fingerprint(first[1]) == fingerprint(second[1])
    assert first[0].weights_digest == second[0].weights_digest


class _Killed(BaseException):
    """Stands for the end of the process."""


def dies_at(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, until it is called for the ``call``-th time."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise _Killed
        return original(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("where", ["rollout_metrics", "assign_credit", "_credit_metrics"])
def test_resume_continues_bit_for_bit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    config = toy_config(rl={"steps": 3})
    whole = run_all(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, where, dies_at(2, getattr(loop, where)))
        with pytest.raises(_Killed):
            run_all(config, tmp_path / "cut")
    rest = run_all(config, tmp_path / "cut", resume=True)
    assert fingerprint(rest[1]) == fingerprint(whole[1])
    assert rest[0].weights_digest == whole[0].weights_digest
    assert rest[0].conservation == whole[0].conservation
    assert [r["rl/reward"] for r in rest[2]] == [r["rl/reward"] for r in whole[2]]


def test_interrupt_leaves_a_committed_state(tmp_path: Any) -> None:
    config = toy_config(rl={"steps": 99})
    world = ToyWorld(config, tmp_path)

    async def interrupted(store: Any) -> None:
        task = asyncio.create_task(run_rl(config, **world.ports(), store=store))
        while len(store.commits(phase="rl")) < 3 and not task.done():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    with RunDir.create(tmp_path / "run", config) as run:
        asyncio.run(interrupted(run.store))
    with RunDir.create(tmp_path / "run", config, resume=True) as run:
        assert run.store.counts()["rl"] == len(run.store.commits(phase="rl")) * 12


@pytest.mark.parametrize("staleness", [1, 3])
def test_in_flight_swaps_stay_within_the_bound(tmp_path: Any, staleness: int) -> None:
    config = toy_config(rl={"steps": 6, "max_staleness": staleness})
    result, episodes, metrics = run_all(config, tmp_path / "run", jitter=True, offload=True)
    ages = [e.key.step - int(v) for e in episodes for t in e.traces for v in token_versions_of(t)]
    assert max(ages) <= staleness
    assert min(ages) >= 0
    assert max(record.get("rl/staleness_max", 0) for record in metrics) >= 1
    assert result.conservation["dispatched"] == 6 * 12
    seen = {(r["step"], r["conservation/in_flight"]) for r in metrics}
    assert {n for s, n in seen if s == 5} == {0.0}
    assert max(n for _, n in seen) == 12 * staleness


def token_versions_of(trace: Any) -> np.ndarray:
    return np.repeat([s.version for s in trace.versions], [s.end - s.start for s in trace.versions])


def test_resume_with_staleness_keeps_finished_episodes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy_config(rl={"steps": 5, "max_staleness": 2})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "assign_credit", dies_at(4, loop.assign_credit))
        with pytest.raises(_Killed):
            run_all(config, tmp_path / "run")
    result, episodes, _ = run_all(config, tmp_path / "run", resume=True)
    assert len(episodes) == len({str(e.key) for e in episodes}) == 5 * 12
    assert result.conservation["dispatched"] == 5 * 12


def test_failed_episodes_are_data(tmp_path: Any) -> None:
    plan = run_all(toy_config(rl={"steps": 1}), tmp_path / "clean")[1]
    broken = [str(plan[0].key), f"failed:{plan[9].key}"]
    result, episodes, metrics = run_all(toy_config(rl={"steps": 1}), tmp_path / "run", broken=broken)
    lost = [e for e in episodes if isinstance(e.outcome, Failed)]
    assert {str(e.key) for e in lost} == {str(plan[0].key), str(plan[9].key)}
    assert result.conservation["failed"] == {"GradingError": 1, "SandboxError": 1}
    assert metrics[0]["conservation/failed"] == 2
    assert metrics[0]["conservation/dispatched"] == 12


def test_failures_in_a_row_stop_the_run_with_the_reason(tmp_path: Any) -> None:
    with pytest.raises(StropError, match=r"8 episodes in a row.*planted: the verifier died"):
        run_all(toy_config(), tmp_path / "run", broken=["*"])


def test_planted_rollout_fault_stops_before_the_weights_move(tmp_path: Any) -> None:
    config = toy_config()
    world = ToyWorld(config, tmp_path)
    with torch.no_grad():
        world.trainer.model.parameters["table"][:, 7] += 1e-6
    before = {n: t.clone() for n, t in world.trainer.weights().items()}
    swap = world.engine.swap

    async def stale(weights: Any, version: int, **rest: Any) -> None:
        """The engine keeps its own, slightly other weights."""
        await swap({"table": weights["table"] * (1 + 1e-6), "gate": weights["gate"]}, version, **rest)

    world.engine.swap = stale
    with RunDir.create(tmp_path / "run", config) as run, pytest.raises(NumericsError, match=r"token \d+ of episode rl/0/toy/\d+/\d"):
        asyncio.run(run_rl(config, **world.ports(), store=run.store))
    assert all(torch.equal(before[n], t) for n, t in world.trainer.weights().items())


def test_conservation_violation_is_caught(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.assign_credit

    def loses_one(episodes: Any, **rest: Any) -> Any:
        return original(episodes[:-1], **rest)

    monkeypatch.setattr(loop, "assign_credit", loses_one)
    with pytest.raises(AssertionError, match="conservation violated: 12 dispatched, 11 accounted"):
        run_all(toy_config(), tmp_path / "run")


def test_staleness_violation_is_caught(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Any, version: int) -> list[int]:
        admitted = list(range(self.next_slot, self.steps))
        self.next_slot = self.steps
        return admitted

    monkeypatch.setattr(loop.Window, "admit", greedy)
    with pytest.raises(AssertionError, match=r"\d versions old; rl\.max_staleness is 0"):
        run_all(toy_config(), tmp_path / "run")


def test_refuses_what_the_engine_cannot_do(tmp_path: Any) -> None:
    config = toy_config(rl={"max_staleness": 1})
    lacking = ToyWorld(config, tmp_path).engine.capabilities
    for name, key in [("is_exact", "numerics.mode"), ("returns_routes", "replay_routes"), ("swaps_in_flight", "max_staleness")]:
        fields = {f: getattr(lacking, f) for f in lacking.__dataclass_fields__} | {name: False}
        with pytest.raises(ConfigError, match=f"{re.escape(key)}.*{name}"):
            loop.check_capabilities(config, type(lacking)(**fields))


def test_too_few_tasks_are_refused(tmp_path: Any) -> None:
    config = toy_config(tasks={"train_limit": 7})
    with pytest.raises(ConfigError, match=r"needs 9 training tasks.*there are 7.*at most 2"):
        run_all(config, tmp_path / "run")


def test_tokens_carry_their_version(tmp_path: Any) -> None:
    _, episodes, _ = run_all(toy_config(), tmp_path / "run")
    for episode in episodes:
        for trace in episode.traces:
            assert set(token_versions_of(trace)) == {episode.key.step}
