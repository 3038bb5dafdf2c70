"""What the routers of one training step did: load, mismatch with the record, choices that replay overrode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from strop.numerics.compare import compare_routes
from strop.rl.pack import MicroBatch

MAX_LOAD_KEYS = 256
"""Above so many layer-expert pairs the load isn't logged key by key; ``RouteStats.load`` has it."""


@dataclass(slots=True)
class RouteStats:
    """Sums over the micro-batches of a step.

    Attributes:
        load: ``int64 [L, E]`` routed token choices.
        differing: ``float64 [L]`` rows whose recorded experts differ from the live router's.
        suppressed: ``float64 [L]`` rows whose live choice was overridden by replay.
        compared: Rows with a record.
        rows: All rows.
    """

    load: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    differing: np.ndarray = field(default_factory=lambda: np.zeros(0))
    suppressed: np.ndarray = field(default_factory=lambda: np.zeros(0))
    compared: int = 0
    rows: int = 0

    def add(self, micro: MicroBatch, used: np.ndarray, natural: np.ndarray, experts: int) -> None:
        """Count one micro-batch.

        Args:
            micro: With the recorded routes.
            used: ``int64 [R, L, K]`` experts that computed.
            natural: ``int64 [R, L, K]`` the live router's choice.
            experts: Experts of a layer.
        """
        layers = used.shape[1]
        if not self.rows:
            self.load = np.zeros((layers, experts), np.int64)
            self.differing, self.suppressed = np.zeros(layers), np.zeros(layers)
        for layer in range(layers):
            self.load[layer] += np.bincount(used[:, layer].reshape(-1), minlength=experts)
        self.suppressed += (used != natural).any(-1).sum(0)
        self.rows += len(used)
        if micro.routes is not None:
            valid = int(micro.routes_valid.sum())
            self.differing += compare_routes(micro.routes, natural, micro.routes_valid) * valid
            self.compared += valid

    def metrics(self) -> dict[str, float]:
        """Return the ``routes/*`` metrics."""
        if not self.rows:
            return {}
        layers, experts = self.load.shape
        share = self.load / self.load.sum(1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        metrics = {
            "routes/entropy_nats": float(entropy.mean()),
            "routes/load_max": float(share.max() * experts),
            "routes/load_min": float(share.min() * experts),
            "routes/dead_experts": float((self.load == 0).sum()),
            "routes/suppressed_frac": float(self.suppressed.mean() / self.rows),
            "routes/valid_frac": self.compared / self.rows,
        }
        metrics |= {f"routes/entropy_layer{layer}_nats": float(entropy[layer]) for layer in range(layers)}
        if self.load.size <= MAX_LOAD_KEYS:
            for layer in range(layers):
                metrics |= {f"routes/load_layer{layer}_expert{expert}": float(share[layer, expert]) for expert in range(experts)}
        if self.compared:
            mismatch = self.differing / self.compared
            metrics["routes/mismatch_frac"] = metrics["numerics/route_mismatch_frac"] = float(mismatch.mean())
            metrics |= {f"routes/mismatch_layer{layer}_frac": float(mismatch[layer]) for layer in range(layers)}
        return metrics
