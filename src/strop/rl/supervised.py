"""The trainer of supervised phases: weighted cross entropy on the agent's tokens, with the micro-batching and optimizer of RL.

State: the model's parameters, the optimizer and the version. A sample's ``advantage`` is the loss weight of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from strop.core.errors import NumericsError
from strop.core.sample import Batch, Update
from strop.numerics.digest import weights_digest
from strop.rl.anchor import RouteAnchor
from strop.rl.loss import supervised_loss
from strop.rl.optimizer import AdamW, copy_tensors
from strop.rl.pack import pack
from strop.rl.scoring import ScoringModel, score
from strop.rl.trainer import MICRO_BATCH_ROWS

ANCHOR_KEYS = ("routes/anchor_nats", "routes/anchor_agree_frac", "routes/anchor_replayed_frac")


def linear_schedule(peak: float, *, steps: int, warmup_frac: float, final_frac: float = 0.1) -> Callable[[int], float]:
    """Return learning rate by step: rising linearly to ``peak``, then falling linearly to ``final_frac * peak`` at the last step.

    Example: ``linear_schedule(1.0, steps=10, warmup_frac=.2)`` gives ``.5, 1.0, .8875, ..., .1``.
    """
    warmup = max(1, round(warmup_frac * steps))

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
        return peak * (1 - (1 - final_frac) * done)

    return rate


class SupervisedTrainer:
    """Implements ``ports.Trainer`` for mid-training.

    Args:
        model: The trained model; its parameters are updated in place.
        schedule: Learning rate by ``batch.step``.
        aux_coefficient: Weight of the router's load-balancing loss.
        grad_clip: Largest global gradient norm.
        weight_decay: Decoupled, on matrices.
        micro_batch_rows: Token rows of one forward pass.
        version: Version of the weights that ``model`` holds.
        anchor: Record of routes of another run, replayed on streams that it knows and pulled towards, both fading out.
    """

    def __init__(
        self,
        model: ScoringModel,
        schedule: Callable[[int], float],
        *,
        aux_coefficient: float = 1e-3,
        grad_clip: float = 1.0,
        weight_decay: float = 0.01,
        micro_batch_rows: int = MICRO_BATCH_ROWS,
        version: int = 0,
        anchor: RouteAnchor | None = None,
    ) -> None:
        self.model = model
        self.anchor = anchor
        self.schedule = schedule
        self.aux_coefficient = aux_coefficient
        self.grad_clip = grad_clip
        self.micro_batch_rows = micro_batch_rows
        self.version = version
        self.optimizer = AdamW(model.parameters, weight_decay=weight_decay)
        self.device = next(iter(model.parameters.values())).device

    def step(self, batch: Batch, *, with_digest: bool = True) -> Update:
        """Train on one batch; ``batch.normaliser`` is usually the sum of the loss weights, which makes ``train/loss`` nats per token.

        Args:
            batch: Samples in a fixed order.
            with_digest: Whether to compute the digest of the new weights; off saves time where nobody reads it.

        Raises:
            NumericsError: A loss or gradient isn't finite; nothing was changed.
        """
        began = time.perf_counter()
        micros = pack(batch.samples, self.micro_batch_rows)
        rows = sum(len(micro.token_ids) for micro in micros)
        loss_sum = balance_sum = 0.0
        pulls = np.zeros(4)  # rows, and sums over them: KL to the anchor, agreement with it, rows on its routes
        self.optimizer.zero_grad()
        try:
            for micro in micros:
                routes, held = (None, 0.0) if self.anchor is None else self.anchor.routes(self.model, micro, batch.step)
                scores = score(self.model, micro, temperature=1.0, device=self.device, routes=routes)
                weight = torch.from_numpy(micro.advantage).to(self.device)
                loss = supervised_loss(scores.forward.logprobs, weight) / batch.normaliser
                total = loss + self.aux_coefficient * scores.balance * (len(micro.token_ids) / rows)
                if self.anchor is not None and (pull_weight := self.anchor.weight(batch.step)):
                    pull = self.anchor.pull(micro, scores.forward)
                    total = total + pull_weight * pull.nats * (len(micro.token_ids) / rows)
                    pulls += len(micro.token_ids) * np.array([1.0, float(pull.nats.detach()), pull.agreement, held])
                if not torch.isfinite(total):
                    raise NumericsError(f"the loss of supervised step {batch.step} is {float(total.detach())}; no weight was changed")
                total.backward()
                loss_sum += float(loss.detach())
                balance_sum += float(scores.balance.detach()) * len(micro.token_ids)
            norm = self.optimizer.grad_norm()
            rate = self.schedule(batch.step)
            if micros:
                self.optimizer.step(rate, min(1.0, self.grad_clip / norm) if norm > 0 else 1.0)
        finally:
            self.optimizer.zero_grad()
        self.version += 1
        seconds = time.perf_counter() - began
        metrics = {
            "train/loss": loss_sum,
            "train/aux_loss": balance_sum / max(rows, 1),
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/tokens": float(rows),
            "train/s": seconds,
            "train/tokens_per_s": rows / seconds,
        }
        if self.anchor is not None:
            metrics["routes/anchor_weight"] = self.anchor.weight(batch.step)
        if pulls[0]:
            metrics |= dict(zip(ANCHOR_KEYS, (pulls[1:] / pulls[0]).tolist(), strict=True))
        return Update(policy_version=self.version, metrics=metrics, weights_digest=weights_digest(self.weights()) if with_digest else "")

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the loss of a batch (``sum weight * -log p / normaliser``) without training on it."""
        total = 0.0
        for micro in pack(batch.samples, self.micro_batch_rows):
            scores = score(self.model, micro, temperature=1.0, device=self.device)
            total += float(supervised_loss(scores.forward.logprobs, torch.from_numpy(micro.advantage).to(self.device)))
        return total / batch.normaliser

    def weights(self) -> Mapping[str, Any]:
        """Return a copy of the current weights under Hugging Face names."""
        return {name: tensor.detach().clone() for name, tensor in self.model.weights().items()}

    def state(self) -> Mapping[str, Any]:
        """Return version, weights and optimizer; tensors are copies."""
        weights = {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()}
        return {"version": self.version, "weights": weights, "optimizer": self.optimizer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        copy_tensors(self.model.parameters, state["weights"], "weight")
        self.optimizer.load_state(state["optimizer"])
        self.version = int(state["version"])
