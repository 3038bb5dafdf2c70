"""Which experts a training pass uses: the live router's, the rollout's, or a mixture of both, by mode.

    off            live routes; the record isn't looked at
    verify         live routes; the record is compared with them
    r2             routes of the weights before the first of several updates on a batch
    r3             the rollout's routes
    fragile-only   the rollout's routes where the live choice is a near-tie, live ones elsewhere
    plausible      the rollout's routes, less experts whose live score is implausibly low; the router's next candidates take their place
    auto           verify, r2 or r3, by ``choose_mode``

``plausible`` reads live scores off a pass along the record, so that what it gives up in one layer is seen by later layers' scores only in
the pass that trains.

The choice is a constant; scores, gate weights and auxiliary losses stay live in every mode. Rows without a record take the live router's
choice and are counted. Reference weights and evaluation never come here.

Shape legend: R rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.errors import NumericsError
from strop.core.random import generator
from strop.core.sample import Sample
from strop.rl.pack import MicroBatch
from strop.rl.scoring import ScoringModel, replayable, score

REPLAYED = frozenset({"r3", "fragile-only", "plausible"})
"""Modes that need the rollout's routes."""

SWITCH_K3_NATS = 1e-3
"""``auto`` goes over to r3 above this measured k3. Source: NeMo-RL calls k3 acceptable below it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode and why."""

    mode: str
    reason: str


def choose_mode(numerics: NumericsConfig, rl: RlConfig, *, k3_nats: float = 0.0) -> Choice:
    """Return the mode of a run; ``auto`` follows published evidence.

    Source: arXiv 2512.01374: with one update per rollout r3 lowers the mismatch and gains nothing, with two r2 beats r3, with four and
    more r3 beats r2; r3 wherever rollout and trainer compute differently.

    Args:
        numerics: With ``replay_routes`` and the rollout's precision.
        rl: With ``updates_per_batch`` and ``max_staleness``.
        k3_nats: Mismatch measured so far.

    Example: ``updates_per_batch = 2`` and exact numerics give ``Choice("r2", "2 updates between sampling and training ...")``.
    """
    if numerics.replay_routes != "auto":
        return Choice(numerics.replay_routes, "numerics.replay_routes says so")
    updates = rl.updates_per_batch * (1 + rl.max_staleness)
    if numerics.rollout_precision != "fp32":
        return Choice("r3", f"the rollout computes in {numerics.rollout_precision}, the trainer in fp32")
    if k3_nats > SWITCH_K3_NATS:
        return Choice("r3", f"measured k3 {k3_nats:.2g} nats is above {SWITCH_K3_NATS:g}")
    count = f"{updates} updates between sampling and training (rl.updates_per_batch x (1 + rl.max_staleness))"
    if updates == 1:
        return Choice("verify", "every token is trained by the weights that sampled it: replay would gain nothing")
    if updates == 2 and rl.max_staleness == 0:
        return Choice("r2", f"{count}: the routes before the first update are enough")
    return Choice("r3", f"{count}: the routes of the rollout hold the ratio together")


class PassLedger:
    """Sees to it that every sample of a pass is used exactly once.

    Args:
        samples: Indices of the samples that the pass must use.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._left = set(samples)
        self._all = frozenset(samples)

    def take(self, samples: Sequence[int]) -> None:
        """Use some.

        Raises:
            NumericsError: One was used before, or doesn't belong to the pass.
        """
        for sample in samples:
            if sample not in self._left:
                what = "twice in one pass" if sample in self._all else "in a pass that it isn't part of"
                raise NumericsError(f"the routes of sample {sample} were used {what}")
            self._left.discard(sample)

    def close(self) -> None:
        """End the pass.

        Raises:
            NumericsError: Some sample wasn't used.
        """
        if self._left:
            raise NumericsError(f"the routes of {len(self._left)} samples were never used, first sample {min(self._left)}")


@dataclass(slots=True)
class ReplayCounts:
    """What one step replayed.

    Attributes:
        rows: Rows that got routes.
        fallback: Rows without a record, which took the live router's choice.
        pairs: Row-layer pairs of those with a record.
        replaced: Recorded experts that ``plausible`` gave up.
        recorded: Recorded experts that it looked at.
        kept_live: Row-layer pairs that ``fragile-only`` left to the live router.
        natural_samples: Samples on live routes because of ``routes.dropout``.
        samples: All samples.
    """

    rows: int = 0
    fallback: int = 0
    pairs: int = 0
    replaced: int = 0
    recorded: int = 0
    kept_live: int = 0
    natural_samples: int = 0
    samples: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the ``routes/*`` metrics; nothing where nothing was replayed."""
        if not self.rows:
            return {}
        return {
            "routes/fallback_rows": float(self.fallback),
            "routes/replaced_frac": self.replaced / max(self.recorded, 1),
            "routes/kept_live_frac": self.kept_live / max(self.pairs, 1),
            "routes/dropout_frac": self.natural_samples / max(self.samples, 1),
        }


