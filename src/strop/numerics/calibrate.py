"""Benign floors: how far results move when nothing is wrong, so that a limit is a multiple of a measurement.

Every benign variation computes the canary streams again: streams in other micro-batches, other threads, products summed in another order or
in two halves, streams in another place of the batch. A floor is the largest difference over all of them; a limit is ten times a floor.
Floors belong to weights and an equivalence class and are measured anew when either changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.core.random import generator
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.model.training import TrainModel
from strop.numerics.canary import Canary, compare_canaries, sketch, sketch_distance
from strop.numerics.localise import compute, operations, record, relative_distance

MICRO_BATCHES = (1, 2, 3, 7, 16)
"""Streams of a forward pass in the micro-batch variations."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Floors:
    """The largest benign differences.

    Attributes:
        logprob_max_nats: Of a canary log-probability.
        layers: Relative distance of each layer's sketch.
        operations: Relative L2 distance of each operation alone.
        variations: Largest log-probability difference of each variation by name.
    """

    logprob_max_nats: float
    layers: tuple[float, ...]
    operations: dict[str, float]
    variations: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "logprob_max_nats": self.logprob_max_nats,
            "layers": list(self.layers),
            "operations": self.operations,
            "variations": self.variations,
        }


def calibrate_decoder(decoder: Decoder, streams: Sequence[np.ndarray], *, threads: Sequence[int] = (1, 2)) -> Floors:
    """Measure the floors of the torch path.

    Args:
        decoder: Its weights are not changed.
        streams: Canary streams.
        threads: Thread counts to compare with the present one.
    """
    base = decoder_canary(decoder, streams)
    assert base.sketches is not None
    found: dict[str, float] = {}
    layers = np.zeros(decoder.config.num_layers)
    for name, canary in _variations(decoder, streams, threads):
        assert canary.sketches is not None
        found[name] = compare_canaries(base, canary).logprob_max_nats
        layers = np.maximum(layers, sketch_distance(base.sketches, canary.sketches))
    return Floors(
        logprob_max_nats=max(found.values()),
        layers=tuple(layers.tolist()),
        operations=_operation_floors(decoder, streams),
        variations=found,
    )


def calibrate_exact(config: DecoderConfig, weights: Any, streams: Sequence[np.ndarray], *, threads: Sequence[int] = (1, 2)) -> Floors:
    """Measure the floors of the exact kernels, which must come out as zero."""
    found: dict[str, float] = {}
    layers = np.zeros(config.num_layers)
    base: Canary | None = None
    for count in threads:
        model = TrainModel(config, weights, threads=count)
        for size in MICRO_BATCHES:
            canary = in_micro_batches(lambda part, model=model: trainer_parts(model, part), streams, size)
            base = base or canary
            difference = compare_canaries(base, canary)
            found[f"{count} threads, micro-batch {size}"] = difference.logprob_max_nats
            layers = np.maximum(layers, np.array(difference.layers))
    return Floors(logprob_max_nats=max(found.values()), layers=tuple(layers.tolist()), operations={}, variations=found)


# ---------------------------------------------------------------------------------------------------- canaries of the torch path

Parts = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
"""Log-probabilities, routes and router logits ``[L, R, E]``, by stream."""


def decoder_canary(decoder: Decoder, streams: Sequence[np.ndarray]) -> Canary:
    """Return the canary of a decoder in one pass."""
    return in_micro_batches(lambda part: decoder_parts(decoder, part), streams, len(streams))


def in_micro_batches(parts: Callable[[Sequence[np.ndarray]], Parts], streams: Sequence[np.ndarray], size: int) -> Canary:
    """Return the canary of passes over ``size`` streams each."""
    done: list[Parts] = [parts(streams[start : start + size]) for start in range(0, len(streams), size)]
    logprobs, routes, router = ([item for part in done for item in part[n]] for n in range(3))
    together = np.concatenate(router, axis=1)
    return Canary(
        logprobs=np.concatenate(logprobs), routes=np.concatenate(routes), sketches=np.stack([sketch(layer) for layer in together])
    )


