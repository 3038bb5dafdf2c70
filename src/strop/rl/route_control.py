"""Everything the policy trainer does about routes, in one place: replay, its checks and its price, churn, the anchor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.errors import NumericsError
from strop.core.routes import RouterSpec
from strop.core.sample import Sample
from strop.numerics.compare import differing_routes
from strop.rl.anchor import RouteAnchor
from strop.rl.pack import MicroBatch
from strop.rl.replay import REPLAYED, PassLedger, Replay
from strop.rl.route_check import check_live, check_overlap, check_trace, regret_limit
from strop.rl.route_probe import RouteProbe, route_tax
from strop.rl.route_stats import RouteStats, stacked_logits
from strop.rl.scoring import ScoringModel, score

LOG = logging.getLogger("strop.routes")


class RouteControl:
    """Routes of a run's training steps.

    State: the replay mode, the probe, and within a step its counts.

    Args:
        numerics: Section ``numerics``.
        routes: Section ``routes``.
        rl: Section ``rl``.
        device: Of the model.
        router: What ids of the model's routes mean, or ``None`` where nobody says.
        anchor: Record of another run, or ``None``.
    """

    def __init__(
        self,
        numerics: NumericsConfig,
        routes: RoutesConfig,
        rl: RlConfig,
        device: torch.device,
        router: RouterSpec | None = None,
        anchor: RouteAnchor | None = None,
    ) -> None:
        self.numerics, self.settings, self.router = numerics, routes, router
        self.replay = Replay(numerics, routes, rl, device)
        self.probe = RouteProbe(routes.probe_rows)
        self.anchor = anchor
        self.device = device
        self.stats = RouteStats()
        self._tax: list[float] = []
        self._pulls: list[tuple[float, float, int]] = []
        self._found: list[str] = []
        self._origins = [0, 0]

    def begin(self, version: int) -> None:
        """Start a step with weights of ``version``."""
        self.replay.begin()
        self.stats = RouteStats(version=version)
        self._tax, self._pulls, self._found, self._origins = [], [], [], [0, 0]

    def ledger(self, micros: Sequence[MicroBatch]) -> PassLedger:
        """Return the ledger of one pass over ``micros``."""
        return PassLedger([index for micro in micros for index in micro.samples])

    def admit(self, samples: Sequence[Sample]) -> None:
        """Hold the routes of a step's samples against what their engine said, before anything is computed with them.

        Raises:
            NumericsError: Routes of another router, of other tokens, of other weights than the stream says, or changed on the way.
        """
        if self.replay.mode == "off":
            return
        for sample in samples:
            routes = sample.trace.routes
            if routes is None:
                self._note("missing: the engine returned no routes", f"episode {sample.key}")
                continue
            self._origins[0] += len(routes) if routes.origin is not None else 0
            self._origins[1] += len(routes)
            if found := check_trace(sample.trace, self.router):
                raise NumericsError(f"routes of episode {sample.key} are refused: {'; '.join(found)}; no weight was changed")

    def compare(self, model: ScoringModel, part: Sequence[Sample], micro: MicroBatch, forward: Any, *, is_anchor_pass: bool) -> None:
        """Hold the record against a pass of the step's first weights.

        Args:
            model: Asked for a pass along the record where ``forward`` was on other routes and differs too much.
            part: The samples that the micro-batch was packed from.
            micro: The micro-batch.
            forward: The pass.
            is_anchor_pass: Whether it is the one before the first of several updates.

        Raises:
            NumericsError: Replayed routes lie beyond ``routes.max_regret``, or are as good as random.
        """
        self.stats.compare(micro, forward)
        if self.numerics.mode != "off" and self.replay.mode != "off" and micro.routes is not None:
            found = self._judge(model, micro, forward)
            if found and self.replay.mode in REPLAYED:
                raise NumericsError(f"recorded routes are refused: {'; '.join(found)}: damaged or foreign record, no weight was changed")
            for text in found:
                self._note(text, "a micro-batch")
        if is_anchor_pass:
            self.replay.keep(part, micro, forward.expert_ids.cpu().numpy())

    def _judge(self, model: ScoringModel, micro: MicroBatch, forward: Any) -> list[str]:
        """What the live router finds wrong with the record of a micro-batch."""
        record = micro.routes
        assert record is not None
        natural = forward.natural_ids.cpu().numpy()
        fresh = micro.routes_valid & (micro.row_oldest == self.stats.version)
        if self.numerics.mode == "exact":
            rows = int((differing_routes(record, natural).any(1) & fresh).sum())
            found = [f"recorded routes differ from the trainer's in {rows} rows that these very weights computed"] if rows else []
        else:
            logits = stacked_logits(forward)
            limit = regret_limit(self.settings, self.numerics, logits)
            found = check_live(record, fresh, logits, max_regret=limit, max_invalid_frac=1.0)
            held = np.where(micro.routes_valid[:, None, None], record, natural)
            if found and not np.array_equal(forward.expert_ids.cpu().numpy(), held):
                # An honest flip in one layer moves the next ones; along the record it doesn't.
                with torch.no_grad():
                    along = score(model, micro, temperature=self.replay.rl.temperature, device=self.device, routes=held).forward
                found = check_live(record, fresh, stacked_logits(along), max_regret=limit, max_invalid_frac=1.0)
        stale = micro.routes_valid & ~fresh
        if not stale.any():
            return found
        cuts = np.cumsum(micro.lengths)[:-1]
        parts = zip(*(np.split(array, cuts) for array in (record, natural, stale)), strict=True)
        experts = forward.router_logits[0].shape[-1]
        return found + [text for ids, live, old in parts for text in check_overlap(ids[old], live[old], experts)]

    def judge(self) -> None:
        """Say what was found about a record that isn't replayed; it trains nothing, so that only exact mode stops.

        Raises:
            NumericsError: In exact mode, recorded routes differ.
        """
        damage = [text for text in self._found if text.startswith("recorded")]
        if damage and self.numerics.mode == "exact":
            raise NumericsError(f"log-probabilities agree, but {damage[0]}: damaged record; no weight was changed")
        for text in dict.fromkeys(self._found):
            LOG.warning("routes: %s", text)

    def _note(self, text: str, where: str) -> None:
        self._found.append(f"{text} ({where})")

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
        if self.replay.mode != "off":
            metrics["routes/warnings"] = float(len(self._found))
            metrics["routes/origin_frac"] = self._origins[0] / max(self._origins[1], 1)
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
