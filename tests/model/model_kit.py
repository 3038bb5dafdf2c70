"""Small random models, streams, and a float64 reference written apart from the code under test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from strop.model.config import DecoderConfig
from strop.model.decoder import PackedTokens
from strop.model.inference import InferenceModel, KVCache, Rows
from strop.model.native.weights import weight_names

SMALL = DecoderConfig(
    vocab_size=101,
    hidden_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=6,
    top_k=2,
    expert_size=24,
)


@st.composite
def configs(draw: Any) -> DecoderConfig:
    """Shapes whose every size may miss the kernels' lanes and tiles."""
    experts = draw(st.integers(4, 60))
    kv_heads = draw(st.integers(1, 3))
    return DecoderConfig(
        vocab_size=draw(st.integers(17, 150)),
        hidden_size=draw(st.integers(8, 80)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 20, 32, 64])),
        num_experts=experts,
        top_k=draw(st.integers(1, min(8, experts))),
        expert_size=draw(st.integers(8, 50)),
        norm_topk_prob=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


def random_weights(config: DecoderConfig, seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Weights that keep activations near 1 and make routing and attention uneven."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (_, shape) in weight_names(config).items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.3 * values
        else:
            weights[name] = values * (scale if "embed" in name else scale / shape[-1] ** 0.5)
    return weights


def random_streams(config: DecoderConfig, lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    """Token streams of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]


def packed(streams: list[np.ndarray]) -> PackedTokens:
    """The streams as the trainer takes them."""
    return PackedTokens.of([torch.from_numpy(s) for s in streams])


def rows_of(parts: list[tuple[int, int, np.ndarray]]) -> Rows:
    """Rows of ``(slot, first position, tokens)`` parts."""
    return Rows(
        np.concatenate([tokens for _, _, tokens in parts]).astype(np.int32),
        np.concatenate([np.arange(first, first + len(tokens)) for _, first, tokens in parts]).astype(np.int32),
        np.concatenate([np.full(len(tokens), slot) for slot, _, tokens in parts]).astype(np.int32),
    )


def alone(model: InferenceModel, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and routes of one stream in one pass, with nothing else in the batch."""
    cache = KVCache(model.config, 1, len(stream))
    out = model.infer(rows_of([(0, 0, stream)]), cache, np.arange(len(stream)))
    return out.logits, out.expert_ids


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality of every bit (NaN equals itself, -0 differs from 0)."""
    return a.shape == b.shape and a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def reference(
    config: DecoderConfig, weights: dict[str, Tensor], stream: Tensor, forced: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[T, V]``, router logits ``[L, T, E]`` and routes ``[T, L, K]`` of one stream, straight from the equations.

    Computes in the weights' own type; give float64.
    """
    c, kind = config, weights["model.norm.weight"].dtype
    positions = torch.arange(len(stream), dtype=torch.float32)
    frequencies = (1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)).float()
    angles = (positions[:, None] * frequencies).to(kind).repeat(1, 2)[:, None]
    future = torch.ones(len(stream), len(stream), dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weights[name]

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    x = weights["model.embed_tokens.weight"][stream]
    router_logits, routes = [], []
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{p}self_attn.{n}_proj.weight"].T).view(len(stream), heads, c.head_dim)
            for n, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads))
        )
        q, k = rotated(norm(q, p + "self_attn.q_norm.weight")), rotated(norm(k, p + "self_attn.k_norm.weight"))
        k, v = (t.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / c.head_dim**0.5
        attention = torch.einsum("hqk,khc->qhc", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        x = x + attention.reshape(len(stream), -1) @ weights[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        logits = h @ weights[p + "mlp.gate.weight"].T
        ids = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, : c.top_k].sort(dim=-1).values
        ids = ids if forced is None else forced[:, i]
        share = logits.softmax(-1).gather(1, ids)
        share = share / share.sum(-1, keepdim=True) if c.norm_topk_prob else share
        gate, up = torch.einsum("td,tkfd->tkf", h, weights[p + "mlp.experts.gate_up_proj"][ids]).chunk(2, dim=-1)
        down = torch.einsum("tkf,tkdf->tkd", torch.nn.functional.silu(gate) * up, weights[p + "mlp.experts.down_proj"][ids])
        x = x + (down * share[..., None]).sum(1)
        router_logits.append(logits)
        routes.append(ids)
    head = weights["model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T, torch.stack(router_logits), torch.stack(routes, dim=1)
