"""Router decisions: which experts every token used in every MoE layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Expert ids of one token stream.

    A stream of ``L`` tokens has ``L - 1`` rows: the last token was sampled but never fed to the model.
    Routes are never padded or truncated to fit; a row that is unknown has ``valid = False``.

    Example: 5 tokens, 2 MoE layers, top-2 gives ``expert_ids.shape == (4, 2, 2)`` and ``valid.shape == (4,)``.

    Attributes:
        expert_ids: ``uint8`` (at most 256 experts) or ``uint16``, shape ``[tokens - 1, moe_layers, top_k]``,
            logical expert ids, ascending within a row.
        valid: ``bool``, shape ``[tokens - 1]``.
    """

    expert_ids: np.ndarray
    valid: np.ndarray

    def __post_init__(self) -> None:
        ids, valid = self.expert_ids, self.valid
        if ids.ndim != 3 or ids.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"expert_ids must be uint8 or uint16 [tokens-1, layers, top_k], got {ids.dtype} {ids.shape}")
        if valid.shape != ids.shape[:1] or valid.dtype != np.bool_:
            raise ValueError(f"valid must be bool [{ids.shape[0]}], got {valid.dtype} {valid.shape}")
        ids.flags.writeable = False
        valid.flags.writeable = False

    def __len__(self) -> int:
        return int(self.expert_ids.shape[0])
