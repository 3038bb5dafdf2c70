"""Exact mode: what the engine records is bit for bit what the trainer computes, however the engine came to it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_setups import MAX_TOKENS, SHAPE, decoder_weights

from strop.core.config import EngineConfig
from strop.core.episode import EpisodeKey, Trace
from strop.engine.embedded import EmbeddedEngine
from strop.model.decoder import PackedTokens
from strop.model.inference import InferenceModel
from strop.model.training import TrainModel

TEMPERATURE = 0.9


async def rollout(engine: EmbeddedEngine) -> list[Trace]:
    """Twelve episodes in groups of four, several turns, mixed lengths."""

    async def episode(number: int) -> Trace:
        rng = np.random.default_rng(number // 4)
        session = await engine.open(EpisodeKey(phase="rl", step=0, task_id=str(number // 4), sample=number))
        ids = rng.integers(0, SHAPE.vocab_size, 50).tolist()
        for _ in range(3):
            await session.generate(ids, max_new_tokens=9, stop_ids=[number % 7], temperature=TEMPERATURE)
            await asyncio.sleep(0.001 * (number % 3))
            ids = np.random.default_rng(number).integers(0, SHAPE.vocab_size, 7).tolist()
        trace = session.trace()
        await session.close()
        return trace

    return list(await asyncio.gather(*(episode(number) for number in range(12))))


def trainer_view(weights, traces: list[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the sampled tokens and all routes, from one packed training forward."""
    model = TrainModel(SHAPE, weights, threads=1)
    packed = PackedTokens.of([torch.from_numpy(t.token_ids[:-1].copy()) for t in traces])
    want, targets, base = [], [], 0
    for trace in traces:
        at = np.flatnonzero(trace.loss_mask)
        want += (base + at - 1).tolist()
        targets += trace.token_ids[at].tolist()
        base += len(trace) - 1
    out = model.forward(packed, want=torch.tensor(want), targets=torch.tensor(targets), temperature=TEMPERATURE)
    return out.logprobs.detach().numpy(), out.expert_ids.numpy()


@pytest.mark.parametrize("threads", [1, 2])
def test_rollout_and_trainer_agree_bit_for_bit(threads):
    async def main():
        zero, one = decoder_weights(0), decoder_weights(1)
        config = EngineConfig(max_sessions=8, max_tokens=MAX_TOKENS, max_batch=5, prefill_rows=37)
        engine = EmbeddedEngine(config, InferenceModel(SHAPE, zero, threads=threads), seed=1)
        for version, weights in ((0, zero), (1, one)):
            traces = await rollout(engine)
            logprobs, routes = trainer_view(weights, traces)
            recorded = np.concatenate([trace.logprobs[trace.loss_mask] for trace in traces])
            assert recorded.tobytes() == logprobs.tobytes()
            assert all(trace.routes is not None and trace.routes.valid.all() for trace in traces)
            assert (np.concatenate([trace.routes.expert_ids for trace in traces if trace.routes]) == routes).all()
            assert {span.version for trace in traces for span in trace.versions} == {version}
            assert engine.counters.cached_tokens > 0
            again = await engine.recompute(traces[5], temperature=TEMPERATURE)
            assert again.logprobs.tobytes() == traces[5].logprobs.tobytes()
            if version == 0:
                other, _ = trainer_view(one, traces)
                assert other.tobytes() != recorded.tobytes()  # stale weights would be noticed
                await engine.swap(one, 1)
        await engine.close()

    asyncio.run(main())
