"""A rollout in emulated low precision: what an engine with 16, 8 or 4 bits would sample, on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.engine.torch_model import TorchModel
from strop.model.config import DecoderConfig
from strop.numerics.precision import Emulation, Precision


class LowPrecisionModel(TorchModel):
    """See ``strop.engine.backend.ModelBackend``.

    Args:
        config: Sizes.
        weights: Under Hugging Face names in memory, in full precision; rounded on every load.
        precision: Number types by operation.
        device: ``"cpu"``, ``"cuda"``, ...
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Any], precision: Precision, *, device: str = "cpu") -> None:
        self._emulation: Emulation | None = None
        super().__init__(config, weights, device=device)
        self._emulation = Emulation(self._decoder, precision)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights, rounded to the precision of their operations. Raises ``WeightsError`` as the base class does."""
        super().load(weights)
        if self._emulation is not None:
            self._emulation.round_weights()
