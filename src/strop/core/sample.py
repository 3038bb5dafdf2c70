"""What trains: samples, a batch of them, and the update they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strop.core.episode import EpisodeKey, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trace with its credit.

    Attributes:
        key: The episode it comes from.
        trace: Tokens, mask, the generator's log-probabilities, versions and routes.
        advantage: ``float32 [L]``, 0 where ``trace.loss_mask`` is 0. For supervised phases this is the loss weight.
    """

    key: EpisodeKey
    trace: Trace
    advantage: np.ndarray

    def __post_init__(self) -> None:
        if self.advantage.shape != (len(self.trace),) or self.advantage.dtype != np.float32:
            raise ValueError(f"Sample.advantage must be float32 [{len(self.trace)}], got {self.advantage.dtype} {self.advantage.shape}")
        if np.any(self.advantage[~self.trace.loss_mask] != 0):
            raise ValueError("Sample.advantage must be 0 on tokens that the policy did not sample")
        self.advantage.flags.writeable = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples of one optimizer step.

    Attributes:
        step: Optimizer step.
        samples: In a fixed order (sorted by key), so that reductions are reproducible.
        normaliser: Constant that divides the summed loss (Dr.GRPO: episodes times a constant length, never the batch's own length).
    """

    step: int
    samples: tuple[Sample, ...]
    normaliser: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Result of one optimizer step.

    Attributes:
        policy_version: Version of the new weights.
        metrics: Values by metric key.
        weights_digest: Hex digest over every parameter after the step.
    """

    policy_version: int
    metrics: Mapping[str, float]
    weights_digest: str
