"""The Qwen3-MoE decoder over packed rows: one code for training, prefill and decode.

Shape legend: R rows (tokens of all streams, stream after stream), D hidden, H heads, G key-value heads, C head dim,
E experts, K experts per token, F expert width, L layers, V vocabulary, B streams, T longest stream.

Parameter names are those of ``transformers.Qwen3MoeForCausalLM`` in memory (experts fused per layer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Streams laid end to end.

    Example: streams of 3 and 2 tokens give ``token_ids [5]``, ``positions [0, 1, 2, 0, 1]``, ``lengths [3, 2]``.

    Attributes:
        token_ids: ``int64 [R]``.
        positions: ``int64 [R]``.
        lengths: Tokens of each stream, sums to R.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, streams: list[Tensor]) -> PackedTokens:
        """Pack 1-D integer tensors."""
        lengths = tuple(len(s) for s in streams)
        return cls(torch.cat(streams).long(), torch.cat([torch.arange(n) for n in lengths]), lengths)


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward pass leaves behind.

    Attributes:
        hidden: ``[R, D]`` after the last norm.
        router_logits: ``float32 [R, E]`` for each layer, live (with gradient).
        expert_ids: ``int64 [R, L, K]``, ascending within a row.
    """

    hidden: Tensor
    router_logits: list[Tensor]
    expert_ids: Tensor


class RmsNorm(nn.Module):
    """Root-mean-square norm. Source: Zhang and Sennrich, arXiv 1910.07467, eq. 4."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension; the shape stays."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys and rotary positions.

    Args:
        config: Sizes.
        is_wide: See ``attend``.
    """

    def __init__(self, config: DecoderConfig, is_wide: bool = False) -> None:
        super().__init__()
        c = self.config = config
        self.is_wide = is_wide
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        # A gain above 1 lets attention over hundreds of keys become sharp: normed vectors alone cap the logits.
        self.q_norm = RmsNorm(c.head_dim, c.rms_norm_eps, gain=1.6)
        self.k_norm = RmsNorm(c.head_dim, c.rms_norm_eps, gain=1.6)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
        """Attend causally within each stream: ``[R, D] -> [R, D]``; ``rope`` from ``rope_tables``."""
        c = self.config
        q = rotate(self.q_norm(self.q_proj(x).view(-1, c.num_heads, c.head_dim)), rope)
        k = rotate(self.k_norm(self.k_proj(x).view(-1, c.num_kv_heads, c.head_dim)), rope)
        v = self.v_proj(x).view(-1, c.num_kv_heads, c.head_dim)
        out = attend(layout.pad(q), layout.pad(k), layout.pad(v), is_wide=self.is_wide)
        return self.o_proj(layout.unpad(out))


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, is_wide: bool = False) -> Tensor:
    """Grouped-query attention: ``[B, H, T, C]`` queries over ``[B, G, S, C]`` keys and values give ``[B, H, T, C]``.

    Args:
        query: Normed and rotated.
        key: Normed and rotated.
        value: As projected.
        mask: ``bool``, true where a key is seen, broadcast to ``[B, H, T, S]``; ``None`` is causal, with ``T = S``.
        is_wide: Whether scores, softmax and sums are float64 inside. Prefill and decode add the same keys in different orders, and sharp
            attention multiplies that difference: in float32 it is most of what is left between rollout and trainer.
    """
    inputs = (query.double(), key.double(), value.double()) if is_wide else (query, key, value)
    return F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=True).to(query.dtype)


def choose(logits: Tensor, top_k: int) -> Tensor:
    """Return the ids of the ``top_k`` largest logits of each row, ascending; ties go to the lower id (``torch.topk`` leaves them open)."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values


class Router(nn.Module):
    """Chooses experts from float32 logits; ties go to the lower expert id."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``[R, E]``, expert ids ``[R, K]`` ascending, and their weights ``[R, K]`` (live gradient, also when forced)."""
        logits = self.score(x)
        ids = choose(logits, self.config.top_k) if forced is None else forced
        probabilities = logits.softmax(-1).gather(1, ids)
        if self.config.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, ids, probabilities

    def score(self, x: Tensor) -> Tensor:
        """Logits of every expert, float32: ``[R, D] -> [R, E]``."""
        return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """Gated feed-forward experts, weights fused per layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts: rows ``[R, D]``, ``ids`` and ``weights [R, K]`` give ``[R, D]``."""
        rows, top_k = ids.shape
        order = torch.argsort(ids.reshape(-1), stable=True)
        counts = torch.bincount(ids.reshape(-1), minlength=self.gate_up_proj.shape[0]).tolist()
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device=order.device)
        copies = x.unsqueeze(1).expand(-1, top_k, -1).reshape(rows * top_k, -1)
        inputs = _permute(copies, order, slots).split(counts)
        outputs = []
        for part, gate_up, down in zip(inputs, self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=True):
            outputs.append(self.compute(part, gate_up, down))
        per_choice = _permute(torch.cat(outputs), slots, order).view(rows, top_k, -1)
        return (per_choice * weights.to(per_choice.dtype).unsqueeze(-1)).sum(1)

    def compute(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """One expert over the rows that chose it: ``[n, D] -> [n, D]``."""
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)


