"""Rollouts with the shipped base in a chosen precision, and the trainer's passes over them. Used by the benchmarks of routes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import strop
from strop.core.config import RunConfig
from strop.core.episode import EpisodeKey, Trace
from strop.core.sample import Sample
from strop.engine.embedded import EmbeddedEngine
from strop.model.checkpoint import load_checkpoint
from strop.model.config import DecoderConfig
from strop.model.training import TrainModel
from strop.rl.pack import MicroBatch, pack
from strop.rl.scoring import ScoredForward, score
from strop.runtime.build import torch_engine

BASE = Path(strop.__file__).parent / "assets" / "models" / "tiny"


@dataclass(frozen=True)
class Bed:
    """A trained MoE on both sides of the line.

    Attributes:
        shape: Its sizes.
        weights: Its weights.
        traces: What the rollout engine made.
        model: The trainer's fp32 model.
    """

    shape: DecoderConfig
    weights: dict[str, Any]
    traces: list[Trace]
    model: TrainModel


def shipped_base() -> tuple[DecoderConfig, dict[str, Any]]:
    """Sizes and weights of the base that ships with strop."""
    return load_checkpoint(BASE)


def beginnings(prompts: int, prompt_tokens: int) -> list[list[int]]:
    """Token ids of the first ``prompt_tokens`` of strop's own source files, those of the first ``prompts`` files that are long enough."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    files = sorted(Path(strop.__file__).parent.glob("*/*.py"))
    texts = [tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids[:prompt_tokens] for path in files]
    return [ids for ids in texts if len(ids) == prompt_tokens][:prompts]


async def traces_of(engine: EmbeddedEngine, prompts: Sequence[list[int]], new_tokens: int) -> list[Trace]:
    """Continue every prompt by ``new_tokens``, all at once."""

    async def one(number: int, ids: list[int]) -> Trace:
        session = await engine.open(EpisodeKey(phase="bench", step=0, task_id=f"file-{number}", sample=0))
        await session.generate(ids, max_new_tokens=new_tokens, stop_ids=(), temperature=1.0)
        trace = session.trace()
        await session.close()
        return trace

    return list(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts))))


def make_bed(precision: str, *, prompts: int, prompt_tokens: int, new_tokens: int, seed: int) -> Bed:
    """Continue the beginnings of strop's own source files with the shipped base."""
    shape, weights = shipped_base()
    numerics = {"mode": "tolerant", "max_abs_diff": 1e9, "rollout_precision": precision}
    engine_settings = {"max_sessions": prompts, "max_batch": prompts, "max_tokens": prompt_tokens + new_tokens + 32}
    config = RunConfig.model_validate({"seed": seed, "numerics": numerics, "engine": engine_settings, "model": {"device": "cpu"}})

    async def roll() -> list[Trace]:
        engine = torch_engine(config, shape, weights, 0)
        try:
            return await traces_of(engine, beginnings(prompts, prompt_tokens), new_tokens)
        finally:
            await engine.close()

    return Bed(shape, weights, asyncio.run(roll()), TrainModel(shape, weights, mode="tolerant", device="cpu"))


def micro_of(traces: list[Trace]) -> MicroBatch:
    """All streams as one micro-batch."""
    samples = []
    for number, trace in enumerate(traces):
        key = EpisodeKey(phase="bench", step=0, task_id=f"file-{number}", sample=0)
        samples.append(Sample(key=key, trace=trace, advantage=trace.loss_mask.astype(np.float32)))
    (micro,) = pack(samples, 1 << 30)
    return micro


def trainer_pass(bed: Bed, micro: MicroBatch, routes: np.ndarray | None) -> ScoredForward:
    """The trainer's pass over a micro-batch, on live or given routes, without gradients."""
    with torch.no_grad():
        return score(bed.model, micro, temperature=1.0, device=torch.device("cpu"), routes=routes).forward


def stacked(forward: ScoredForward) -> np.ndarray:
    """Router logits as ``float32 [R, L, E]``."""
    return torch.stack([layer.float() for layer in forward.router_logits], dim=1).numpy()
