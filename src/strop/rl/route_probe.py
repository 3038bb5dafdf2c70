"""What a step did to the routers: churn and lock-in on fixed tokens, and the price of replay on a few episodes.

Shape legend: P probe rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from strop.core.random import key_of
from strop.core.sample import Sample
from strop.model.decoder import PackedTokens
from strop.rl.pack import num_rows, pack
from strop.rl.replay import Replay
from strop.rl.scoring import ScoringModel, score

LOCK_STEPS = 8
"""A route that so many steps left alone counts as locked."""


class RouteProbe:
    """Live routes of fixed tokens, step after step.

    State: the tokens (the beginning of the first trained stream that the probe meets), their routes at the first and the last step, and
    the steps since each route last changed.

    Args:
        rows: Most tokens; 0 measures nothing.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.token_ids = np.zeros(0, np.int64)
        self.first: np.ndarray | None = None
        self.last: np.ndarray | None = None
        self.age = np.zeros((0, 0), np.int64)

    def measure(self, model: ScoringModel, samples: Sequence[Sample], device: torch.device) -> dict[str, float]:
        """Return the ``routes/*`` metrics of a step; empty at the first one.

        Args:
            model: With the weights after the step.
            samples: Of the step; the probe takes its tokens from the first ones that it sees.
            device: Of the model.
        """
        if not self.rows:
            return {}
        if not len(self.token_ids):
            longest = max(samples, key=num_rows)
            self.token_ids = longest.trace.token_ids[: min(self.rows, num_rows(longest))].astype(np.int64)
        packed = PackedTokens.of([torch.from_numpy(self.token_ids)])
        moved = PackedTokens(packed.token_ids.to(device), packed.positions.to(device), packed.lengths)
        last = torch.tensor([len(self.token_ids) - 1], device=device)
        with torch.no_grad():
            now = model.forward(moved, want=last, targets=moved.token_ids[last]).natural_ids.cpu().numpy()
        if self.last is None or self.first is None:
            self.first, self.last, self.age = now, now, np.zeros(now.shape[:2], np.int64)
            return {}
        changed = (now != self.last).any(-1)
        self.age = np.where(changed, 0, self.age + 1)
        self.last = now
        return {
            "routes/churn_frac": float(changed.mean()),
            "routes/locked_frac": float((self.age >= LOCK_STEPS).mean()),
            "routes/moved_frac": float((now != self.first).any(-1).mean()),
        }

    def state(self) -> dict[str, Any]:
        """Return what the next measurement depends on; ``{}`` before the first."""
        if self.last is None or self.first is None:
            return {}
        return {"token_ids": self.token_ids, "first": self.first, "last": self.last, "age": self.age}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; tensors and arrays are taken alike."""
        arrays = {name: np.asarray(value, np.int64) for name, value in state.items()}
        self.token_ids = arrays.get("token_ids", np.zeros(0, np.int64))
        self.first, self.last = arrays.get("first"), arrays.get("last")
        self.age = arrays.get("age", np.zeros((0, 0), np.int64))


@torch.no_grad()
def route_tax(model: ScoringModel, part: Sequence[Sample], replay: Replay, *, frac: float) -> float | None:
    """Return KL(live routes || replayed routes) per token on about ``frac`` of the rows, at least one sample; ``None`` without any.

    Tokens come from the replayed policy ``q``; with ``w = p/q`` for the live one ``p``, ``mean(w log w - w + 1)`` is an unbiased
    estimate of KL(p || q) whose every term is at least 0.
    Source: Schulman, "Approximating KL divergence" (2020), the estimator k3 with importance weights.

    Args:
        model: With the weights to measure at.
        part: Samples; which of them are taken depends on their keys alone.
        replay: Gives the replayed routes.
        frac: Share of the rows.
    """
    usable = [index for index, sample in enumerate(part) if num_rows(sample)]
    if not usable or not frac:
        return None
    budget = frac * sum(num_rows(part[index]) for index in usable)
    chosen: list[Sample] = []
    for index in sorted(usable, key=lambda index: key_of("route-tax", part[index].key, index)):
        if chosen and budget < num_rows(part[index]):
            break
        budget -= num_rows(part[index])
        chosen.append(part[index])
    (micro,) = pack(chosen, sum(map(num_rows, chosen)))
    routes = replay.routes(model, chosen, micro)
    if routes is None:
        return 0.0
    live, used = (
        score(model, micro, temperature=replay.rl.temperature, device=replay.device, routes=r).forward.logprobs.double().cpu().numpy()
        for r in (None, routes)
    )
    difference = np.clip(live - used, -30.0, 30.0)
    return float((np.exp(difference) * difference - np.expm1(difference)).mean())