class SparseMlp(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output ``[R, D]``, live router logits ``[R, E]`` and the expert ids used ``[R, K]``, which are ``forced`` if given."""
        logits, ids, weights = self.gate(x, forced)
        return self.experts(x, ids, weights), logits, ids


class Layer(nn.Module):
    """One pre-norm decoder layer; ``has_wide_attention`` as in ``Decoder``."""

    def __init__(self, config: DecoderConfig, has_wide_attention: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, has_wide_attention)
        self.mlp = SparseMlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Trunk(nn.Module):
    """Embedding, layers and the last norm; ``has_wide_attention`` as in ``Decoder``."""

    def __init__(self, config: DecoderConfig, has_wide_attention: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, has_wide_attention) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A Qwen3-MoE language model over packed rows.

    Args:
        config: Sizes.
        has_wide_attention: Whether attention sums in float64, see ``attend``. Rollout and trainer of tolerant mode do on the CPU; elsewhere
            float64 has no fast kernel.
    """

    def __init__(self, config: DecoderConfig, *, has_wide_attention: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, has_wide_attention)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Draw fresh weights: normal with ``std``, outputs of each block scaled down by ``sqrt(2 L)``, norms untouched."""
        small = std / (2 * self.config.num_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, small if name.endswith(("o_proj.weight", "down_proj")) else std, generator=generator)

    def forward(self, packed: PackedTokens, forced_routes: Tensor | None = None) -> Forward:
        """Run all rows.

        Args:
            packed: The streams.
            forced_routes: ``int64 [R, L, K]`` expert ids to use instead of the router's choice (scores stay live), or ``None``.

        Returns:
            Hidden states, live router logits and the routes used.
        """
        c = self.config
        layout = Layout(packed.lengths)
        rope = rope_tables(packed.positions, c.head_dim, c.rope_theta)
        x = self.model.embed_tokens(packed.token_ids)
        router_logits, expert_ids = [], []
        for index, layer in enumerate(cast("list[Layer]", self.model.layers)):
            x = x + layer.self_attn(layer.input_layernorm(x), rope, layout)
            forced = None if forced_routes is None else forced_routes[:, index]
            out, logits, ids = layer.mlp(layer.post_attention_layernorm(x), forced)
            x = x + out
            router_logits.append(logits)
            expert_ids.append(ids)
        return Forward(self.model.norm(x), router_logits, torch.stack(expert_ids, dim=1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits, float32: ``[N, D] -> [N, V]``."""
        return F.linear(hidden.float(), self.lm_head.weight.float())


class _Permute(torch.autograd.Function):
    """Gather by a permutation; the gradient is a gather by its inverse, not a slow accumulating scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return _Permute.apply(x, order, inverse)  # type: ignore[return-value]


class Layout:
    """Moves between packed rows and padded ``[B, heads, T, C]`` blocks for attention."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.batch, self.longest = len(lengths), max(lengths)
        offsets = torch.arange(self.batch).repeat_interleave(torch.tensor(lengths)) * self.longest
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        self.index = offsets + torch.arange(sum(lengths)) - starts.repeat_interleave(torch.tensor(lengths))
        self.is_full = all(n == self.longest for n in lengths)

    def pad(self, x: Tensor) -> Tensor:
        """``[R, heads, C] -> [B, heads, T, C]``."""
        if not self.is_full:
            padded = x.new_zeros(self.batch * self.longest, *x.shape[1:])
            x = padded.index_copy(0, self.index.to(x.device), x)
        return x.view(self.batch, self.longest, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """``[B, heads, T, C] -> [R, heads * C]``."""
        flat = x.transpose(1, 2).reshape(self.batch * self.longest, -1)
        return flat if self.is_full else flat.index_select(0, self.index.to(x.device))


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, ``float32 [R, C]`` each, in the half-split layout. Source: Su et al., arXiv 2104.09864, eq. 34."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to ``[R, heads, C]``."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def balance_loss(router_logits: list[Tensor], expert_ids: Tensor, num_experts: int) -> Tensor:
    """Load-balancing loss, 1.0 when balanced; live logits, averaged over layers.

    Source: Fedus et al., arXiv 2101.03961, eq. 4-6 (top-k form, divided by K).
    """
    total = router_logits[0].new_zeros(())
    for index, logits in enumerate(router_logits):
        share = torch.bincount(expert_ids[:, index].reshape(-1), minlength=num_experts).float() / expert_ids[:, index].numel()
        total = total + num_experts * (share * logits.softmax(-1).mean(0)).sum()
    return total / len(router_logits)
