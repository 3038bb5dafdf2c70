"""What the routers of one training step did: load, demand, mismatch with the record, choices that replay overrode and their price."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strop.core.errors import NumericsError
from strop.numerics.compare import differing_routes
from strop.rl.pack import MicroBatch
from strop.rl.replay import route_regret

MAX_LOAD_KEYS = 256
"""Above so many layer-expert pairs the load isn't logged key by key; ``RouteStats.load`` has it."""

STARVED_RATIO = 2.0
"""An expert is starved where live routers ask for it more than so many times as often as it works."""


def stacked_logits(forward: Any) -> np.ndarray:
    """Return a pass's router logits as ``float32 [R, L, E]``."""
    return np.stack([layer.detach().float().cpu().numpy() for layer in forward.router_logits], axis=1)


@dataclass(slots=True)
class RouteStats:
    """Sums over the micro-batches of a step.

    Attributes:
        version: The trainer's, for the age of tokens.
        load: ``int64 [L, E]`` routed token choices.
        demand: ``int64 [L, E]`` the live router's choices.
        differing: ``float64 [L]`` rows whose recorded experts differ from the live router's.
        suppressed: ``float64 [L]`` rows whose live choice was overridden by replay.
        by_age: Weight versions since a token was sampled to overridden and all token-layer pairs.
        fresh: Differing and all token-layer pairs of tokens that the trainer's own weights sampled.
        compared: Rows with a record.
        seen: Rows that were held against the record, with or without one.
        rows: Rows of passes that train; those of several updates count several times.
        entropy: Sum over ``seen`` rows of the routing distribution's entropy, mean over layers, in nats.
        regrets: Of recorded routes of rows that the trainer's own weights computed, in router logits; one for each token-layer pair, in no
            particular order.
    """

    version: int = 0
    load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    demand: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    differing: np.ndarray = field(default_factory=lambda: np.zeros(0))
    suppressed: np.ndarray = field(default_factory=lambda: np.zeros(0))
    by_age: dict[int, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(2, np.int64)))
    fresh: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    compared: int = 0
    seen: int = 0
    rows: int = 0
    entropy: float = 0.0
    regrets: list[np.ndarray] = field(default_factory=list)

    def compare(self, micro: MicroBatch, forward: Any) -> None:
        """Hold the record of a micro-batch against a pass with the step's first weights.

        Args:
            micro: With the recorded routes.
            forward: The pass over it: ``natural_ids`` ``int64 [R, L, K]``, ``router_logits`` L of ``[R, E]``.

        Raises:
            NumericsError: The record has another number of layers or experts per token than the model.
        """
        logits = stacked_logits(forward)
        layers = logits.shape[1]
        if not self.seen:
            self.differing = np.zeros(layers)
        self.seen += len(logits)
        shifted = logits - logits.max(-1, keepdims=True)
        weights = np.exp(shifted)
        total = weights.sum(-1)
        self.entropy += float((np.log(total) - (weights * shifted).sum(-1) / total).sum(dtype=np.float64)) / layers
        if micro.routes is None:
            return
        natural = forward.natural_ids.cpu().numpy()
        if micro.routes.shape != natural.shape:
            raise NumericsError(
                f"recorded routes are [rows, layers, top_k] = {micro.routes.shape}, the model's {natural.shape}: another model"
            )
        differs = differing_routes(micro.routes, natural) & micro.routes_valid[:, None]
        self.differing += differs.sum(0)
        self.compared += int(micro.routes_valid.sum())
        fresh = micro.rows[(micro.oldest == self.version) & micro.routes_valid[micro.rows]]
        self.fresh += np.array([differs[fresh].sum(), len(fresh) * layers])
        self._add_regret(micro, differs, logits)

    def train(self, micro: MicroBatch, forward: Any) -> None:
        """Count what a pass that trains did: ``expert_ids`` and ``natural_ids`` ``int64 [R, L, K]``."""
        used, natural = forward.expert_ids.cpu().numpy(), forward.natural_ids.cpu().numpy()
        layers, experts = len(forward.router_logits), forward.router_logits[0].shape[-1]
        if not self.rows:
            self.load, self.demand = np.zeros((layers, experts), np.int64), np.zeros((layers, experts), np.int64)
            self.suppressed = np.zeros(layers)
        for layer in range(layers):
            self.load[layer] += np.bincount(used[:, layer].reshape(-1), minlength=experts)
            self.demand[layer] += np.bincount(natural[:, layer].reshape(-1), minlength=experts)
        overridden = (used != natural).any(-1)
        self.suppressed += overridden.sum(0)
        self.rows += len(used)
        self._add_ages(micro, overridden)

    def _add_ages(self, micro: MicroBatch, overridden: np.ndarray) -> None:
        ages = self.version - micro.versions
        for age in np.unique(ages):
            part = overridden[micro.rows[ages == age]]
            self.by_age[int(age)] += np.array([part.sum(), part.size])

    def _add_regret(self, micro: MicroBatch, differs: np.ndarray, logits: np.ndarray) -> None:
        fresh = (micro.row_oldest == self.version) & micro.routes_valid
        rows, layers = np.nonzero(differs & fresh[:, None])
        assert micro.routes is not None
        recorded = micro.routes[rows, layers]
        if fresh.any() and int(recorded.max(initial=0)) < logits.shape[-1]:
            regrets = np.zeros(int(fresh.sum()) * logits.shape[1], logits.dtype)  # 0 exactly where the set is a live one
            regrets[: len(rows)] = route_regret(logits[rows, layers][:, None], recorded[:, None])[:, 0]
            self.regrets.append(regrets)

    def metrics(self) -> dict[str, float]:
        """Return the ``routes/*`` metrics."""
        if not self.rows:
            return {}
        layers, experts = self.load.shape
        share = self.load / self.load.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        metrics = {
            "routes/entropy_nats": float(entropy.mean()),
            "routes/router_entropy_nats": self.entropy / max(self.seen, 1),
            "routes/load_max": float(share.max() * experts),
            "routes/load_min": float(share.min() * experts),
            "routes/dead_experts": float((self.load == 0).sum()),
            "routes/starved_experts": float((self.demand > STARVED_RATIO * self.load).sum()),
            "routes/suppressed_frac": float(self.suppressed.mean() / self.rows),
            "routes/valid_frac": self.compared / max(self.seen, 1),
        }
        metrics |= {f"routes/suppressed_layer{layer}_frac": float(self.suppressed[layer] / self.rows) for layer in range(layers)}
        metrics |= {f"routes/suppressed_age{age}_frac": float(over / max(pairs, 1)) for age, (over, pairs) in sorted(self.by_age.items())}
        metrics |= {f"routes/entropy_layer{layer}_nats": float(entropy[layer]) for layer in range(layers)}
        if self.load.size <= MAX_LOAD_KEYS:
            for layer in range(layers):
                metrics |= {f"routes/load_layer{layer}_expert{expert}": float(share[layer, expert]) for expert in range(experts)}
        if self.compared:
            mismatch = self.differing / self.compared
            metrics["routes/mismatch_frac"] = float(mismatch.mean())
            metrics |= {f"routes/mismatch_layer{layer}_frac": float(mismatch[layer]) for layer in range(layers)}
        if self.fresh[1]:
            metrics["numerics/route_mismatch_frac"] = float(self.fresh[0] / self.fresh[1])
        if self.regrets:
            regrets = np.concatenate(self.regrets)
            metrics["routes/regret_max"], metrics["routes/regret_p99"] = float(regrets.max()), float(np.quantile(regrets, 0.99))
        return metrics