class Replay:
    """Gives every training pass of a run its routes.

    State: the mode (``auto`` may go over to r3) and, within a step, the routes kept for r2.

    Args:
        numerics: Section ``numerics``.
        routes: Section ``routes``.
        rl: Section ``rl``.
        device: Of the model.
    """

    def __init__(self, numerics: NumericsConfig, routes: RoutesConfig, rl: RlConfig, device: torch.device) -> None:
        self.numerics, self.settings, self.rl, self.device = numerics, routes, rl, device
        self.choice = choose_mode(numerics, rl)
        self.counts = ReplayCounts()
        self._kept: dict[int, np.ndarray] = {}

    @property
    def mode(self) -> str:
        """The mode in force."""
        return self.choice.mode

    def begin(self) -> None:
        """Forget the last step."""
        self.counts = ReplayCounts()
        self._kept.clear()

    def learn(self, k3_nats: float) -> None:
        """Let ``auto`` react to the measured mismatch; it never goes back."""
        if self.numerics.replay_routes == "auto" and k3_nats > SWITCH_K3_NATS and self.mode != "r3":
            self.choice = choose_mode(self.numerics, self.rl, k3_nats=k3_nats)

    def state(self) -> dict[str, str]:
        """Return what the next step depends on."""
        return {"mode": self.choice.mode, "reason": self.choice.reason}

    def load_state(self, state: Mapping[str, str]) -> None:
        """Inverse of ``state``; a mode that the configuration names stays."""
        if self.numerics.replay_routes == "auto":
            self.choice = Choice(state["mode"], state["reason"])

    def keep(self, part: Sequence[Sample], micro: MicroBatch, expert_ids: np.ndarray) -> None:
        """Remember the routes of the anchor pass for r2; samples live as long as the step, so that their identity names them."""
        if self.mode == "r2":
            cuts = np.cumsum(micro.lengths)[:-1]
            self._kept.update((id(part[index]), ids) for index, ids in zip(micro.samples, np.split(expert_ids, cuts), strict=True))

    def routes(self, model: ScoringModel, part: Sequence[Sample], micro: MicroBatch) -> np.ndarray | None:
        """Return the routes of one pass over a micro-batch, ``int64 [R, L, K]``, or ``None`` for live ones.

        Args:
            model: Asked for its live choice where a mode needs it; gradients are untouched.
            part: The samples that the micro-batch was packed from.
            micro: The micro-batch.

        Raises:
            NumericsError: The record is missing, incomplete beyond ``routes.max_fallback_frac``, or no router's.
        """
        if self.mode == "r2":
            kept = [self._kept.get(id(part[index])) for index in micro.samples]
            found = [ids for ids in kept if ids is not None]
            return np.concatenate(found) if len(found) == len(kept) else None
        if self.mode not in REPLAYED:
            return None
        recorded = replayable(micro, self.settings.max_fallback_frac)
        natural = self._dropped(part, micro)
        held = micro.routes_valid & ~natural
        self.counts.rows += len(held)
        self.counts.fallback += int((~micro.routes_valid).sum())
        if self.mode == "r3" and held.all():
            return recorded
        live = self._look(model, micro, None)
        mixed = np.where(held[:, None, None], recorded, live.natural_ids.cpu().numpy())
        self.counts.pairs += int(held.sum()) * mixed.shape[1]
        if self.mode == "fragile-only":
            return self._fragile(mixed, live, held)
        if self.mode == "plausible":
            return self._plausible(model, micro, mixed, held)
        return mixed

    def _dropped(self, part: Sequence[Sample], micro: MicroBatch) -> np.ndarray:
        """Rows of the samples that ``routes.dropout`` leaves on live routes; ``bool [R]``, a function of the episode's key alone."""
        keys = [part[index].key for index in micro.samples]
        chosen = np.array([self.settings.dropout > 0 and generator("replay-dropout", key).random() < self.settings.dropout for key in keys])
        self.counts.samples += len(keys)
        self.counts.natural_samples += int(chosen.sum())
        return np.repeat(chosen, micro.lengths)

    @torch.no_grad()
    def _look(self, model: ScoringModel, micro: MicroBatch, routes: np.ndarray | None) -> Any:
        return score(model, micro, temperature=self.rl.temperature, device=self.device, routes=routes).forward

    def _fragile(self, mixed: np.ndarray, live: Any, held: np.ndarray) -> np.ndarray:
        logits = np.stack([layer.detach().float().cpu().numpy() for layer in live.router_logits], axis=1)
        margin = route_margins(logits, mixed.shape[-1])
        firm = held[:, None] & (margin >= self.settings.fragile_margin)
        self.counts.kept_live += int(firm.sum())
        return np.where(firm[..., None], live.natural_ids.cpu().numpy(), mixed)

    def _plausible(self, model: ScoringModel, micro: MicroBatch, mixed: np.ndarray, held: np.ndarray) -> np.ndarray:
        live = self._look(model, micro, mixed)
        logits = np.stack([layer.detach().float().cpu().numpy() for layer in live.router_logits], axis=1)
        filtered, given_up = plausible_routes(mixed, logits, self.settings.plausible_gap)
        self.counts.recorded += int(held.sum()) * mixed.shape[1] * mixed.shape[2]
        self.counts.replaced += int(given_up[held].sum())
        return np.where(held[:, None, None], filtered, mixed)


