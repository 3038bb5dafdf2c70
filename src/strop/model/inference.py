"""Exact inference: rows of many token streams through the kernels, with a preallocated key-value cache.

What comes out for a row depends on its own stream only, never on the other rows, the chunking, the cache slot or the threads.
numpy at run time; called by the embedded engine.

Shape legend as in ``decoder``: R rows, W wanted rows, L layers, K experts per token, V vocabulary, G key-value heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.core.errors import EngineError
from strop.model.config import DecoderConfig
from strop.model.native.bindings import Net, RowArrays, padded

BLOCK = 16
"""Keys that lie together in the cache."""


def aligned_zeros(count: int) -> np.ndarray:
    """Return ``float32 [count]`` zeros at a multiple of 64 bytes; pages are taken when they are first written."""
    raw = np.zeros(count + BLOCK, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + count]


class KVCache:
    """Keys and values of ``slots`` streams of up to ``max_tokens`` tokens; the caller knows how many are valid.

    Layout: keys ``[L, slots, G, max_tokens/16, C, 16]``, values ``[L, slots, G, max_tokens, C]`` with sizes rounded up to 16.
    """

    def __init__(self, config: DecoderConfig, slots: int, max_tokens: int) -> None:
        if slots < 1 or max_tokens < 1:
            raise EngineError(f"a key-value cache needs at least one slot and one token, got {slots} and {max_tokens}")
        self.slots, self.max_tokens = slots, max_tokens
        span, head = padded(max_tokens), padded(config.head_dim)
        shape = (config.num_layers, slots, config.num_kv_heads, span, head)
        count = int(np.prod(shape))
        self.layer_stride = count // config.num_layers
        self._keys, self._values = aligned_zeros(count), aligned_zeros(count)
        self._key_blocks = self._keys.reshape(*shape[:3], span // BLOCK, head * BLOCK)
        self._value_rows = self._values.reshape(shape)
        self.offset = np.arange(slots, dtype=np.int64) * (config.num_kv_heads * span)
        self.span = np.full(slots, span, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes when every slot is full."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def keys(self) -> np.ndarray:
        """All keys, flat."""
        return self._keys

    @property
    def values(self) -> np.ndarray:
        """All values, flat."""
        return self._values

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        """Give ``dst_slot`` the first ``n`` tokens of ``src_slot``.

        Raises:
            EngineError: A slot or ``n`` outside the cache.
        """
        for name, value, end in (("src_slot", src_slot, self.slots), ("dst_slot", dst_slot, self.slots), ("n", n, self.max_tokens + 1)):
            if not 0 <= value < end:
                raise EngineError(f"copy_prefix: {name} {value} is outside 0..{end - 1}")
        blocks = (n + BLOCK - 1) // BLOCK
        self._key_blocks[:, dst_slot, :, :blocks] = self._key_blocks[:, src_slot, :, :blocks]
        self._value_rows[:, dst_slot, :, :n] = self._value_rows[:, src_slot, :, :n]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one step. Rows of one slot lie together, their positions rise by 1.

    Example: slot 4 prefills positions 0..2 while slot 1 decodes position 17: ``token_ids [9, 8, 7, 5]``,
    ``positions [0, 1, 2, 17]``, ``slots [4, 4, 4, 1]``.

    Attributes:
        token_ids: ``int32 [R]``.
        positions: ``int32 [R]``; positions before a slot's first row must be in the cache already.
        slots: ``int32 [R]``.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class InferOutput:
    """Result of one step.

    Attributes:
        logits: ``float32 [W, V]``.
        expert_ids: ``uint8`` (``uint16`` above 256 experts) ``[R, L, K]``, ascending within a row.
    """

    logits: np.ndarray
    expert_ids: np.ndarray


class InferenceModel:
    """The network for generation. One call at a time; calls release the interpreter lock.

    Args:
        config: Sizes.
        weights: Float32 tensors under Hugging Face names, experts fused.
        threads: CPU threads; 0 means all cores that this process may use.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Any], threads: int = 0) -> None:
        self.config = config
        self._net = Net(config, threads=threads)
        self._id_type = np.uint8 if config.num_experts <= 256 else np.uint16
        self.load(weights)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights; caches keep what older weights computed.

        Raises:
            WeightsError: A tensor is missing, unknown or misshapen; the old weights stay.
        """
        self._net.load(weights)

    def infer(self, rows: Rows, cache: KVCache, want: np.ndarray) -> InferOutput:
        """Feed rows, write their keys and values, and return next-token logits of the rows ``want``.

        Args:
            rows: At least one row.
            cache: Cache that the rows' slots belong to.
            want: ``int32 [W]`` row indices, may be empty.

        Raises:
            EngineError: Rows that don't fit the contract; names the row and the value.
        """
        arrays = self._checked(rows, cache, want)
        logits, chosen = self._net.infer(arrays)
        return InferOutput(logits, chosen.astype(self._id_type))

    def _checked(self, rows: Rows, cache: KVCache, want: np.ndarray) -> RowArrays:
        tokens, positions, slots, wanted = (np.ascontiguousarray(a, np.int32) for a in (rows.token_ids, rows.positions, rows.slots, want))
        count = len(tokens)
        if not count or len(positions) != count or len(slots) != count:
            raise EngineError(f"rows need equal, non-zero lengths, got {count} tokens, {len(positions)} positions, {len(slots)} slots")
        limits = (("token id", tokens, self.config.vocab_size), ("position", positions, cache.max_tokens), ("slot", slots, cache.slots), ("want", wanted, count))
        for name, array, end in limits:
            if len(array) and (int(array.min()) < 0 or int(array.max()) >= end):
                bad = int(np.flatnonzero((array < 0) | (array >= end))[0])
                raise EngineError(f"row {bad}: {name} {int(array[bad])} is outside 0..{end - 1}")
        same = slots[1:] == slots[:-1]
        if np.any(same & (np.diff(positions) != 1)):
            bad = int(np.flatnonzero(same & (np.diff(positions) != 1))[0]) + 1
            raise EngineError(f"row {bad}: position {positions[bad]} of slot {slots[bad]} does not follow {positions[bad - 1]}")
        runs = np.concatenate([slots[:1], slots[1:][~same]])
        if int(np.bincount(runs).max()) > 1:
            raise EngineError(f"rows of slot {int(np.bincount(runs).argmax())} do not lie together")
        return RowArrays(tokens, positions, slots, wanted, cache.keys, cache.values, cache.layer_stride, cache.offset, cache.span)

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw one token a row by inverse cumulative distribution, in ascending id order.

        Args:
            logits: ``float32 [W, V]``, as ``infer`` returns them.
            uniforms: ``float64 [W]`` in ``[0, 1)``.
            temperature: At least 0, one or ``[W]``; 0 takes the largest logit (lowest id among equals).

        Returns:
            ``ids int32 [W]`` and ``logprobs float32 [W]`` at the temperature (at 1 where it is 0). A row with NaN gives id 0 and NaN.
        """
        rows = self._logit_rows(logits)
        draws = np.ascontiguousarray(uniforms, np.float64)
        if draws.shape != (len(rows),) or (len(draws) and not (draws.min() >= 0 and draws.max() < 1)):
            raise EngineError(f"uniforms must be float64 [{len(rows)}] in [0, 1), got shape {draws.shape}")
        return self._net.sample(rows, draws, _temperatures(temperature, len(rows)))

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities of ``targets [W]`` and entropies, ``float32 [W]`` each; the bits of ``sample``."""
        rows = self._logit_rows(logits)
        ids = np.ascontiguousarray(targets, np.int64)
        if ids.shape != (len(rows),) or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size):
            raise EngineError(f"targets must be [{len(rows)}] ids in 0..{self.config.vocab_size - 1}, got {ids.tolist()[:8]}")
        return self._net.score(rows, ids, _temperatures(temperature, len(rows)))

    def _logit_rows(self, logits: np.ndarray) -> np.ndarray:
        if logits.ndim != 2 or logits.shape[1] != self.config.vocab_size:
            raise EngineError(f"logits must be float32 [W, {self.config.vocab_size}], got {list(logits.shape)}")
        if logits.dtype != np.float32 or logits.strides[1] != 4 or logits.strides[0] % 4:
            return np.ascontiguousarray(logits, np.float32)
        return logits


def _temperatures(temperature: float | np.ndarray, count: int) -> np.ndarray:
    values = np.ascontiguousarray(np.broadcast_to(np.asarray(temperature, np.float32), (count,)))
    if count and not values.min() >= 0:
        raise EngineError(f"temperature must be at least 0, got {values.min()}")
    return values
