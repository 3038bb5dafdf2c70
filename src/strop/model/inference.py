"""Exact inference: rows of many token streams through the kernels.

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
from strop.model.cache import KVCache
from strop.model.config import DecoderConfig
from strop.model.native.bindings import Net, RowArrays


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
        limits = (
            ("token id", tokens, self.config.vocab_size),
            ("position", positions, cache.max_tokens),
            ("slot", slots, cache.slots),
            ("want", wanted, count),
        )
        for name, array, end in limits:
            if len(array) and (int(array.min()) < 0 or int(array.max()) >= end):
                bad = int(np.flatnonzero((array < 0) | (array >= end))[0])
                raise EngineError(f"row {bad}: {name} {int(array[bad])} is outside 0..{end - 1}")
        same = slots[1:] == slots[:-1]
        if np.any(same & (np.diff(positions) != 1)):
            bad = int(np.flatnonzero(same & (np.diff(positions) != 1))[0]) + 1
            raise EngineError(f"row {bad}: position {positions[bad]} of slot {slots[bad]} does not follow {positions[bad - 1]}")
        firsts = np.concatenate([[0], np.flatnonzero(~same) + 1])
        runs = np.bincount(slots[firsts])
        if int(runs.max()) > 1:
            raise EngineError(f"rows of slot {int(runs.argmax())} do not lie together")
        cache.prepare(positions, slots, firsts)
        return RowArrays(tokens, positions, slots, wanted, cache.keys, cache.values, cache.table, cache.num_blocks)

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


__all__ = ["InferOutput", "InferenceModel", "KVCache", "Rows"]
