"""Tiny random instances of the real transformers classes, one of each family of routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}

FAMILY_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    ),
    "qwen3-moe-dense-layer": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "mlp_only_layers": [1]},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"moe_intermediate_size": 16, "routed_scaling_factor": 2.5, **GROUPS, **MLA},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {"moe_intermediate_size": 16, "head_dim": 8, "routed_scaling_factor": 1.5, "norm_topk_prob": True, **GROUPS},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "head_dim": 8, "sliding_window": 16},
    ),
}
"""Name -> configuration class, model class, sizes."""

SPARSE_LAYERS = {"qwen3-moe-dense-layer": (0, 2), "deepseek-v3": (1, 2), "glm4-moe": (1, 2)}
"""Global indices of the MoE layers, where some are dense."""


def tiny(family: str, seed: int = 0) -> nn.Module:
    """A random instance in eval mode, its routers far from ties, its choice biased where the family has a bias."""
    import transformers

    config_class, model_class, sizes = FAMILY_SETTINGS[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(COMMON | sizes))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped product takes no float64, which finite differences need
    model = getattr(transformers, model_class)(config).eval()
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = 0.6 if name.endswith(("gate.weight", "router.weight")) else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.2)
    return model


def tokens(rows: int = 24, streams: int = 2, seed: int = 3) -> torch.Tensor:
    """Random ids, ``[streams, rows]``."""
    return torch.randint(3, 64, (streams, rows), generator=torch.Generator().manual_seed(seed))
