"""Engine and trainer on a real (tiny) mixture of experts: exact over whole runs, with and without in-flight swaps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_toys import REAL_SHAPE, VOCAB, ToyGrader, ToyWorld, toy_config

from strop.core.outcome import Scored
from strop.engine.embedded import EmbeddedEngine
from strop.model.decoder import Decoder
from strop.model.inference import InferenceModel
from strop.model.training import TrainModel
from strop.numerics.canary import canary_streams, engine_canary, trainer_canary
from strop.rl.loop import run_rl
from strop.rl.trainer import PolicyTrainer
from strop.runtime.replay import ReplayStore, replay
from strop.store import RunDir


class ParityGrader(ToyGrader):
    """Every other token pays, so that every step has a signal."""

    async def grade(self, task: Any, episode: Any) -> Any:
        trace = episode.traces[0]
        return Scored(reward=float(int(trace.token_ids[trace.loss_mask][0]) % 2))


def world(config: Any, base: Path) -> ToyWorld:
    """The toy world with a real model in its middle."""
    decoder = Decoder(REAL_SHAPE)
    decoder.initialise(torch.Generator().manual_seed(0), std=0.3)
    weights = decoder.state_dict()
    toy = ToyWorld(config, base)
    toy.engine = EmbeddedEngine(config.engine, InferenceModel(REAL_SHAPE, weights, threads=1), seed=config.seed)
    toy.trainer = PolicyTrainer(TrainModel(REAL_SHAPE, weights, threads=1), config.rl, config.numerics)
    toy.grader = ParityGrader()
    return toy


@pytest.mark.parametrize("staleness", [0, 1])
def test_exact_over_a_whole_run_and_its_replay(tmp_path: Path, staleness: int) -> None:
    config = toy_config(rl={"steps": 3, "max_staleness": staleness, "learning_rate": 0.003, "updates_per_batch": 2})
    first = world(config, tmp_path)

    async def scenario(store: Any) -> tuple[Any, Any]:
        await run_rl(config, **first.ports(), store=store)
        streams = canary_streams(VOCAB, streams=3, length=24)
        return await engine_canary(first.engine, streams), trainer_canary(first.trainer.model, streams)

    with RunDir.create(tmp_path / "run", config) as run:
        loaded, trained = asyncio.run(scenario(run.store))
        metrics = run.store.metrics(phase="rl")
    assert loaded.tobytes() == trained.tobytes()
    compared = [record for record in metrics if record.get("numerics/tokens", 0) > 0]
    assert len(compared) >= (3 if staleness == 0 else 1)
    assert {record["numerics/logprob_diff_max_nats"] for record in compared} == {0.0}

    def execute(copy: RunDir, store: ReplayStore) -> None:
        second = world(copy.config, tmp_path)
        ports = second.ports() | {"engine": store.forced_engine(second.engine, copy.config)}
        asyncio.run(run_rl(copy.config, **ports, store=store))

    with RunDir.open(tmp_path / "run") as run:
        report = replay(run, execute)
    assert report.differences == []
    assert report.episodes == 3 * 12
