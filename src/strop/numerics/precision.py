"""The precision policy: one table that says in which number type and in which order every operation computes, and its emulation.

``emulate`` makes a torch ``Decoder`` compute as an engine of another precision would: operands and results are rounded to the formats,
products accumulate in float32. It works on any machine, so that the effect of a low-precision rollout on RL can be studied anywhere.
For inference only: the residual stream is rounded in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.core.config import SENSITIVE_OPS, NumericsConfig
from strop.core.errors import ConfigError, nearest
from strop.model.decoder import Decoder, Experts, Layer
from strop.numerics.formats import FORMATS, OUTPUT, ScaleName, round_to


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One line of the table.

    Attributes:
        dtype: Number type of operands and result; sums inside are float32 or wider.
        order: The order in which the exact kernels sum.
        trained: Whether it is a step of training alone (it can't differ between rollout and trainer).
        why: What goes wrong in lower precision.
    """

    dtype: str = "fp32"
    order: str = "none"
    trained: bool = False
    why: str = ""


K_UP = "ascending k, fused multiply-add"
TREE = "16 partial sums, then a tree"

POLICY: dict[str, Rule] = {
    "embed_tokens": Rule(why="the head's weights where tied"),
    "residual": Rule(order="layer after layer", why="16-bit residuals lose what late layers add"),
    "norm": Rule(order=TREE, why="16-bit accumulation on one side alone shifts every token of every layer"),
    "rope": Rule(order="tables in float64, rounded once", why="a cast table moves every position alike"),
    "projection": Rule(order=K_UP, why="most of the products, so most of the noise"),
    "attention": Rule(
        order="keys ascending, softmax in two passes", why="prefill and decode must add alike: the same order, or (tolerant, CPU) float64"
    ),
    "router": Rule(order=K_UP, why="near-ties flip experts: a router in 16 bits alone shifts routes"),
    "experts": Rule(order=K_UP + "; experts ascending", why="combining in another order changes the last bits"),
    "lm_head": Rule(order=K_UP, why="MiniMax-M1: correlation 0.987 to 0.997 by an fp32 head"),
    "log_softmax": Rule(order=TREE, why="cancellation at likely tokens"),
    "loss": Rule(order="micro-batches in order", trained=True, why="sums over thousands of tokens"),
    "grad_accumulation": Rule(order="micro-batches in order", trained=True, why="small gradients vanish beside large sums"),
    "grad_reduce": Rule(dtype="fp64", order="64-bit integers, any order", trained=True, why="float sums depend on the order of ranks"),
    "master_weights": Rule(trained=True, why="an update below half a unit in the last place is lost"),
    "moments": Rule(trained=True, why="squares underflow in fp16 and lose steps in bf16"),
}
"""Source: which operations pay for float32: MiniMax-M1 (arXiv 2506.13585) for the head, Megatron-LM's ``moe_router_dtype`` for the router,
slime and TorchTitan for equal types on both sides. ``strop numerics price`` measures each line."""

