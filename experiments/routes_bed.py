"""A test bed for router replay: a multi-step token task on a narrow mixture of experts, with strop's own engine, credit, loss and trainer.

The task: a walk on a ring whose places have shuffled names. The prompt names a target and a place; every turn the policy samples a
direction and a distance, and the environment answers with the new place. The reward is 1 if the walk ends at the target in time.
A short supervised phase on a clumsy walker comes first, so that RL has something to improve. Used by ``routes_tradeoff.py``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey, Trace, Turn, VersionSpan
from strop.core.errors import NumericsError
from strop.core.outcome import Scored
from strop.core.random import generator
from strop.core.sample import Batch, Sample
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.routing.families import router_spec
from strop.model.training import TrainModel
from strop.rl.advantage import assign_credit
from strop.rl.supervised import SupervisedTrainer, linear_schedule
from strop.rl.trainer import PolicyTrainer
from strop.runtime.build import make_engine

BEGIN, OBSERVED, LEFT, RIGHT, DISTANCES, PLACES = 0, 1, 2, 3, (4, 5, 6), 8
FIRST_PLACE = 7
VOCAB = FIRST_PLACE + PLACES
MAX_TURNS = 3
ORDER = np.random.default_rng(7).permutation(PLACES)
"""Where on the ring each named place lies."""

WIDE: dict[str, Any] = {"mode": "tolerant", "max_abs_diff": 99.0, "stop_token_mult_error": 99.0, "stop_correlation": -1.0}
WIDE |= {"stop_ess_frac": 0.0} | {f"stop_{name}": 1.0 for name in ("route_mismatch_frac", "clip_frac", "ratio_above_2_frac")}
WIDE |= {f"stop_{name}": 99.0 for name in ("k1_nats", "k3_nats", "logprob_diff_mean_nats", "advantage_skew_z")}
"""Limits that let a bad cell go on, so that its figures can be seen; the checks of the record of routes stay as they are."""

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("verify", {}),
    "r2": ("r2", {}),
    "r3": ("r3", {}),
    "fragile-only": ("fragile-only", {}),
    "plausible": ("plausible", {}),
    "dropout": ("r3", {"dropout": 0.05}),
}
"""What each arm of the experiment sets. ``off`` compares the record as ``verify`` does and trains on live routes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large a run is.

    Attributes:
        steps: RL steps, one rollout each.
        groups: Tasks of a step.
        group_size: Episodes of a task.
        warm_steps: Supervised steps before.
        eval_tasks: Tasks of the evaluation after the last step, one episode each.
    """

    steps: int = 60
    groups: int = 16
    group_size: int = 8
    warm_steps: int = 120
    eval_tasks: int = 400


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """One run of the grid."""

    layers: int
    precision: str
    updates: int
    mode: str
    seed: int

    @property
    def name(self) -> str:
        """File name without suffix."""
        return f"{self.layers}-{self.precision}-{self.updates}-{self.mode}-{self.seed}"


def shape_of(layers: int) -> DecoderConfig:
    """Return the narrow model: 8 experts, top 2, about 30 thousand parameters a layer."""
    return DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=8,
        top_k=2,
        expert_size=32,
        max_positions=64,
    )


def config_of(cell: Cell, scale: Scale) -> RunConfig:
    """Return the run's configuration."""
    mode, routes = MODES[cell.mode]
    rl = {"steps": scale.steps, "groups": scale.groups, "group_size": scale.group_size, "learning_rate": 1e-3, "warmup_steps": 1}
    rl |= {"updates_per_batch": cell.updates, "length_constant": 2 * MAX_TURNS}
    numerics = WIDE | {"replay_routes": mode, "rollout_precision": cell.precision, "rollout_keep": []}
    engine = {"max_sessions": 128, "max_batch": 128, "max_tokens": 64}
    sections = {"rl": rl, "numerics": numerics, "engine": engine, "routes": routes | {"tax_frac": 0.1, "probe_rows": 0}}
    return RunConfig.model_validate({"seed": cell.seed, "model": {"device": "cpu"}, **sections})


