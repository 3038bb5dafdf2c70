"""Finding the operation that went wrong: every operation of the decoder alone, on the inputs that it had.

``record`` keeps the inputs and the result of every operation of one forward pass. ``localise`` computes each of them again with a decoder
that is trusted, on the recorded inputs, so that an early fault doesn't make everything after it look wrong. ``diagnose`` says whether the
fault is transient, sits in the weights, or is there every time.

Source: comparing intermediate tensors with a trusted run: TTrace (arXiv 2506.09280); re-run to tell transient from persistent faults:
Megatron-LM's rerun state machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.core.errors import CheckpointError, NumericsError
from strop.model.decoder import Decoder, Layer, Layout, PackedTokens, rope_tables, rotate
from strop.numerics.digest import tensor_digest

Kind = Literal["none", "transient", "weights", "persistent", "software-or-data"]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a pass: what it read and what it made."""

    inputs: tuple[Tensor, ...]
    output: Tensor


Trace = dict[str, Step]
"""Operations by name in the order of the pass, for example ``layers.2.self_attn.q_proj``, ``layers.2.attention``, ``head``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The first operation beyond its limit.

    Attributes:
        operation: Its name, ``""`` if none is.
        layer: Its layer, -1 for the embedding, the number of layers for the last norm and the head.
        distance: Relative L2 distance to the trusted result.
        limit: What was allowed.
        kind: ``transient``: the suspect itself gets another result when it tries again; ``weights``: its weights differ; ``persistent``:
            same weights, same inputs, another result every time; ``software-or-data``: every operation agrees, so what came in differs.
        detail: The tensor whose weights differ, or ``""``.
    """

    operation: str = ""
    layer: int = -1
    distance: float = 0.0
    limit: float = 0.0
    kind: Kind = "none"
    detail: str = ""

    def text(self) -> str:
        """One sentence."""
        if not self.operation:
            return "every operation agrees on the inputs that it had" + (f": {self.kind}" if self.kind != "none" else "")
        more = f", {self.detail}" if self.detail else ""
        return f"{self.operation} is off by {self.distance:.3g} (relative L2, limit {self.limit:.3g}): {self.kind}{more}"


