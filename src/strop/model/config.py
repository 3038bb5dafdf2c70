"""Shape of a Qwen3-MoE decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of the decoder. All counts are per model or per layer, no units.

    Example: ``DecoderConfig(vocab_size=3072, hidden_size=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32,
    num_experts=8, top_k=2, expert_size=128)`` has about 2.9 M parameters.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    norm_topk_prob: bool = True
    tie_embeddings: bool = True
    max_positions: int = 4096

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> DecoderConfig:
        """Read the keys of ``transformers.Qwen3MoeConfig``.

        Raises:
            CheckpointError: If the checkpoint is of another family or uses dense layers.
        """
        if data.get("model_type") != "qwen3_moe":
            raise CheckpointError(f"model_type {data.get('model_type')!r} is not supported by the embedded engine; expected 'qwen3_moe'")
        if data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1:
            raise CheckpointError("mlp_only_layers and decoder_sparse_step != 1 (dense layers) are not supported by the embedded engine")
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        expected = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
        for key, value in expected.items():
            if data.get(key, value) != value:
                raise CheckpointError(f"{key} = {data[key]!r} is not supported by the embedded engine; expected {value!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"rope type {kind!r} is not supported by the embedded engine; expected 'default'")
        return cls(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data["num_key_value_heads"],
            head_dim=data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"],
            num_experts=data["num_experts"] if "num_experts" in data else data["num_local_experts"],
            top_k=data["num_experts_per_tok"],
            expert_size=data["moe_intermediate_size"],
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or data.get("rope_theta") or 10000.0,
            norm_topk_prob=bool(data.get("norm_topk_prob", False)),
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            max_positions=data.get("max_position_embeddings", 32768),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the ``config.json`` that transformers and vLLM load."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "decoder_sparse_step": 1,
            "dtype": "float32",
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": 4 * self.hidden_size,
            "max_position_embeddings": self.max_positions,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_size,
            "norm_topk_prob": self.norm_topk_prob,
            "num_attention_heads": self.num_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "output_router_logits": False,
            "pad_token_id": 0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": self.tie_embeddings,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
