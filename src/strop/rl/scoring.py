"""One forward pass of the trained model over a micro-batch: what the trainers need of a model, and how they call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from strop.core.errors import NumericsError
from strop.core.sample import Sample
from strop.model.decoder import PackedTokens, balance_loss
from strop.rl.pack import MicroBatch


class ScoredForward(Protocol):
    """Shape legend: W wanted predictions, R rows, L MoE layers, E experts, K experts per token."""

    @property
    def logprobs(self) -> Tensor:
        """``float32 [W]``, live."""
        ...

    @property
    def entropy(self) -> Tensor:
        """``float32 [W]`` in nats, live."""
        ...

    @property
    def router_logits(self) -> list[Tensor]:
        """L tensors ``float32 [R, E]``, live."""
        ...

    @property
    def expert_ids(self) -> Tensor:
        """``int64 [R, L, K]``, the routes used."""
        ...

    @property
    def natural_ids(self) -> Tensor:
        """``int64 [R, L, K]``, the live router's own choice."""
        ...


class ScoringModel(Protocol):
    """A trainable model; ``strop.model.training.TrainModel`` is the one that ships."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What an optimizer may move, by Hugging Face name."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Detached views of all weights, a tied head included."""
        ...

    def forward(
        self, packed: PackedTokens, *, want: Tensor, targets: Tensor, temperature: float = 1.0, forced_routes: Tensor | None = None
    ) -> ScoredForward:
        """Run all rows and score the rows ``want`` (``int64 [W]``) for ``targets`` (``int64 [W]``), along ``forced_routes`` if given."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """A forward pass and its load-balancing loss (1.0 when balanced, live)."""

    forward: ScoredForward
    balance: Tensor


def score(model: ScoringModel, micro: MicroBatch, *, temperature: float, device: torch.device, routes: np.ndarray | None = None) -> Scores:
    """Run a micro-batch; with ``routes`` (``int64 [R, L, K]``) those experts are used and the router's scores stay live.

    Raises:
        NumericsError: The routes belong to another model, or the model took others.
    """
    forced = None if routes is None else torch.from_numpy(routes).to(device)
    packed = PackedTokens(torch.from_numpy(micro.token_ids).to(device), torch.from_numpy(micro.positions).to(device), micro.lengths)
    want, targets = torch.from_numpy(micro.rows).to(device), torch.from_numpy(micro.targets).to(device)
    forward = model.forward(packed, want=want, targets=targets, temperature=temperature, forced_routes=forced)
    experts = forward.router_logits[0].shape[-1]
    if forced is not None and int(forced.max()) >= experts:
        raise NumericsError(f"recorded routes name expert {int(forced.max())}, the model has {experts}: routes of another model?")
    if forced is not None and not torch.equal(forward.expert_ids, forced):
        raise NumericsError("the model did not take the routes that it was given: replay without effect, or routes of another micro-batch")
    return Scores(forward, balance_loss(forward.router_logits, forward.expert_ids, experts))


def replayable(micro: MicroBatch, max_missing_frac: float = 0.0) -> np.ndarray:
    """Return the recorded routes of a micro-batch, ``int64 [R, M, K]``, after checking that they can be replayed.

    Args:
        micro: The micro-batch.
        max_missing_frac: Share of rows that may lack a record; their routes mean nothing.

    Raises:
        NumericsError: Routes are missing, too many rows have none, or a row names an expert twice or out of order.
    """
    if micro.routes is None:
        raise NumericsError("numerics.replay_routes is on, but the engine returned no routes for some samples of the batch")
    missing = int(np.count_nonzero(~micro.routes_valid))
    if missing > max_missing_frac * len(micro.routes_valid):
        raise NumericsError(
            f"{missing} of {len(micro.routes_valid)} rows that predictions depend on have no recorded routes; "
            f"routes.max_fallback_frac allows {max_missing_frac:g}"
        )
    held = micro.routes[micro.routes_valid]
    if held.shape[-1] > 1 and not (np.diff(held, axis=-1) > 0).all():
        raise NumericsError("recorded routes name an expert twice in a row, or are not ascending: damaged record")
    return micro.routes


def locate(samples: Sequence[Sample], micro: MicroBatch, index: int) -> tuple[Sample, int]:
    """Return the sample and the token position behind prediction ``index`` of a micro-batch."""
    row = int(micro.rows[index])
    for number, length in zip(micro.samples, micro.lengths, strict=True):
        if row < length:
            return samples[number], row + 1
        row -= length
    raise IndexError(f"prediction {index} lies outside the micro-batch")
