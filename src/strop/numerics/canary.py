"""Canary streams: fixed tokens whose log-probabilities, routes and layer sketches tell whether two copies of the weights compute the same.

A digest says that bytes are equal; a canary says that what an engine made of them (repacked, fused, cast) still computes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.core.episode import Trace, VersionSpan
from strop.core.errors import NumericsError
from strop.core.random import generator
from strop.model.decoder import PackedTokens

STREAMS, LENGTH = 16, 64
SKETCH_ROWS = 8
FLOOR_FACTOR = 10.0
"""Across classes a difference may be so many times the largest benign one (as TTrace does: a tolerance from perturbation)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """What one copy of the weights made of the canary streams.

    Attributes:
        logprobs: ``float32 [N]`` of every token but each stream's first.
        routes: Experts of every row but each stream's last, ``int [N, L, K]``, ascending; ``None`` where the copy doesn't tell.
        sketches: ``float64 [L, 8]`` of each layer's router logits; ``None`` where the copy doesn't tell.
    """

    logprobs: np.ndarray
    routes: np.ndarray | None = None
    sketches: np.ndarray | None = None

    def digests(self) -> dict[str, str]:
        """Digest of every part that is there."""
        parts = {"logprobs": self.logprobs, "routes": self.routes, "sketches": self.sketches}
        return {name: array_digest(array) for name, array in parts.items() if array is not None}


def canary_streams(vocab_size: int, *, streams: int = STREAMS, length: int = LENGTH) -> list[np.ndarray]:
    """Return fixed token streams, ``int32 [length]`` each; they depend on the vocabulary's size alone."""
    draw = generator("canary", vocab_size)
    return [draw.integers(0, vocab_size, length, dtype=np.int32) for _ in range(streams)]


@torch.no_grad()
def trainer_view(model: Any, streams: Sequence[np.ndarray]) -> Canary:
    """Return the canary of a ``TrainModel``."""
    packed = PackedTokens.of([torch.from_numpy(stream[:-1].astype(np.int64)) for stream in streams])
    targets = torch.from_numpy(np.concatenate([stream[1:] for stream in streams]).astype(np.int64))
    forward = model.forward(packed, want=torch.arange(len(targets)), targets=targets, temperature=1.0)
    layers = [sketch(logits.detach().cpu().numpy()) for logits in forward.router_logits]
    return Canary(
        logprobs=forward.logprobs.cpu().numpy(), routes=forward.natural_ids.cpu().numpy().astype(np.uint16), sketches=np.stack(layers)
    )


async def engine_view(engine: Any, streams: Sequence[np.ndarray]) -> Canary:
    """Return the same from an engine that can ``recompute`` a trace (the embedded one can); it has no sketches."""
    logprobs, routes = [], []
    for stream in streams:
        mask = np.ones(len(stream), np.bool_)
        mask[0] = False
        blank = Trace(
            token_ids=stream.copy(),
            loss_mask=mask,
            logprobs=np.zeros(len(stream), np.float32),
            versions=(VersionSpan(start=0, end=len(stream), version=0),),
        )
        trace = await engine.recompute(blank, temperature=1.0)
        logprobs.append(trace.logprobs[1:])
        routes.append(None if trace.routes is None else trace.routes.expert_ids.astype(np.uint16))
    known = [part for part in routes if part is not None]
    return Canary(logprobs=np.concatenate(logprobs), routes=np.concatenate(known) if len(known) == len(routes) else None)


def trainer_canary(model: Any, streams: Sequence[np.ndarray]) -> np.ndarray:
    """Return the log-probabilities of ``trainer_view`` alone."""
    return trainer_view(model, streams).logprobs


async def engine_canary(engine: Any, streams: Sequence[np.ndarray]) -> np.ndarray:
    """Return the log-probabilities of ``engine_view`` alone."""
    return (await engine_view(engine, streams)).logprobs


