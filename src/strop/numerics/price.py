"""What each line of the precision policy is worth: the drift that an override adds, and the time that it saves or costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.training import TrainModel
from strop.numerics.calibrate import decoder_canary, pack_streams
from strop.numerics.canary import compare_canaries
from strop.numerics.compare import compare_logprobs
from strop.numerics.formats import round_to
from strop.numerics.precision import FORWARD_OPS, POLICY, Emulation, Precision

REPEATS = 5
REAL_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
UPDATES, MICRO_BATCHES = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """One override.

    Attributes:
        override: For example ``"router=bf16"``.
        k3_nats: k3 between the overridden rollout and the float32 trainer; 0 for lines of training.
        logprob_max_nats: Largest log-probability difference.
        ratio_above_2_frac: Share of tokens with a ratio outside [1/2, 2].
        routes_frac: Share of row-layer pairs with other experts.
        update_error: Relative L2 error of the weights' movement over a few updates; lines of training only.
        time_ratio: Time of the operation in the override's type over float32, on this machine; ``None`` where the type is emulated.
    """

    override: str
    k3_nats: float = 0.0
    logprob_max_nats: float = 0.0
    ratio_above_2_frac: float = 0.0
    routes_frac: float = 0.0
    update_error: float = 0.0
    time_ratio: float | None = None

    def row(self) -> dict[str, Any]:
        """A row of the table."""
        return {name: getattr(self, name) for name in self.__slots__}


def price_list(
    config: DecoderConfig, weights: Mapping[str, Any], streams: Sequence[np.ndarray], kind: str, overrides: Sequence[str] = ()
) -> list[Price]:
    """Price every line of the policy in number type ``kind``, or only the given overrides.

    Args:
        config: Sizes.
        weights: Under Hugging Face names.
        streams: Streams to compare on; any tokens do, those that a policy sampled say most.
        kind: One of ``formats.FORMATS``.
        overrides: ``"router=bf16"``.
    """
    still: dict[str, dict[str, Tensor]] = {}

    def plain() -> dict[str, Tensor]:
        return still.get("") or still.setdefault("", _movement(config, weights, streams, "", "fp32"))

    asked = list(overrides) or [f"{name}={kind}" for name in POLICY if name not in ("rope", "log_softmax")]
    found = []
    for override in asked:
        name, _, value = override.partition("=")
        rule = POLICY.get(name.strip())
        if rule is not None and rule.trained:
            low = _movement(config, weights, streams, name.strip(), value.strip())
            found.append(Price(override=override, update_error=_distance(low, plain())))
        else:
            found.append(_price_forward(config, weights, streams, override))
    return found


def fresh_decoder(config: DecoderConfig, weights: Mapping[str, Any]) -> Decoder:
    """Return a decoder with copies of the weights, without gradients."""
    decoder = Decoder(config)
    own = decoder.state_dict()
    decoder.load_state_dict({name: weights[name].detach().clone() for name in own if name in weights}, strict=False)
    return decoder.requires_grad_(False)


def _price_forward(config: DecoderConfig, weights: Mapping[str, Any], streams: Sequence[np.ndarray], override: str) -> Price:
    trainer = decoder_canary(fresh_decoder(config, weights), streams)
    low = fresh_decoder(config, weights)
    precision = Precision.of("fp32", overrides=[override])
    Emulation(low, precision)
    rollout = decoder_canary(low, streams)
    # Canary tokens are not sampled by the rollout, so k3 is a size here, not an estimate of a divergence.
    metrics = compare_logprobs(rollout.logprobs, trainer.logprobs, np.ones_like(trainer.logprobs))
    name, _, kind = override.partition("=")
    return Price(
        override=override,
        k3_nats=metrics["numerics/k3_nats"],
        logprob_max_nats=metrics["numerics/logprob_diff_max_nats"],
        ratio_above_2_frac=metrics["numerics/ratio_above_2_frac"],
        routes_frac=compare_canaries(trainer, rollout).routes_frac,
        time_ratio=_time_ratio(config, sum(map(len, streams)), name.strip(), kind.strip()),
    )


def _time_ratio(config: DecoderConfig, rows: int, name: str, kind: str) -> float | None:
    """Measure the operation in a real type against float32."""
    if kind not in REAL_TYPES or name not in FORWARD_OPS:
        return None
    c = config
    shapes = {
        "projection": (c.hidden_size, c.num_heads * c.head_dim),
        "experts": (c.hidden_size, 2 * c.expert_size),
        "router": (c.hidden_size, c.num_experts),
        "lm_head": (c.hidden_size, c.vocab_size),
    }
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, c.hidden_size, generator=draw)

    def timed(dtype: torch.dtype) -> float:
        own = x.to(dtype)
        if name in shapes:
            weight = torch.randn(shapes[name][::-1], generator=draw).to(dtype)
            return _best(lambda: F.linear(own, weight))
        if name == "attention":
            heads = torch.randn(1, c.num_heads, min(rows, 512), c.head_dim, generator=draw).to(dtype)
            return _best(lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
        if name == "norm":
            return _best(lambda: F.rms_norm(own, (c.hidden_size,)))
        return _best(lambda: own + own)

    return timed(REAL_TYPES[kind]) / timed(torch.float32)


def _best(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


# ---------------------------------------------------------------------------------------------------- lines of training


def _distance(low: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> float:
    """Relative L2 distance of two movements."""
    difference = sum(float((low[key] - plain[key]).double().square().sum()) for key in plain)
    size = sum(float(value.double().square().sum()) for value in plain.values())
    return (difference / size) ** 0.5 if size > 0 else 0.0


def _movement(config: DecoderConfig, weights: Mapping[str, Any], streams: Sequence[np.ndarray], low: str, kind: str) -> dict[str, Tensor]:
    """How the weights move over a few Adam updates on the streams, with one line of the policy in another type."""
    model = TrainModel(config, weights, mode="tolerant")
    values = model.parameters
    start = {name: value.detach().clone() for name, value in values.items()}
    first = {name: torch.zeros_like(value) for name, value in start.items()}
    second = {name: torch.zeros_like(value) for name, value in start.items()}

    def held(x: Tensor, line: str) -> Tensor:
        return round_to(x, kind) if low == line else x

    for update in range(1, UPDATES + 1):
        gradient = _gradient(model, streams, held)
        with torch.no_grad():
            for name, value in values.items():
                grad = gradient[name]
                first[name] = held(first[name] * 0.9 + grad * 0.1, "moments")
                second[name] = held(second[name] * 0.95 + grad * grad * 0.05, "moments")
                direction = (first[name] / (1 - 0.9**update)) / ((second[name] / (1 - 0.95**update)).sqrt() + 1e-8)
                value.copy_(held(value - 3e-4 * direction, "master_weights"))
    return {name: value.detach() - start[name] for name, value in values.items()}


def _gradient(model: TrainModel, streams: Sequence[np.ndarray], held: Callable[[Tensor, str], Tensor]) -> dict[str, Tensor]:
    """Gradient over two ranks of two micro-batches each, accumulated and reduced as the policy says."""
    shards = [streams[rank::2] for rank in range(2)]
    sums: list[dict[str, Tensor]] = []
    for shard in shards:
        total: dict[str, Tensor] = {}
        for micro in (shard[n::MICRO_BATCHES] for n in range(min(MICRO_BATCHES, len(shard)))):
            for parameter in model.parameters.values():
                parameter.grad = None
            packed = pack_streams(micro)
            targets = torch.from_numpy(np.concatenate([stream[1:] for stream in micro]).astype(np.int64))
            scale = held(torch.full((1,), 1.0 / sum(map(len, streams))), "loss")
            forward = model.forward(packed, want=torch.arange(len(targets)), targets=targets)
            (-(forward.logprobs.sum() * scale)).sum().backward()
            for name, parameter in model.parameters.items():
                grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                total[name] = held(total[name] + grad, "grad_accumulation") if name in total else held(grad, "grad_accumulation")
        sums.append(total)
    one, two = sums

    def reduced(name: str) -> Tensor:
        return held(held(one[name], "grad_reduce") + held(two[name], "grad_reduce"), "grad_reduce")

    return {name: reduced(name) for name in one}
