"""Replay: a finished run is reproduced, in-flight swaps included, and every planted difference is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rl_toys import ToyWorld, toy_config

from strop.core.config import RunConfig
from strop.core.episode import Episode
from strop.rl.loop import run_rl
from strop.runtime.replay import ReplayReport, ReplayStore, replay
from strop.store import RunDir


def record(config: RunConfig, path: Path, **options: Any) -> None:
    world = ToyWorld(config, path.parent, **options)
    with RunDir.create(path, config) as run:
        asyncio.run(run_rl(config, **world.ports(), store=run.store))


def again(path: Path, tamper: Any = None, **options: Any) -> ReplayReport:
    def execute(run: RunDir, store: ReplayStore) -> None:
        world = ToyWorld(run.config, path.parent, **options)
        ports = world.ports()
        ports["engine"] = store.forced_engine(world.engine, run.config)
        ports["grader"] = store.forced_grader(world.grader)
        if tamper is not None:
            tamper(world)
        asyncio.run(run_rl(run.config, **ports, store=store))

    with RunDir.open(path) as run:
        return replay(run, execute)


def test_alternating_run_is_reproduced(tmp_path: Path) -> None:
    record(toy_config(), tmp_path / "run")
    report = again(tmp_path / "run", jitter=True, offload=True)
    assert report.differences == []
    assert (report.episodes, report.commits, report.digests) == (36, 3, 3)
    assert report.tokens > 36 * 4


@pytest.mark.parametrize("staleness", [1, 2])
def test_in_flight_swaps_are_reproduced(tmp_path: Path, staleness: int) -> None:
    config = toy_config(rl={"steps": 6, "max_staleness": staleness})
    record(config, tmp_path / "run", jitter=True, offload=True)
    with RunDir.open(tmp_path / "run") as run:
        swapped = sum(len(t.versions) > 1 for e in run.store.episodes(phase="rl") for t in e.traces)
    report = again(tmp_path / "run", offload=True)
    assert report.differences == []
    assert report.episodes == 6 * 12
    assert swapped > 0, "no swap fell into a stream, so this test shows nothing"


def test_what_the_record_lost_is_lost_again(tmp_path: Path) -> None:
    config = toy_config(rl={"steps": 2})
    record(config, tmp_path / "clean")
    with RunDir.open(tmp_path / "clean") as run:
        key = str(next(iter(run.store.episodes(phase="rl"))).key)
    record(config, tmp_path / "run", broken=[key, f"failed:{key[:-1]}2"])
    report = again(tmp_path / "run")
    assert report.differences == []
    assert report.unplayed == 1
    assert report.episodes == 23


def test_other_weights_are_found_at_the_first_token_that_shows(tmp_path: Path) -> None:
    record(toy_config(), tmp_path / "run")

    def tamper(world: ToyWorld) -> None:
        with torch.no_grad():
            world.trainer.model.parameters["table"][:, 7] += 1e-5

    (difference,) = again(tmp_path / "run", tamper).differences
    assert "log-probability" in difference
    assert "episode rl/0/toy/" in difference


def test_another_verdict_is_found(tmp_path: Path) -> None:
    record(toy_config(), tmp_path / "run")

    def tamper(world: ToyWorld) -> None:
        grade = world.grader.grade

        async def generous(task: Any, episode: Episode) -> Any:
            return replace(await grade(task, episode), reward=1.0)  # type: ignore[type-var]

        world.grader.grade = generous  # type: ignore[method-assign]

    (difference,) = again(tmp_path / "run", tamper).differences
    assert "outcome Scored(reward=1.0" in difference


def test_another_optimizer_is_found_by_the_digest(tmp_path: Path) -> None:
    record(toy_config(rl={"steps": 1}), tmp_path / "run")

    def tamper(world: ToyWorld) -> None:
        world.trainer.optimizer.eps = 1e-7

    (difference,) = again(tmp_path / "run", tamper).differences
    assert "step 0 of rl : weights_digest" in difference


def test_forced_engine_cuts_generation_where_the_record_does(tmp_path: Path) -> None:
    from strop.core.episode import EpisodeKey
    from strop.runtime.forced import ForcedEngine

    world = ToyWorld(toy_config(), tmp_path)
    key = EpisodeKey(phase="rl", step=0, task_id="t", sample=0)
    needed = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    engine = ForcedEngine(world.engine, lambda _: needed, lambda version: [key] if version >= 1 else [], deadline_s=20)

    async def scenario() -> Any:
        weights = world.trainer.weights()
        await engine.swap(weights, 0)

        async def session() -> Any:
            stream = await engine.open(key)
            generation = await stream.generate([2, 6], max_new_tokens=6, stop_ids=[], temperature=1.0)
            trace = stream.trace()
            await stream.close()
            return generation, trace

        running = asyncio.create_task(session())
        for version in (1, 2, 3):
            await asyncio.wait_for(engine.swap(weights, version), 10)
        return await asyncio.wait_for(running, 10)

    generation, trace = asyncio.run(scenario())
    assert len(generation.token_ids) == 6
    assert np.repeat([s.version for s in trace.versions], [s.end - s.start for s in trace.versions]).tolist() == needed.tolist()