def sketch(values: np.ndarray, rows: int = SKETCH_ROWS) -> np.ndarray:
    """Return random-sign projections of an array, ``float64 [rows]``: the squared distance of two sketches estimates that of the arrays.

    Source: Achlioptas, "Database-friendly random projections" (2003), theorem 1.1; signs are keyed by the size, so that any two
    processes project alike.
    """
    flat = values.astype(np.float64).reshape(-1)
    draw = generator("sketch", len(flat))
    bits = np.unpackbits(draw.integers(0, 256, (rows, (len(flat) + 7) // 8), dtype=np.uint8), axis=1)[:, : len(flat)]
    signed = np.where(bits, flat, -flat)
    return signed.sum(axis=1) / np.sqrt(rows)


def sketch_distance(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return the estimated relative L2 distance of each layer, ``float64 [L]``, of sketches ``[L, rows]``."""
    scale = np.sqrt(np.square(one).sum(-1))
    return np.sqrt(np.square(one - two).sum(-1)) / np.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryDifference:
    """How far two canaries lie apart.

    Attributes:
        logprob_max_nats: Largest absolute difference; infinity where one isn't finite.
        routes_frac: Share of row-layer pairs with other experts.
        first_layer: First layer with a difference in routes or, bitwise, in its sketch; -1 where none differs.
        layers: Relative distance of each layer's sketch, empty where a side has none.
        is_equal: Bitwise equality of all parts that both sides have.
    """

    logprob_max_nats: float
    routes_frac: float
    first_layer: int
    layers: tuple[float, ...]
    is_equal: bool


def compare_canaries(one: Canary, two: Canary) -> CanaryDifference:
    """Compare two canaries of the same streams.

    Raises:
        NumericsError: They are of different streams or models.
    """
    if one.logprobs.shape != two.logprobs.shape:
        raise NumericsError(f"canaries of {len(one.logprobs)} and {len(two.logprobs)} tokens can't be compared")
    first, second = one.digests(), two.digests()
    size = np.abs(one.logprobs.astype(np.float64) - two.logprobs)
    largest = float(size.max()) if np.isfinite(size).all() else float("inf")
    odd_layers: set[int] = set()
    share, layers = 0.0, np.zeros(0)
    if one.routes is not None and two.routes is not None:
        differs = (one.routes != two.routes).any(-1)
        share = float(differs.mean())
        odd_layers |= set(np.flatnonzero(differs.any(0)).tolist())
    if one.sketches is not None and two.sketches is not None:
        layers = sketch_distance(one.sketches, two.sketches)
        odd_layers |= set(np.flatnonzero((one.sketches != two.sketches).any(-1)).tolist())
    return CanaryDifference(
        logprob_max_nats=largest,
        routes_frac=share,
        first_layer=min(odd_layers, default=-1),
        layers=tuple(layers.tolist()),
        is_equal=all(first[name] == second[name] for name in set(first) & set(second)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryLimits:
    """What two canaries may differ by.

    Attributes:
        logprob_max_nats: Largest log-probability difference; 0 asks for equal bits.
        layers: Largest relative distance of each layer's sketch; empty asks nothing of layers.
    """

    logprob_max_nats: float = 0.0
    layers: tuple[float, ...] = ()

    @classmethod
    def from_floors(cls, floors: Mapping[str, Any]) -> CanaryLimits:
        """Ten times the benign floors of ``strop numerics calibrate``."""
        return cls(
            logprob_max_nats=FLOOR_FACTOR * float(floors["logprob_max_nats"]),
            layers=tuple(FLOOR_FACTOR * float(value) for value in floors["layers"]),
        )

    def breach(self, difference: CanaryDifference) -> str:
        """Return what breaks the limits and the first layer concerned, or ``""``."""
        if not self.logprob_max_nats and not self.layers:
            if difference.is_equal:
                return ""
            place = f", first in layer {difference.first_layer}" if difference.first_layer >= 0 else ", after the last router"
            return f"canaries differ by up to {difference.logprob_max_nats:g} nats where equal bits are due{place}"
        over = [n for n, (value, limit) in enumerate(zip(difference.layers, self.layers, strict=False)) if not value <= limit]
        if over:
            return (
                f"layer {over[0]} is off by {difference.layers[over[0]]:.3g} (relative L2 of its sketch), limit {self.layers[over[0]]:.3g}"
            )
        if not difference.logprob_max_nats <= self.logprob_max_nats:
            return f"canary log-probabilities differ by up to {difference.logprob_max_nats:g} nats, limit {self.logprob_max_nats:g}"
        return ""


def array_digest(array: np.ndarray) -> str:
    """Return the hex digest over number type, shape and bytes (little-endian)."""
    plain = np.ascontiguousarray(array)
    head = f"{plain.dtype.str}|{plain.shape}|".encode()
    return hashlib.blake2b(head + plain.tobytes(), digest_size=32).hexdigest()