# ------------------------------------------------------------------------------------------------ the task


def start_of(task: str) -> tuple[int, int]:
    """Return target and first place of a task, which differ."""
    target, place = generator("walk", task).choice(PLACES, 2, replace=False)
    return int(target), int(place)


def move(place: int, action: list[int]) -> int:
    """Return the place after an action ``[direction, distance]``; anything else leaves it."""
    if len(action) != 2 or action[0] not in (LEFT, RIGHT) or action[1] not in DISTANCES:
        return place
    step = (DISTANCES.index(action[1]) + 1) * (1 if action[0] == RIGHT else -1)
    return int(np.flatnonzero((ORDER[place] + step) % PLACES == ORDER)[0])


def best_action(target: int, place: int) -> list[int]:
    """Return the action of a walker that knows the ring."""
    gap = int((ORDER[target] - ORDER[place]) % PLACES)
    direction, length = (RIGHT, gap) if gap <= PLACES // 2 else (LEFT, PLACES - gap)
    return [direction, DISTANCES[min(length, 3) - 1]]


async def walk(engine: Any, key: EpisodeKey) -> Episode:
    """Play one episode."""
    target, place = start_of(key.task_id)
    session = await engine.open(key)
    new_ids = [BEGIN, FIRST_PLACE + target, OBSERVED, FIRST_PLACE + place]
    turns: list[Turn] = []
    try:
        while len(turns) < MAX_TURNS and place != target:
            start = len(session) + len(new_ids)
            action = (await session.generate(new_ids, max_new_tokens=2, stop_ids=(), temperature=1.0)).token_ids.tolist()
            place = move(place, action)
            turns.append(Turn(trace=0, start=start, end=start + 2, call="move", arguments={}, text="", observation=str(place), status="ok"))
            new_ids = [OBSERVED, FIRST_PLACE + place]
        trace = session.trace()
    finally:
        await session.close()
    reason = "submitted" if place == target else "max_turns"
    return Episode(key=key, traces=(trace,), turns=tuple(turns), stop_reason=reason, outcome=Scored(reward=float(place == target)))


async def roll_out(engine: Any, phase: str, step: int, tasks: int, samples: int) -> list[Episode]:
    """Play ``samples`` episodes of each task."""
    keys = [
        EpisodeKey(phase=phase, step=step, task_id=f"{phase}-{step}-{task}", sample=sample)
        for task in range(tasks)
        for sample in range(samples)
    ]
    return list(await asyncio.gather(*(walk(engine, key) for key in keys)))


def clumsy_walk(number: int, seed: int) -> Sample:
    """A supervised sample of a walker that acts at random half of the time."""
    key = EpisodeKey(phase="warm", step=0, task_id=f"warm-{number}", sample=0)
    draw = generator("clumsy", seed, number)
    target, place = start_of(key.task_id)
    ids, mask = [BEGIN, FIRST_PLACE + target, OBSERVED, FIRST_PLACE + place], [0] * 4
    for _ in range(MAX_TURNS):
        is_random = draw.random() < 0.5
        action = [int(draw.choice((LEFT, RIGHT))), int(draw.choice(DISTANCES))] if is_random else best_action(target, place)
        place = move(place, action)
        ids, mask = [*ids, *action, OBSERVED, FIRST_PLACE + place], [*mask, 1, 1, 0, 0]
        if place == target:
            break
    sampled = np.array(mask, np.bool_)
    trace = Trace(
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(len(ids), np.float32),
        versions=(VersionSpan(start=0, end=len(ids), version=0),),
    )
    return Sample(key=key, trace=trace, advantage=sampled.astype(np.float32))


# ------------------------------------------------------------------------------------------------ runs