def route_margins(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Return the K-th largest logit less the next one, ``[R, L, E] -> [R, L]``; infinite where every expert is chosen."""
    if top_k >= logits.shape[-1]:
        return np.full(logits.shape[:2], np.inf, logits.dtype)
    parted = -np.partition(-logits, (top_k - 1, top_k), axis=-1)
    return parted[..., top_k - 1] - parted[..., top_k]


def route_regret(logits: np.ndarray, expert_ids: np.ndarray) -> np.ndarray:
    """Return how much the worst chosen expert lies below the live choice: K-th largest logit less the lowest chosen one, at least 0.

    Args:
        logits: ``[R, L, E]``, the live router's.
        expert_ids: ``[R, L, K]``.

    Returns:
        ``[R, L]``; 0 exactly where the set is a live one.
    """
    top_k = expert_ids.shape[-1]
    kth = -np.partition(-logits, top_k - 1, axis=-1)[..., top_k - 1]
    return np.maximum(kth - np.take_along_axis(logits, expert_ids, -1).min(-1), 0.0)


def plausible_routes(expert_ids: np.ndarray, logits: np.ndarray, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Give up replayed experts that the live router finds implausible, and take its best other candidates instead.

    An expert stays if its live logit is at least the live K-th largest less ``gap``. With ``gap = 0`` the result is the live choice,
    with an infinite one the record. Source: the filter that the Composer 2 report describes in section 6.2 (its threshold isn't
    published).

    Args:
        expert_ids: ``int64 [R, L, K]``, ascending.
        logits: ``[R, L, E]``, live.
        gap: At least 0, in logits.

    Returns:
        Routes ``int64 [R, L, K]``, ascending, and the number given up, ``int64 [R, L]``.
    """
    top_k = expert_ids.shape[-1]
    kth = -np.partition(-logits, top_k - 1, axis=-1)[..., top_k - 1]
    stays = np.take_along_axis(logits, expert_ids, -1) >= (kth - gap)[..., None]
    # Whoever stays goes first, then the live router's order; the sort is stable, so ties go to the lower id.
    priority = np.zeros(logits.shape, np.bool_)
    np.put_along_axis(priority, expert_ids, stays, -1)
    order = np.lexsort((-logits, ~priority), axis=-1)[..., :top_k]
    return np.sort(order, -1).astype(np.int64), (~stays).sum(-1)
