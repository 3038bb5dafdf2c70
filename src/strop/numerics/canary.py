"""Canary streams: fixed tokens whose log-probabilities tell whether two copies of the weights compute the same thing.

A digest says that bytes are equal; a canary says that what an engine made of them (repacked, fused, cast) still computes the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from strop.core.episode import Trace, VersionSpan
from strop.core.random import generator
from strop.model.decoder import PackedTokens

STREAMS, LENGTH = 16, 64


def canary_streams(vocab_size: int, *, streams: int = STREAMS, length: int = LENGTH) -> list[np.ndarray]:
    """Return fixed token streams, ``int32 [length]`` each; they depend on the vocabulary's size alone."""
    draw = generator("canary", vocab_size)
    return [draw.integers(0, vocab_size, length, dtype=np.int32) for _ in range(streams)]


@torch.no_grad()
def trainer_canary(model: Any, streams: list[np.ndarray]) -> np.ndarray:
    """Return the log-probability of every token but each stream's first under a ``TrainModel``, ``float32 [sum(length - 1)]``."""
    packed = PackedTokens.of([torch.from_numpy(stream[:-1].astype(np.int64)) for stream in streams])
    targets = torch.from_numpy(np.concatenate([stream[1:] for stream in streams]).astype(np.int64))
    forward = model.forward(packed, want=torch.arange(len(targets)), targets=targets, temperature=1.0)
    return forward.logprobs.cpu().numpy()


async def engine_canary(engine: Any, streams: list[np.ndarray]) -> np.ndarray:
    """Return the same from an engine that can ``recompute`` a trace (the embedded one can)."""
    parts = []
    for stream in streams:
        mask = np.ones(len(stream), np.bool_)
        mask[0] = False
        blank = Trace(
            token_ids=stream.copy(),
            loss_mask=mask,
            logprobs=np.zeros(len(stream), np.float32),
            versions=(VersionSpan(start=0, end=len(stream), version=0),),
        )
        parts.append((await engine.recompute(blank, temperature=1.0)).logprobs[1:])
    return np.concatenate(parts)


def array_digest(array: np.ndarray) -> str:
    """Return the hex digest over number type, shape and bytes (little-endian)."""
    plain = np.ascontiguousarray(array)
    head = f"{plain.dtype.str}|{plain.shape}|".encode()
    return hashlib.blake2b(head + plain.tobytes(), digest_size=32).hexdigest()
