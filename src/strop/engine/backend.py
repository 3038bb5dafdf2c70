"""What the embedded engine needs from a model: rows in, next-token logits and routes out.

``strop.model.inference`` (exact, CPU) and ``strop.engine.torch_model`` (any torch device) provide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from strop.model.config import DecoderConfig


class Cache(Protocol):
    """Keys and values of ``slots`` streams of at most ``max_tokens`` tokens. The engine keeps the lengths."""

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        """Copy the first ``n`` tokens, all layers."""
        ...

    def free(self, slot: int) -> None:
        """Nobody will read what the slot holds. Called between two model calls; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one model call; those of a slot are contiguous with ascending positions.

    Attributes:
        token_ids: ``int32 [R]``.
        positions: ``int32 [R]``.
        slots: ``int32 [R]``.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray


class InferResult(Protocol):
    """Answer of one model call: ``logits float32 [W, V]`` and ``expert_ids uint8 or uint16 [R, L, K]``, ascending within a row."""

    @property
    def logits(self) -> np.ndarray:
        """``float32 [W, V]`` after the wanted rows, in their order."""
        ...

    @property
    def expert_ids(self) -> np.ndarray:
        """``uint8`` or ``uint16 [R, L, K]`` of all rows."""
        ...


class ModelBackend(Protocol):
    """One call at a time; calls may come from a worker thread."""

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model."""
        ...

    def load(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights; caches stay as they are."""
        ...

    def infer(self, rows: Any, cache: Any, want: np.ndarray) -> InferResult:
        """Compute ``rows``, extend ``cache``, and return the logits after the rows ``want`` (``int32 [W]``, may be empty)."""
        ...

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        """Inverse-CDF sampling in ascending id order: ``(ids int32 [W], logprobs float32 [W])``; temperature 0 is greedy."""
        ...

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        """``(logprobs float32 [W], entropy float32 [W])`` by the same arithmetic as ``sample``."""
        ...


def default_cache(model: ModelBackend) -> Callable[[int, int], Cache]:
    """The cache of ``strop.model.inference`` for the sizes of ``model``, as a function of slots and tokens."""
    from strop.model.inference import KVCache

    return lambda slots, max_tokens: KVCache(model.config, slots, max_tokens)