def warm_weights(layers: int, seed: int, scale: Scale, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that every cell of a depth and a seed starts from; kept in ``folder``."""
    path = folder / f"warm-{layers}-{seed}-{scale.warm_steps}.safetensors"
    if path.exists():
        return load_file(path)
    shape = shape_of(layers)
    decoder = Decoder(shape)
    decoder.initialise(torch.Generator().manual_seed(seed), std=0.15)
    model = TrainModel(shape, decoder.state_dict(), threads=1)
    trainer = SupervisedTrainer(model, linear_schedule(4e-3, steps=scale.warm_steps, warmup_frac=0.1))
    for step in range(scale.warm_steps):
        samples = tuple(clumsy_walk(128 * step + number, seed) for number in range(128))
        total = float(sum(sample.advantage.sum() for sample in samples))
        trainer.step(Batch(step=step, samples=samples, normaliser=total), with_digest=False)
    weights = {name: tensor.contiguous() for name, tensor in trainer.weights().items()}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{layers}-{seed}.tmp")
    save_file(weights, temporary)
    temporary.replace(path)
    return load_file(path)


def run_cell(cell: Cell, scale: Scale, folder: Path) -> dict[str, Any]:
    """Train one cell and return its figures: means over steps, the reward by step, and the success at the end."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    weights = warm_weights(cell.layers, cell.seed, scale, folder)
    config, shape = config_of(cell, scale), shape_of(cell.layers)
    model = TrainModel(shape, weights, threads=1)
    trainer = PolicyTrainer(model, config.rl, config.numerics, routes=config.routes, router=router_spec(shape))
    rewards, steps, stopped = asyncio.run(_train(cell, scale, config, shape, weights, trainer))
    success = asyncio.run(_evaluate(cell, scale, shape, trainer.weights()))

    def mean(key: str) -> float:
        values = [metrics[key] for metrics in steps if key in metrics]
        return float(np.mean(values)) if values else 0.0

    return {
        "k3": mean("numerics/k3_nats"),
        "p99": mean("numerics/logprob_diff_p99_nats"),
        "mismatch": mean("routes/mismatch_frac"),
        "suppressed": mean("routes/suppressed_frac"),
        "tax": mean("routes/tax_nats"),
        "clip_frac": mean("rl/clip_frac"),
        "reward": success,
        "warnings": float(sum(metrics.get("routes/warnings", 0.0) for metrics in steps)),
        "regret_max": max((metrics.get("routes/regret_max", 0.0) for metrics in steps), default=0.0),
        "rewards": rewards,
        "stopped": stopped,
        "seconds": time.perf_counter() - began,
    }


async def _train(
    cell: Cell, scale: Scale, config: RunConfig, shape: DecoderConfig, weights: dict[str, torch.Tensor], trainer: PolicyTrainer
) -> tuple[list[float], list[dict[str, float]], str]:
    """Return the mean reward and the metrics of every step, and why the run stopped early, ``""`` if it didn't."""
    engine = make_engine(config, shape, weights, threads=1)
    rewards: list[float] = []
    steps: list[dict[str, float]] = []
    try:
        for step in range(scale.steps):
            episodes = await roll_out(engine, f"rl{cell.seed}", step, scale.groups, scale.group_size)
            rewards.append(float(np.mean([episode.outcome.reward for episode in episodes if isinstance(episode.outcome, Scored)])))
            samples = assign_credit(episodes).samples
            normaliser = float(scale.groups * scale.group_size * config.rl.length_constant)
            update = trainer.step(Batch(step=step, samples=samples, normaliser=normaliser))
            steps.append(dict(update.metrics))
            await engine.swap(trainer.weights(), update.policy_version)
    except NumericsError as error:
        return rewards, steps, f"step {len(steps)}: {error}"
    finally:
        await engine.close()
    return rewards, steps, ""


async def _evaluate(cell: Cell, scale: Scale, shape: DecoderConfig, weights: Any) -> float:
    """Success of the final weights in fp32 on live routes, one episode a task, the same tasks for every cell."""
    engine = make_engine(
        config_of(Cell(layers=cell.layers, precision="fp32", updates=1, mode="off", seed=0), scale), shape, weights, threads=1
    )
    try:
        episodes = await roll_out(engine, "eval", 0, scale.eval_tasks, 1)
    finally:
        await engine.close()
    return float(np.mean([episode.outcome.reward for episode in episodes if isinstance(episode.outcome, Scored)]))
