"""Names and shapes of the weights: Hugging Face's in memory against the kernels' short ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.core.errors import WeightsError, nearest
from strop.model.config import DecoderConfig


def weight_names(config: DecoderConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each name in memory to its short name and shape; ``lm_head.weight`` only where it isn't tied."""
    c = config
    d, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    table: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("embed", (c.vocab_size, d))}
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        table |= {
            prefix + "self_attn.q_proj.weight": (f"{i}.q", (q, d)),
            prefix + "self_attn.k_proj.weight": (f"{i}.k", (kv, d)),
            prefix + "self_attn.v_proj.weight": (f"{i}.v", (kv, d)),
            prefix + "self_attn.o_proj.weight": (f"{i}.o", (d, q)),
            prefix + "self_attn.q_norm.weight": (f"{i}.q_norm", (c.head_dim,)),
            prefix + "self_attn.k_norm.weight": (f"{i}.k_norm", (c.head_dim,)),
            prefix + "mlp.gate.weight": (f"{i}.router", (c.num_experts, d)),
            prefix + "mlp.experts.gate_up_proj": (f"{i}.gate_up", (c.num_experts, 2 * c.expert_size, d)),
            prefix + "mlp.experts.down_proj": (f"{i}.down", (c.num_experts, d, c.expert_size)),
            prefix + "input_layernorm.weight": (f"{i}.input_norm", (d,)),
            prefix + "post_attention_layernorm.weight": (f"{i}.post_norm", (d,)),
        }
    table["model.norm.weight"] = ("norm", (d,))
    if not c.tie_embeddings:
        table["lm_head.weight"] = ("head", (c.vocab_size, d))
    return table


def as_float32(tensor: Any) -> np.ndarray:
    """Return a contiguous float32 array on the CPU; no copy where the tensor is one already."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor, dtype=np.float32)
    return tensor.detach().to("cpu").float().contiguous().numpy()


def raw_arrays(config: DecoderConfig, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights as float32 arrays by short name.

    Raises:
        WeightsError: A tensor is missing, unknown or misshapen, or a tied head differs from the embedding.
    """
    table = weight_names(config)
    arrays = {}
    for name, (short, shape) in table.items():
        if name not in weights:
            raise WeightsError(f"weight {name!r} {list(shape)} is missing.{nearest(name, set(weights) - set(table))}")
        if tuple(weights[name].shape) != shape:
            raise WeightsError(f"weight {name!r} has shape {list(weights[name].shape)}, expected {list(shape)}")
        arrays[short] = as_float32(weights[name])
    extra = sorted(set(weights) - set(table))
    if config.tie_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        head, embed = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        if head is not embed and not np.array_equal(as_float32(head), arrays["embed"], equal_nan=True):
            raise WeightsError("lm_head.weight differs from model.embed_tokens.weight although the configuration ties them")
    if extra:
        raise WeightsError(f"weight {extra[0]!r} is unknown.{nearest(extra[0], table)}")
    return arrays
