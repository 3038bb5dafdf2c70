"""Which routers transformers' MoE families have, and how they choose and weigh experts.

Every router module of these families returns ``(logits [R, E], weights [R, K], expert ids [R, K])``. What differs is how weights come from
logits; the rules below give them for any set of experts. DeepSeek-V3's code also runs Kimi-K2.

Shape legend: R rows, E experts, K experts per token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.core.errors import ConfigError, nearest
from strop.core.routes import RouterSpec, Scoring
from strop.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Family:
    """How the routers of one class weigh experts.

    Attributes:
        scoring: Scores from logits.
        normalised: Whether the chosen scores are made to sum to 1, or the attribute of the module that says so.
        scale: Attribute of the module that multiplies the weights, or ``""``.
        bias: Attribute with the bias that takes part in the choice alone, or ``""``.
    """

    scoring: Scoring
    normalised: bool | str
    scale: str = ""
    bias: str = ""


FAMILIES = {
    "Qwen3MoeTopKRouter": Family("softmax", "norm_topk_prob"),
    "MixtralTopKRouter": Family("softmax", True),
    "OlmoeTopKRouter": Family("softmax", "norm_topk_prob"),
    "DeepseekV3TopkRouter": Family("sigmoid", "norm_topk_prob", "routed_scaling_factor", "e_score_correction_bias"),
    "Glm4MoeTopkRouter": Family("sigmoid", "norm_topk_prob", "routed_scaling_factor", "e_score_correction_bias"),
    "GptOssTopKRouter": Family("softmax-topk", True),
}
"""By class name of the router module."""

EXTRA_LAYERS = ("mtp", "nextn")
"""Parts of a module's name that mark multi-token-prediction layers, whose routers aren't the model's."""


@dataclass(frozen=True, slots=True)
class BoundRouter:
    """One router of a model.

    Attributes:
        layer: Global index of its decoder layer.
        name: Its module's name.
        module: The module.
        family: How it weighs.
    """

    layer: int
    name: str
    module: nn.Module
    family: Family

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return int(self.module.num_experts)  # type: ignore[arg-type]

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return int(self.module.top_k)  # type: ignore[arg-type]

    @property
    def normalised(self) -> bool:
        """Whether the weights of the chosen experts sum to 1 (before a scale)."""
        wanted = self.family.normalised
        return wanted if isinstance(wanted, bool) else bool(getattr(self.module, wanted))

    def weights(self, logits: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weights that the router gives to ``expert_ids [R, K]``, from its live ``logits [R, E]``, with gradient.

        Scores are gathered from all logits, so that experts that weren't chosen keep their part in the softmax.
        """
        live = logits.float()
        if self.family.scoring == "softmax-topk":
            return live.gather(1, expert_ids).softmax(-1)
        scores = live.softmax(-1) if self.family.scoring == "softmax" else live.sigmoid()
        chosen = scores.gather(1, expert_ids)
        if self.normalised:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + (1e-20 if self.family.scoring == "sigmoid" else 0.0))
        return chosen * float(getattr(self.module, self.family.scale)) if self.family.scale else chosen

    def preference(self, logits: Tensor) -> Tensor:
        """Return what the router orders experts by, ``[R, E]``: scores with the bias of the choice, groups left out."""
        scores = logits.float().sigmoid() if self.family.scoring == "sigmoid" else logits.float()
        return scores + getattr(self.module, self.family.bias).float() if self.family.bias else scores


def bind_routers(model: nn.Module) -> list[BoundRouter]:
    """Find the routers of a transformers model by their class and their layer's place in the module tree, never by list position.

    Dense layers have none; layers of multi-token prediction, beyond ``num_hidden_layers`` or named so, aren't counted.

    Args:
        model: For example a ``Qwen3MoeForCausalLM``.

    Returns:
        Sorted by layer.

    Raises:
        ConfigError: No router of a known class, two in one layer, or layers of different shape.
    """
    config: Any = getattr(model, "config", None)
    layers = int(getattr(config, "num_hidden_layers", 0)) or None
    found: dict[int, BoundRouter] = {}
    for name, module in model.named_modules():
        family = FAMILIES.get(type(module).__name__)
        layer = _layer_of(name)
        if family is None or layer is None or (layers is not None and layer >= layers) or _is_extra(name):
            continue
        if layer in found:
            raise ConfigError(f"layer {layer} has two routers, {found[layer].name!r} and {name!r}; routes name one for each layer")
        found[layer] = BoundRouter(layer, name, module, family)
    if not found:
        seen = {type(module).__name__ for module in model.modules() if "outer" in type(module).__name__}
        hint = "".join(nearest(name, FAMILIES) for name in sorted(seen)[:1]) or f" Known: {', '.join(FAMILIES)}."
        raise ConfigError(f"{type(model).__name__} has no router of a known family (routers seen: {sorted(seen)}).{hint}")
    routers = [found[layer] for layer in sorted(found)]
    shapes = {(r.experts, r.top_k, r.family.scoring, r.normalised) for r in routers}
    if len(shapes) > 1:
        raise ConfigError(f"routers of {type(model).__name__} differ in shape: {sorted(shapes)}; routes need one shape")
    return routers


def spec_of(routers: list[BoundRouter]) -> RouterSpec:
    """Return what the ids of these routers mean."""
    first = routers[0]
    return RouterSpec(
        layers=tuple(router.layer for router in routers),
        experts=first.experts,
        top_k=first.top_k,
        scoring=first.family.scoring,
        normalised=first.normalised,
        has_bias=bool(first.family.bias),
    )


def router_spec(config: DecoderConfig) -> RouterSpec:
    """Return what the ids of the embedded engine's model mean; equal to that of the same checkpoint in transformers."""
    return RouterSpec(
        layers=tuple(range(config.num_layers)), experts=config.num_experts, top_k=config.top_k, normalised=config.norm_topk_prob
    )


def _layer_of(name: str) -> int | None:
    """Index of the decoder layer that a module's name lies in, ``"model.layers.3.mlp.gate"`` -> 3."""
    for part, after in itertools.pairwise(name.split(".")):
        if part == "layers" and after.isdigit():
            return int(after)
    return None


def _is_extra(name: str) -> bool:
    return any(part.startswith(EXTRA_LAYERS) for part in name.split("."))


def chosen_set(expert_ids: Tensor) -> Tensor:
    """Return expert ids in ascending order, ``[R, K]``: routers give them in an order that means nothing."""
    return torch.sort(expert_ids, dim=-1).values