FORWARD_OPS = tuple(name for name, rule in POLICY.items() if not rule.trained and name not in ("rope", "log_softmax"))
"""Operations that ``emulate`` can compute in another type."""
SCALED = frozenset({"int8", "mxfp8", "nvfp4"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number types of one side, by operation, and how scaled types take their scales."""

    dtypes: Mapping[str, str]
    scale: ScaleName = "token"

    @classmethod
    def of(cls, kind: str, *, scale: ScaleName = "token", keep: Sequence[str] = SENSITIVE_OPS, overrides: Sequence[str] = ()) -> Precision:
        """Return the policy of an engine in ``kind``: the lines that pay for float32 keep it, the others don't.

        Scaled types hold the projections and experts; everything else is bf16 then, as such engines do. TF32 is for products only.
        On the shipped base replay leaves a k3 of 2.4e-4 between a rollout that is bf16 throughout and a float32 trainer, and 1.0e-4 with
        the default of ``keep``: the head rounds large logits, the stream what late layers add, the norms both, the router flips experts.

        Args:
            kind: One of ``formats.FORMATS``.
            scale: See ``formats.round_to``.
            keep: Operations that stay float32.
            overrides: ``"router=fp32"``; later ones win, also over ``keep``.

        Raises:
            ConfigError: Unknown type or operation; names the nearest.
        """
        _check_format(kind, "numerics.rollout_precision")
        products = ("projection", "experts", "router", "lm_head")
        if kind in SCALED:
            dtypes = {name: kind if name in ("projection", "experts") else "bf16" for name in FORWARD_OPS}
        else:
            dtypes = {name: kind if kind != "tf32" or name in products else "fp32" for name in FORWARD_OPS}
        for override in (*(f"{name}=fp32" for name in keep), *overrides):
            name, _, value = (part.strip() for part in override.partition("="))
            if name not in FORWARD_OPS:
                raise ConfigError(f"numerics.precision: operation {name!r} in {override!r}.{nearest(name, FORWARD_OPS)}")
            _check_format(value, f"numerics.precision: {override!r}")
            dtypes[name] = value
        return cls(dtypes=dtypes, scale=scale)

    @classmethod
    def of_config(cls, config: NumericsConfig) -> Precision:
        """Return the rollout's policy of a configuration."""
        return cls.of(config.rollout_precision, scale=config.rollout_scale, keep=config.rollout_keep, overrides=config.precision)

    @property
    def is_plain(self) -> bool:
        """Whether everything is float32."""
        return all(kind == "fp32" for kind in self.dtypes.values())


def _check_format(kind: str, where: str) -> None:
    if kind not in FORMATS:
        raise ConfigError(f"{where}: number type {kind!r}.{nearest(kind, FORMATS)}")


class Emulation:
    """A decoder made to compute in another precision.

    Args:
        decoder: Changed: its weights are rounded, and its modules round what goes in and out.
        precision: Number types by operation.
        layers: Layers to change; by default all. Embedding, last norm and head belong to no layer and are changed with all layers only.
    """

    def __init__(self, decoder: Decoder, precision: Precision, layers: Sequence[int] | None = None) -> None:
        self.decoder, self.precision = decoder, precision
        self.layers = list(range(decoder.config.num_layers)) if layers is None else list(layers)
        self.is_whole = layers is None
        self.handles: list[Any] = []
        self._attach()
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the weights again, after new ones were loaded."""
        for index in self.layers:
            layer = cast(Layer, self.decoder.model.layers[index])
            for name, op in _LAYER_WEIGHTS:
                weight = cast(Tensor, layer.get_parameter(name))
                weight.copy_(self.round(weight, op, is_weight=True))
        if self.is_whole:
            head = self.decoder.lm_head.weight
            self._head = self.round(head, "lm_head", is_weight=True).clone()
            final = self.decoder.model.norm.weight
            final.copy_(self.round(final, "norm", is_weight=True))
            table = self.decoder.model.embed_tokens.weight
            table.copy_(self.round(table, "embed_tokens", is_weight=True))

    def round(self, x: Tensor, op: str, *, is_weight: bool = False) -> Tensor:
        """Round operands of an operation. int8 is for weights only: activations are bf16 then."""
        kind = self.precision.dtypes[op]
        return round_to(x, "bf16" if kind == "int8" and not is_weight else kind, self.precision.scale)

    def result(self, x: Tensor, op: str) -> Tensor:
        """Round the result of an operation."""
        kind = self.precision.dtypes[op]
        return round_to(x, OUTPUT.get(kind, "fp32"))

    def remove(self) -> None:
        """Take the roundings off again; rounded weights stay rounded."""
        for handle in self.handles:
            handle.remove()
        for index in self.layers:
            mlp = cast(Layer, self.decoder.model.layers[index]).mlp
            mlp.gate.__dict__.pop("score", None)
            mlp.experts.__dict__.pop("compute", None)
        self.decoder.__dict__.pop("logits", None)

    def _attach(self) -> None:
        for index in self.layers:
            layer = cast(Layer, self.decoder.model.layers[index])
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                self._residual_norm(norm)
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self._around(getattr(attention, name), "projection")
            self._after(attention.v_proj, lambda x: self.round(x, "attention"))
            for norm in (attention.q_norm, attention.k_norm):
                self._around(norm, "norm")
                self._after(norm, lambda x: self.round(x, "attention"))
            # Attention's own result is what its output projection reads.
            self._before(attention.o_proj, lambda x: self.result(x, "attention"), first=True)
            layer.mlp.gate.score = partial(self._score, layer.mlp.gate)  # type: ignore[method-assign]
            layer.mlp.experts.compute = partial(self._expert, layer.mlp.experts)  # type: ignore[method-assign]
        if self.is_whole:
            self._after(self.decoder.model.embed_tokens, lambda x: self.result(x, "embed_tokens"))
            self._residual_norm(self.decoder.model.norm)
            self.decoder.logits = self._logits  # type: ignore[method-assign]

    def _residual_norm(self, norm: nn.Module) -> None:
        # The residual stream has no module of its own: it is rounded where it is read, in place, so that it stays rounded.
        def stream(x: Tensor) -> Tensor:
            return x.copy_(self.result(x, "residual"))

        self._before(norm, stream)
        self._around(norm, "norm")

    def _around(self, module: nn.Module, op: str) -> None:
        self._before(module, lambda x: self.round(x, op))
        self._after(module, lambda x: self.result(x, op))

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor], *, first: bool = False) -> None:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return change(inputs[0]), *inputs[1:]

        self.handles.append(module.register_forward_pre_hook(hook, prepend=first))

    def _after(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return change(output)

        self.handles.append(module.register_forward_hook(hook))

    def _score(self, gate: Any, x: Tensor) -> Tensor:
        return self.result(F.linear(self.round(x, "router").float(), gate.weight.float()), "router")

    def _expert(self, _: Experts, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = self.result(F.linear(self.round(x, "experts"), gate_up), "experts").chunk(2, dim=-1)
        inner = self.round(self.result(F.silu(gate) * up, "experts"), "experts")
        return self.result(F.linear(inner, down), "experts")

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.result(F.linear(self.round(hidden, "lm_head").float(), self._head.float()), "lm_head")


_LAYER_WEIGHTS = (
    *((f"self_attn.{name}_proj.weight", "projection") for name in "qkvo"),
    *((f"{name}.weight", "norm") for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")),
    ("mlp.gate.weight", "router"),
    ("mlp.experts.gate_up_proj", "experts"),
    ("mlp.experts.down_proj", "experts"),
)


def policy_markdown() -> str:
    """Return the table for the documentation."""
    lines = ["| operation | type | order of its sums | why |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {rule.dtype} | {rule.order} | {rule.why} |" for name, rule in POLICY.items()]
    return "\n".join(lines) + "\n"
