"""Models, rollouts and comparisons that the drift benchmarks share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.cli.models import model_dir
from strop.core.config import EngineConfig
from strop.core.episode import EpisodeKey, Trace
from strop.engine.embedded import EmbeddedEngine
from strop.engine.stream import token_versions
from strop.model.checkpoint import load_checkpoint
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.model.inference import InferenceModel
from strop.model.training import TrainModel

TEMPERATURE = 1.0
MAX_TOKENS = 256
GROUP = 4
"""Episodes that share a prompt, so that prefixes are reused."""

TINY = DecoderConfig(
    vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2, expert_size=64
)
NARROW = DecoderConfig(
    vocab_size=256, hidden_size=32, num_layers=24, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=8, top_k=2, expert_size=32
)

Weights = Mapping[str, Any]


def random_weights(config: DecoderConfig, seed: int = 0, std: float = 0.15) -> dict[str, torch.Tensor]:
    """Fresh weights, large enough that routing and attention are uneven."""
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(seed), std=std)
    return {name: value.detach().clone() for name, value in decoder.state_dict().items()}


def shipped() -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """The base that ships with strop."""
    return load_checkpoint(model_dir("builtin:tiny"))


def moved(weights: Weights, size: float, seed: int = 1) -> dict[str, torch.Tensor]:
    """Weights after something like an update: every value moved by about ``size`` of its tensor's spread."""
    draw = torch.Generator().manual_seed(seed)
    changed = {}
    for name, value in weights.items():
        if name != "lm_head.weight":
            changed[name] = value + size * value.std().nan_to_num(1.0) * torch.randn(value.shape, generator=draw)
    if "lm_head.weight" in weights:
        tied = torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
        changed["lm_head.weight"] = changed["model.embed_tokens.weight"] if tied else weights["lm_head.weight"].clone()
    return changed


def make_engine(config: DecoderConfig, weights: Weights, *, sessions: int, threads: int, seed: int = 0) -> EmbeddedEngine:
    """An exact engine."""
    settings = EngineConfig(max_sessions=sessions, max_batch=sessions, max_tokens=MAX_TOKENS, prefill_rows=257)
    return EmbeddedEngine(settings, InferenceModel(config, weights, threads=threads), seed=seed)


async def episodes(engine: EmbeddedEngine, config: DecoderConfig, numbers: Sequence[int], *, turns: int = 3, new: int = 40) -> list[Trace]:
    """Multi-turn episodes, groups of four with equal prompts; prompts and observations of different lengths."""

    async def play(number: int) -> Trace:
        prompt = np.random.default_rng(number // GROUP)
        own = np.random.default_rng(10_000 + number)
        session = await engine.open(EpisodeKey(phase="rl", step=0, task_id=str(number // GROUP), sample=number))
        ids = prompt.integers(0, config.vocab_size, int(prompt.integers(10, 60))).tolist()
        for _ in range(turns):
            await session.generate(ids, max_new_tokens=new, stop_ids=[int(own.integers(0, config.vocab_size))], temperature=TEMPERATURE)
            ids = own.integers(0, config.vocab_size, int(own.integers(1, 12))).tolist()
        session.feed(ids)
        trace = session.trace()
        await session.close()
        return trace

    return list(await asyncio.gather(*(play(number) for number in numbers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Rollout against trainer.

    Attributes:
        tokens: Sampled tokens compared.
        max_nats: Largest absolute difference.
        foreign_routes: Row-layer pairs with other experts.
    """

    tokens: int
    max_nats: float
    foreign_routes: int


@torch.no_grad()
def compare(model: TrainModel, traces: Sequence[Trace], *, version: int | None = None) -> Agreement:
    """Hold recorded log-probabilities and routes against the trainer's.

    Args:
        model: Holds the weights of ``version``.
        traces: Recorded streams.
        version: Only tokens up to which the whole stream has this version; ``None`` takes all.
    """
    tokens, largest, foreign = 0, 0.0, 0
    for start in range(0, len(traces), 16):
        part = traces[start : start + 16]
        packed = PackedTokens.of([torch.from_numpy(t.token_ids[:-1].astype(np.int64)) for t in part])
        want, base, recorded, targets, rows = [], 0, [], [], []
        for trace in part:
            fresh = np.ones(len(trace), np.bool_)
            if version is not None:
                fresh = np.logical_and.accumulate(token_versions(trace) == version)
            at = np.flatnonzero(trace.loss_mask & fresh)
            want.append(base + at - 1)
            targets.append(trace.token_ids[at])
            recorded.append(trace.logprobs[at])
            assert trace.routes is not None
            rows.append(fresh[1:] & trace.routes.valid)
            base += len(trace) - 1
        wanted = np.concatenate(want)
        if not len(wanted):
            continue
        forward = model.forward(
            packed,
            want=torch.from_numpy(wanted),
            targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            temperature=TEMPERATURE,
        )
        difference = np.abs(np.concatenate(recorded).astype(np.float64) - forward.logprobs.numpy())
        tokens, largest = tokens + len(wanted), max(largest, float(difference.max()))
        valid = np.concatenate(rows)
        routes = np.concatenate([t.routes.expert_ids for t in part if t.routes is not None])
        foreign += int((routes[valid] != forward.natural_ids.numpy()[valid]).any(-1).sum())
    return Agreement(tokens=tokens, max_nats=largest, foreign_routes=foreign)


@torch.no_grad()
def trainer_logprobs(model: TrainModel, traces: Sequence[Trace]) -> np.ndarray:
    """Return the trainer's log-probabilities of all sampled tokens, stream after stream."""
    found = []
    for trace in traces:
        at = np.flatnonzero(trace.loss_mask)
        packed = PackedTokens.of([torch.from_numpy(trace.token_ids[:-1].astype(np.int64))])
        targets = torch.from_numpy(trace.token_ids[at].astype(np.int64))
        found.append(model.forward(packed, want=torch.from_numpy(at - 1), targets=targets, temperature=TEMPERATURE).logprobs.numpy())
    return np.concatenate(found)
