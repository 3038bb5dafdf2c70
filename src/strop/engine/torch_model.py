"""A model for the embedded engine on any torch device, built from the trainer's ``Decoder``.

Results agree with other backends within floating-point tolerance, not bit for bit: attention shapes depend on the batch. The exact CPU path
is ``strop.model.inference``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.core.errors import EngineError, WeightsError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, attend, rope_tables, rotate


class TorchCache:
    """Keys and values ``[layers, slots, max_tokens, kv_heads, head_dim]`` on one device.

    Args:
        config: Sizes of the model.
        slots: Streams.
        max_tokens: Capacity of each.
        device: Where they live.
        dtype: Their number type.
    """

    def __init__(
        self, config: DecoderConfig, slots: int, max_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (config.num_layers, slots, max_tokens, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        """Copy the first ``n`` tokens of a slot to another one, all layers."""
        self.keys[:, dst_slot, :n] = self.keys[:, src_slot, :n]
        self.values[:, dst_slot, :n] = self.values[:, src_slot, :n]

    def free(self, slot: int) -> None:
        """Nothing to give back: a slot's place is its own."""


@dataclass(frozen=True, slots=True)
class TorchResult:
    """See ``strop.engine.backend.InferResult``."""

    logits: np.ndarray
    expert_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of one call go: single-row segments together, longer ones one by one."""

    slots: Tensor
    positions: Tensor
    single: Tensor
    mask: Tensor
    longest: int
    longer: tuple[tuple[int, int, int, int], ...]


class TorchModel:
    """See ``strop.engine.backend.ModelBackend``.

    Args:
        config: Sizes.
        weights: Under Hugging Face names in memory.
        device: ``"cpu"``, ``"cuda"``, ...
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Any], *, device: str = "cpu") -> None:
        self.config = config
        self._device = torch.device(device)
        self._decoder = Decoder(config, has_wide_attention=self._device.type == "cpu").to(self._device).requires_grad_(False)
        self.load(weights)

    def make_cache(self, slots: int, max_tokens: int) -> TorchCache:
        """A cache on the model's device."""
        return TorchCache(self.config, slots, max_tokens, self._device)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights; caches stay as they are.

        Raises:
            WeightsError: A tensor is missing, unknown or misshapen; nothing was replaced.
        """
        own = self._decoder.state_dict()
        given = {name: tensor for name, tensor in weights.items() if not (self.config.tie_embeddings and name == "lm_head.weight")}
        expected = [name for name in own if not (self.config.tie_embeddings and name == "lm_head.weight")]
        wrong = sorted(set(expected) ^ set(given)) or [name for name in expected if own[name].shape != given[name].shape]
        if wrong:
            raise WeightsError(f"weights do not fit the model: {wrong[0]!r} is missing, unknown or has another shape")
        for name in expected:
            own[name].copy_(given[name].detach())

    @torch.inference_mode()
    def infer(self, rows: Any, cache: TorchCache, want: np.ndarray) -> TorchResult:
        """Compute ``rows``, extend ``cache``, and return the logits after the rows ``want``.

        Raises:
            EngineError: There are no rows.
        """
        layout = self._layout(rows)
        rope = rope_tables(layout.positions, self.config.head_dim, self.config.rope_theta)
        trunk = self._decoder.model
        x = trunk.embed_tokens(self._tensor(rows.token_ids))
        routes = []
        layers: list[Any] = list(trunk.layers)
        for index, layer in enumerate(layers):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), rope, layout, cache.keys[index], cache.values[index])
            out, _, ids = layer.mlp(layer.post_attention_layernorm(x), None)
            x = x + out
            routes.append(ids)
        logits = self._decoder.logits(trunk.norm(x)[self._tensor(want)])
        kind = np.uint8 if self.config.num_experts <= 256 else np.uint16
        return TorchResult(logits.cpu().numpy(), torch.stack(routes, dim=1).cpu().numpy().astype(kind))

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        """Inverse-CDF sampling in ascending id order: ``(ids int32 [W], logprobs float32 [W])``.

        Temperature 0 is greedy; its log-probabilities are those of temperature 1.
        """
        temperatures = np.broadcast_to(np.asarray(temperature, np.float64), uniforms.shape)
        log_p = _log_softmax(logits, np.where(temperatures > 0, temperatures, 1.0))
        cumulative = np.exp(log_p).cumsum(1)
        drawn = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(1)
        ids = np.where(temperatures > 0, np.minimum(drawn, logits.shape[1] - 1), logits.argmax(1))
        return ids.astype(np.int32), np.take_along_axis(log_p, ids[:, None], 1)[:, 0].astype(np.float32)

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        """``(logprobs float32 [W], entropy float32 [W])`` in float64 arithmetic, as in ``sample``; ``temperature`` is above 0."""
        log_p = _log_softmax(logits, np.broadcast_to(np.asarray(temperature, np.float64), targets.shape))
        entropy = -(np.exp(log_p) * log_p).sum(1)
        return np.take_along_axis(log_p, targets[:, None].astype(np.int64), 1)[:, 0].astype(np.float32), entropy.astype(np.float32)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).long().to(self._device)

    def _layout(self, rows: Any) -> _Layout:
        slots, positions, count = rows.slots, rows.positions, len(rows.slots)
        if not count:
            raise EngineError("infer needs at least one row")
        starts = np.flatnonzero(np.r_[True, (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)])
        ends = np.r_[starts[1:], count]
        single = starts[ends - starts == 1]
        longer = tuple((int(a), int(b), int(slots[a]), int(positions[a])) for a, b in zip(starts, ends, strict=True) if b - a > 1)
        longest = int(positions[single].max()) + 1 if len(single) else 0
        mask = torch.from_numpy(np.arange(longest)[None] <= positions[single][:, None]).to(self._device)
        return _Layout(self._tensor(slots), self._tensor(positions), self._tensor(single), mask, longest, longer)

    def _attend(self, attention: Any, x: Tensor, rope: tuple[Tensor, Tensor], layout: _Layout, keys: Tensor, values: Tensor) -> Tensor:
        c = self.config
        q = rotate(attention.q_norm(attention.q_proj(x).view(-1, c.num_heads, c.head_dim)), rope)
        keys[layout.slots, layout.positions] = rotate(attention.k_norm(attention.k_proj(x).view(-1, c.num_kv_heads, c.head_dim)), rope)
        values[layout.slots, layout.positions] = attention.v_proj(x).view(-1, c.num_kv_heads, c.head_dim)
        out = torch.empty_like(q)
        if len(layout.single):
            slots = layout.slots[layout.single]
            k, v = (t[slots, : layout.longest].transpose(1, 2) for t in (keys, values))
            mask = layout.mask[:, None, None]
            out[layout.single] = attend(q[layout.single][:, :, None], k, v, mask=mask, is_wide=attention.is_wide)[:, :, 0]
        for start, end, slot, position in layout.longer:
            total = position + end - start
            k, v = (t[slot, :total].transpose(0, 1)[None] for t in (keys, values))
            mask = torch.ones(end - start, total, dtype=torch.bool, device=x.device).tril(position)
            query = q[start:end].transpose(0, 1)[None]
            out[start:end] = attend(query, k, v, mask=mask, is_wide=attention.is_wide)[0].transpose(0, 1)
        return attention.o_proj(out.reshape(len(x), -1))


def _log_softmax(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperatures[:, None]
    scaled -= scaled.max(1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
