"""Everything the policy trainer does about routes, in one place: replay, its checks and its price, churn, the anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.errors import NumericsError
from strop.core.sample import Sample
from strop.rl.anchor import RouteAnchor
from strop.rl.pack import MicroBatch
from strop.rl.replay import REPLAYED, PassLedger, Replay
from strop.rl.route_probe import RouteProbe, route_tax
from strop.rl.route_stats import RouteStats
from strop.rl.scoring import ScoringModel


class RouteControl:
    """Routes of a run's training steps.

    State: the replay mode, the probe, and within a step its counts.

    Args:
        numerics: Section ``numerics``.
        routes: Section ``routes``.
        rl: Section ``rl``.
        device: Of the model.
        anchor: Record of another run, or ``None``.
    """

    def __init__(
        self, numerics: NumericsConfig, routes: RoutesConfig, rl: RlConfig, device: torch.device, anchor: RouteAnchor | None = None
    ) -> None:
        self.numerics, self.settings = numerics, routes
        self.replay = Replay(numerics, routes, rl, device)
        self.probe = RouteProbe(routes.probe_rows)
        self.anchor = anchor
        self.device = device
        self.stats = RouteStats()
        self._tax: list[float] = []
        self._pulls: list[tuple[float, float, int]] = []

    def begin(self, version: int) -> None:
        """Start a step with weights of ``version``."""
        self.replay.begin()
        self.stats = RouteStats(version=version)
        self._tax, self._pulls = [], []

    def ledger(self, micros: Sequence[MicroBatch]) -> PassLedger:
        """Return the ledger of one pass over ``micros``."""
        return PassLedger([index for micro in micros for index in micro.samples])

    def compare(self, part: Sequence[Sample], micro: MicroBatch, forward: Any, *, is_anchor_pass: bool) -> None:
        """Hold the record against a pass of the step's first weights.

        Raises:
            NumericsError: Replayed routes of tokens that these weights sampled lie beyond ``routes.max_regret``.
        """
        regret = self.stats.compare(micro, forward)
        if self.numerics.mode != "off" and self.replay.mode in REPLAYED and regret > self.settings.max_regret:
            raise NumericsError(
                f"recorded routes lie {regret:.3g} router logits below the live choice of the weights that made them; "
                f"routes.max_regret allows {self.settings.max_regret:g}: damaged or foreign record, no weight was changed"
            )
        if is_anchor_pass:
            self.replay.keep(part, micro, forward.expert_ids.cpu().numpy())

    def pull(self, micro: MicroBatch, forward: Any, step: int) -> Tensor | None:
        """Return the anchor's loss of a micro-batch with its weight, a mean over rows, or ``None``; counts the pass."""
        self.stats.train(micro, forward)
        if self.anchor is None or not self.anchor.weight(step):
            return None
        found = self.anchor.pull(micro, forward)
        self._pulls.append((float(found.nats.detach()), found.agreement, len(micro.token_ids)))
        return found.nats * self.anchor.weight(step)

    def measure_tax(self, model: ScoringModel, part: Sequence[Sample]) -> None:
        """Measure the price of replay, if anything was suppressed; counts of the step are untouched."""
        if self.replay.mode in REPLAYED or (self.replay.mode == "r2" and self.stats.suppressed.any()):
            counts, self.replay.counts = self.replay.counts, type(self.replay.counts)()
            tax = route_tax(model, part, self.replay, frac=self.settings.tax_frac) if self.stats.suppressed.any() else 0.0
            self.replay.counts = counts
            if tax is not None:
                self._tax.append(tax)

    def finish(self, model: ScoringModel, samples: Sequence[Sample], k3_nats: float, step: int) -> dict[str, float]:
        """Return the ``routes/*`` metrics of a finished step.

        Args:
            model: With the weights after the step.
            samples: All of the step.
            k3_nats: Measured mismatch, for mode ``auto``.
            step: The step.
        """
        metrics = self.stats.metrics() | self.replay.counts.metrics() | self.probe.measure(model, samples, self.device)
        if self._tax:
            metrics["routes/tax_nats"] = float(np.mean(self._tax))
        if self.anchor is not None:
            metrics["routes/anchor_weight"] = self.anchor.weight(step)
        if self._pulls:
            nats, agreement, rows = (np.array(column, np.float64) for column in zip(*self._pulls, strict=True))
            metrics["routes/anchor_nats"] = float((nats * rows).sum() / rows.sum())
            metrics["routes/anchor_agree_frac"] = float((agreement * rows).sum() / rows.sum())
        self.replay.learn(k3_nats)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what later steps depend on."""
        return {"replay": self.replay.state(), "probe": self.probe.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self.replay.load_state(state["replay"])
        self.probe.load_state(state["probe"])