@torch.no_grad()
def record(decoder: Decoder, packed: PackedTokens) -> Trace:
    """Run a pass and keep every operation's inputs and result (copies, on the CPU)."""
    trace: Trace = {}
    read: dict[str, tuple[Tensor, ...]] = {}
    handles = []

    def before(name: str) -> Any:
        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            read[name] = tuple(_copy(x) for x in inputs if isinstance(x, Tensor))

        return keep

    def after(name: str) -> Any:
        def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            trace[name] = Step(read[name], _copy(output[0] if isinstance(output, tuple) else output))

        return keep

    for name, module in _modules(decoder).items():
        # Inputs are taken before anything else that hangs on the module can touch them.
        handles.append(module.register_forward_pre_hook(before(name), prepend=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        hidden = decoder(packed).hidden
    finally:
        for handle in handles:
            handle.remove()
    count = decoder.config.num_layers
    for index in range(count):
        at = f"layers.{index}."
        parts = tuple(trace[f"{at}self_attn.{name}"].output for name in ("q_norm", "k_norm", "v_proj"))
        trace[f"{at}attention"] = Step(parts, trace[f"{at}self_attn.o_proj"].inputs[0])
        # The residual stream has no module: it is what the norms read.
        start, middle = (trace[f"{at}{name}"].inputs[0] for name in ("input_layernorm", "post_attention_layernorm"))
        end = trace[f"layers.{index + 1}.input_layernorm" if index + 1 < count else "norm"].inputs[0]
        trace[f"{at}attention_residual"] = Step((start, trace[f"{at}self_attn.o_proj"].output), middle)
        trace[f"{at}mlp_residual"] = Step((middle, trace[f"{at}mlp.experts"].output), end)
    trace["head"] = Step((_copy(hidden),), _copy(decoder.logits(hidden)))
    return {name: trace[name] for name in operations(count)}


def operations(num_layers: int) -> list[str]:
    """Names of all operations in the order of the pass."""
    names = ["embed_tokens"]
    for index in range(num_layers):
        at = f"layers.{index}."
        names.append(f"{at}input_layernorm")
        names += [f"{at}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
        names += [f"{at}attention", f"{at}self_attn.o_proj", f"{at}attention_residual", f"{at}post_attention_layernorm"]
        names += [f"{at}mlp.gate", f"{at}mlp.experts", f"{at}mlp_residual"]
    return [*names, "norm", "head"]


@torch.no_grad()
def compute(decoder: Decoder, name: str, inputs: Sequence[Tensor], packed: PackedTokens) -> Tensor:
    """Compute one operation alone.

    Raises:
        NumericsError: Unknown operation.
    """
    own = [x.clone() for x in inputs]  # an emulated residual norm rounds its input in place
    if name == "head":
        return decoder.logits(own[0])
    if name.endswith("_residual"):
        return own[0] + own[1]
    if name.endswith(".attention"):
        return _attention(decoder, own, packed)
    module = _modules(decoder).get(name)
    if module is None:
        raise NumericsError(f"operation {name!r} is not one of this decoder's")
    output = module(own[0], None) if name.endswith(".mlp.gate") else module(*own)
    return output[0] if isinstance(output, tuple) else output


def localise(trace: Mapping[str, Step], trusted: Decoder, packed: PackedTokens, limits: Mapping[str, float] | None = None) -> Finding:
    """Return the first operation of a recorded pass whose result a trusted decoder doesn't get from the same inputs.

    Args:
        trace: The suspect's pass.
        trusted: A decoder with the certified weights.
        packed: The tokens of the pass.
        limits: Largest relative distance by operation (``calibrate``); by default equal bits are asked for, which holds inside a class.
    """
    for name, step in trace.items():
        distance = relative_distance(compute(trusted, name, step.inputs, packed), step.output)
        limit = (limits or {}).get(name, 0.0)
        if not distance <= limit:
            return Finding(operation=name, layer=_layer_of(name, trusted.config.num_layers), distance=distance, limit=limit)
    return Finding()


def diagnose(
    trace: Mapping[str, Step], suspect: Decoder, trusted: Decoder, packed: PackedTokens, limits: Mapping[str, float] | None = None
) -> Finding:
    """Localise, then tell what kind of fault it is by letting the suspect do the operation again.

    Args:
        trace: The suspect's pass.
        suspect: The decoder that recorded it, on the same device and with its own weights.
        trusted: A decoder with the certified weights.
        packed: The tokens that the pass should have been about.
        limits: See ``localise``.
    """
    found = localise(trace, trusted, packed, limits)
    if not found.operation:
        first = trace["embed_tokens"].inputs[0]
        is_same = torch.equal(first.cpu(), packed.token_ids.cpu())
        return Finding(kind="none" if is_same else "software-or-data")
    step = trace[found.operation]
    again = compute(suspect, found.operation, step.inputs, packed)
    kind, detail = cast(Kind, "persistent"), ""
    if not torch.equal(again.cpu(), step.output.cpu()):
        kind = "transient"
    elif odd := _odd_weight(found.operation, suspect, trusted):
        kind, detail = "weights", odd
    return Finding(operation=found.operation, layer=found.layer, distance=found.distance, limit=found.limit, kind=kind, detail=detail)


def relative_distance(one: Tensor, two: Tensor) -> float:
    """Return ``|one - two| / |two|`` in float64; 0 only for equal bits up to the sign of zero, infinity where one isn't finite."""
    if one.shape != two.shape:
        return float("inf")
    a, b = one.double().cpu(), two.double().cpu()
    if torch.equal(a, b):
        return 0.0
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        return float("inf")
    scale = float(b.norm())
    return float((a - b).norm()) / (scale if scale > 0 else 1.0)


def save_trace(path: str | Path, trace: Mapping[str, Step], packed: PackedTokens) -> None:
    """Write a trace as ``.npz``: plain arrays, nothing that executes when read."""
    arrays: dict[str, Any] = {"names": np.array(json.dumps(list(trace))), "lengths": np.array(packed.lengths, np.int64)}
    arrays["tokens"] = packed.token_ids.cpu().numpy()
    for name, step in trace.items():
        arrays |= {f"{name}|{number}": x.cpu().numpy() for number, x in enumerate(step.inputs)}
        arrays[f"{name}|out"] = step.output.cpu().numpy()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        np.savez(file, **arrays)


def load_trace(path: str | Path) -> tuple[Trace, PackedTokens]:
    """Inverse of ``save_trace``.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: torch.from_numpy(data[name]) for name in data.files if name != "names"}
            names = json.loads(str(data["names"]))
        trace: Trace = {}
        for name in names:
            count = sum(key.startswith(f"{name}|") for key in arrays) - 1
            trace[name] = Step(tuple(arrays[f"{name}|{number}"] for number in range(count)), arrays[f"{name}|out"])
        lengths = tuple(int(n) for n in arrays["lengths"])
        positions = torch.cat([torch.arange(n) for n in lengths])
        return trace, PackedTokens(arrays["tokens"].long(), positions, lengths)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"trace {path} can't be read: {error}") from None


def _modules(decoder: Decoder) -> dict[str, nn.Module]:
    trunk = decoder.model
    found: dict[str, nn.Module] = {"embed_tokens": trunk.embed_tokens, "norm": trunk.norm}
    for index, item in enumerate(trunk.layers):
        layer = cast(Layer, item)
        for name in operations(1)[1:-2]:
            short = name.removeprefix("layers.0.")
            if short != "attention" and not short.endswith("_residual"):
                found[f"layers.{index}.{short}"] = layer.get_submodule(short)
    return found


def _attention(decoder: Decoder, inputs: Sequence[Tensor], packed: PackedTokens) -> Tensor:
    c, layout = decoder.config, Layout(packed.lengths)
    rope = rope_tables(packed.positions, c.head_dim, c.rope_theta)
    q, k = rotate(inputs[0], rope), rotate(inputs[1], rope)
    v = inputs[2].view(-1, c.num_kv_heads, c.head_dim)
    return layout.unpad(F.scaled_dot_product_attention(layout.pad(q), layout.pad(k), layout.pad(v), is_causal=True, enable_gqa=True))


def _layer_of(name: str, num_layers: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if name == "embed_tokens" else num_layers


def _odd_weight(name: str, suspect: Decoder, trusted: Decoder) -> str:
    """The first weight of an operation that differs between two decoders, ``""`` if none does."""
    if name.endswith((".attention", "_residual")):
        return ""
    if name == "head":
        pairs = [("lm_head.weight", suspect.lm_head.weight, trusted.lm_head.weight)]
    else:
        mine, theirs = _modules(suspect)[name], dict(_modules(trusted)[name].named_parameters())
        pairs = [(f"model.{name}.{key}", value, theirs[key]) for key, value in mine.named_parameters()]
    return next((key for key, one, two in pairs if tensor_digest(one) != tensor_digest(two)), "")


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