@torch.no_grad()
def decoder_parts(decoder: Decoder, streams: Sequence[np.ndarray]) -> Parts:
    """Run a decoder over some streams."""
    packed = pack_streams(streams)
    out = decoder(packed)
    targets = torch.from_numpy(np.concatenate([stream[1:] for stream in streams]).astype(np.int64))
    logprobs = decoder.logits(out.hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return _by_stream(packed.lengths, logprobs, out.expert_ids, out.router_logits)


@torch.no_grad()
def trainer_parts(model: TrainModel, streams: Sequence[np.ndarray]) -> Parts:
    """Run a trained model over some streams."""
    packed = pack_streams(streams)
    targets = torch.from_numpy(np.concatenate([stream[1:] for stream in streams]).astype(np.int64))
    out = model.forward(packed, want=torch.arange(len(targets)), targets=targets)
    return _by_stream(packed.lengths, out.logprobs, out.natural_ids, out.router_logits)


def pack_streams(streams: Sequence[np.ndarray]) -> PackedTokens:
    """Pack all tokens but each stream's last."""
    return PackedTokens.of([torch.from_numpy(stream[:-1].astype(np.int64)) for stream in streams])


def _by_stream(lengths: tuple[int, ...], logprobs: Tensor, routes: Tensor, router: list[Tensor]) -> Parts:
    edges = np.cumsum(lengths)[:-1]
    logits = torch.stack(router).cpu().numpy()
    return (
        np.split(logprobs.cpu().numpy(), edges),
        np.split(routes.cpu().numpy().astype(np.uint16), edges),
        np.split(logits, edges, axis=1),
    )


# ---------------------------------------------------------------------------------------------------- variations


def _variations(decoder: Decoder, streams: Sequence[np.ndarray], threads: Sequence[int]) -> Iterator[tuple[str, Canary]]:
    for size in MICRO_BATCHES:
        yield f"micro-batch {size}", in_micro_batches(lambda part: decoder_parts(decoder, part), streams, size)
    for count in threads:
        with _threads(count):
            yield f"{count} threads", decoder_canary(decoder, streams)
    for name, product in reorderings().items():
        with reordered(decoder, product):
            yield name, decoder_canary(decoder, streams)
    order = generator("calibrate", len(streams)).permutation(len(streams))
    back = np.argsort(order)

    def elsewhere(part: Sequence[np.ndarray]) -> Parts:
        logprobs, routes, router = decoder_parts(decoder, [part[index] for index in order])
        return [logprobs[i] for i in back], [routes[i] for i in back], [router[i] for i in back]

    yield "row position", in_micro_batches(elsewhere, streams, len(streams))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reorderings() -> dict[str, Product]:
    """Matrix products ``x @ w.T`` that sum in another order; mathematically the same."""

    def permuted(x: Tensor, w: Tensor) -> Tensor:
        order = torch.from_numpy(generator("reorder", x.shape[-1]).permutation(x.shape[-1]))
        return F.linear(x[..., order], w[..., order])

    def split(x: Tensor, w: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return F.linear(x[..., :half], w[..., :half]) + F.linear(x[..., half:], w[..., half:])

    return {"k permuted": permuted, "k in two halves": split}


@contextlib.contextmanager
def reordered(decoder: Decoder, product: Product) -> Iterator[None]:
    """Inside the block every matrix product of the decoder is ``product``."""
    changed: list[tuple[Any, str]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        changed.append((owner, name))

    def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = product(x, gate_up).chunk(2, dim=-1)
        return product(F.silu(gate) * up, down)

    layers: list[Any] = list(decoder.model.layers)
    for layer in layers:
        for module in layer.self_attn.children():
            if isinstance(module, nn.Linear):
                put(module, "forward", lambda x, w=module.weight: product(x, w))
        put(layer.mlp.gate, "score", lambda x, w=layer.mlp.gate.weight: product(x.float(), w.float()))
        put(layer.mlp.experts, "compute", expert)
    put(decoder, "logits", lambda hidden: product(hidden.float(), decoder.lm_head.weight.float()))
    try:
        yield
    finally:
        for owner, name in changed:
            owner.__dict__.pop(name)


def _operation_floors(decoder: Decoder, streams: Sequence[np.ndarray]) -> dict[str, float]:
    """Largest relative distance of each operation alone over the reorderings."""
    packed = pack_streams(streams)
    trace = record(decoder, packed)
    floors = dict.fromkeys(operations(decoder.config.num_layers), 0.0)
    for product in reorderings().values():
        with reordered(decoder, product):
            for name, step in trace.items():
                distance = relative_distance(compute(decoder, name, step.inputs, packed), step.output)
                floors[name] = max(floors[name], distance)
    # What no reordering of products touches may still be summed in another order elsewhere: allow a float32 rounding.
    return {name: max(value, float(torch.finfo(torch.float32).eps)) for name, value in floors.items()}
