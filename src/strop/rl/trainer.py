"""The policy trainer: one batch of samples in, new weights out, with every check before the weights move.

State: the model's parameters, the optimizer, the version and, with a k1 penalty, the reference weights. Gradients accumulate over
micro-batches in a fixed order, so the result depends on nothing but the batch and the state. Called by the loop, one call at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.core.config import NumericsConfig, RlConfig
from strop.core.errors import NumericsError
from strop.core.sample import Batch, Sample, Update
from strop.numerics.compare import compare_logprobs, effective_sample_frac
from strop.numerics.digest import weights_digest
from strop.rl.loss import LossConfig, policy_loss
from strop.rl.optimizer import AdamW, copy_tensors
from strop.rl.pack import MicroBatch, pack, split_by_episode
from strop.rl.route_stats import RouteStats
from strop.rl.scoring import ScoringModel, locate, score

MICRO_BATCH_ROWS = 8192


class PolicyTrainer:
    """Implements ``ports.Trainer`` with the loss of ``strop.rl.loss``.

    Args:
        model: The trained model; its parameters are updated in place.
        config: Section ``rl``.
        numerics: Section ``numerics``: what a difference between rollout and trainer means, and what to do with routes.
        micro_batch_rows: Token rows of one forward pass; bounds memory, changes no result beyond summation order.
        version: Version of the weights that ``model`` holds.
    """

    def __init__(
        self,
        model: ScoringModel,
        config: RlConfig,
        numerics: NumericsConfig | None = None,
        *,
        micro_batch_rows: int = MICRO_BATCH_ROWS,
        version: int = 0,
    ) -> None:
        self.model = model
        self.config = config
        self.numerics = numerics or NumericsConfig.model_validate({})
        self.loss_config = LossConfig.of(config)
        self.micro_batch_rows = micro_batch_rows
        self.version = version
        self.optimizer = AdamW(model.parameters)
        self.device = next(iter(model.parameters.values())).device
        self.reference = {n: p.detach().clone() for n, p in model.parameters.items()} if config.kl_coefficient else None
        self.route_stats: RouteStats | None = None
        """What the routers did in the last step (for the report)."""

    # ------------------------------------------------------------------------------------------------ the port

    def step(self, batch: Batch) -> Update:
        """Train on one batch: ``updates_per_batch`` optimizer steps over mini-batches of whole episodes.

        A batch without samples (no group had a signal) moves no weight; the version rises all the same, so that version and step agree.

        Raises:
            NumericsError: A log-probability, loss or gradient isn't finite, or rollout and trainer disagree beyond the limit of
                ``numerics.mode``. Weights, optimizer and version are as before the call.
        """
        began = time.perf_counter()
        parts = split_by_episode(batch.samples, self.config.updates_per_batch)
        micros = [pack(part, self.micro_batch_rows) for part in parts]
        if not any(micros):
            self.version += 1
            return Update(policy_version=self.version, metrics={"rl/skipped_steps": 1.0}, weights_digest=weights_digest(self.weights()))
        before = self.state() if len(parts) > 1 else None
        tally = _Tally(routes=RouteStats())
        try:
            anchors = [self._anchors(part, sub, tally) for part, sub in zip(parts, micros, strict=True)] if len(parts) > 1 else None
            for number, (part, sub) in enumerate(zip(parts, micros, strict=True)):
                self.optimizer.zero_grad()
                self._accumulate(part, sub, anchors[number] if anchors else None, batch.normaliser / len(parts), tally)
                if number == 0:
                    self._check(tally)
                self._update(batch.step, tally)
        except NumericsError:
            if before is not None:
                self.load_state(before)
            raise
        finally:
            self.optimizer.zero_grad()
        self.version += 1
        self.route_stats = tally.routes
        metrics = tally.metrics(self.version - 1, self.loss_config, time.perf_counter() - began)
        return Update(policy_version=self.version, metrics=metrics, weights_digest=weights_digest(self.weights()))

    def weights(self) -> Mapping[str, Any]:
        """Return a copy of the current weights under Hugging Face names."""
        return {name: tensor.detach().clone() for name, tensor in self.model.weights().items()}

    def state(self) -> Mapping[str, Any]:
        """Return version, weights, optimizer and reference; tensors are copies."""
        state: dict[str, Any] = {
            "version": self.version,
            "weights": {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()},
            "optimizer": self.optimizer.state(),
        }
        if self.reference is not None:
            state["reference"] = dict(self.reference)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        copy_tensors(self.model.parameters, state["weights"], "weight")
        self.optimizer.load_state(state["optimizer"])
        if self.reference is not None:
            copy_tensors(self.reference, state["reference"], "reference weight")
        self.version = int(state["version"])

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _replay(self) -> bool:
        return self.numerics.replay_routes == "r3"

    def _score(self, micro: MicroBatch) -> Any:
        return score(self.model, micro, temperature=self.config.temperature, replay=self._replay, device=self.device)

    @torch.no_grad()
    def _anchors(self, part: Sequence[Sample], micros: Sequence[MicroBatch], tally: _Tally) -> list[Tensor]:
        """Log-probabilities under the weights before the first of several updates; also what rollout and trainer are compared on."""
        anchors = []
        for micro in micros:
            forward = self._score(micro).forward
            anchors.append(forward.logprobs)
            tally.observe(part, micro, forward)
        return anchors

    def _accumulate(
        self, part: Sequence[Sample], micros: Sequence[MicroBatch], anchors: list[Tensor] | None, normaliser: float, tally: _Tally
    ) -> None:
        """Add the gradients of one mini-batch, in the order of its micro-batches."""
        rows = sum(len(micro.token_ids) for micro in micros)
        references = self._references(micros)
        for number, micro in enumerate(micros):
            scores = self._score(micro)
            forward = scores.forward
            if anchors is None:
                tally.observe(part, micro, forward)
            anchor = forward.logprobs.detach() if anchors is None else anchors[number]
            generator = torch.from_numpy(micro.generator_logprobs).to(self.device)
            advantage = torch.from_numpy(micro.advantage).to(self.device)
            reference = references[number] if references else None
            result = policy_loss(forward.logprobs, anchor, generator, advantage, self.loss_config, reference=reference)
            loss = result.total / normaliser
            if self.loss_config.entropy_coefficient:
                loss = loss - self.loss_config.entropy_coefficient * forward.entropy.sum() / normaliser
            if self.loss_config.aux_coefficient:
                loss = loss + self.loss_config.aux_coefficient * scores.balance * (len(micro.token_ids) / rows)
            if not torch.isfinite(loss):
                raise NumericsError(f"the loss of step version {self.version} is {float(loss.detach())}; no weight was changed")
            loss.backward()
            tally.add_loss(result, float(loss.detach()), float(scores.balance.detach()) * len(micro.token_ids), len(micro.token_ids))
            if reference is not None:
                difference = (forward.logprobs.detach() - reference).double()
                tally.reference.append(difference.cpu().numpy())

    @torch.no_grad()
    def _references(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities under the weights at the start of RL, never replayed; empty without a k1 penalty."""
        if self.reference is None:
            return []
        current = {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()}
        copy_tensors(self.model.parameters, self.reference, "reference weight")
        try:
            temperature = self.config.temperature
            scored = [score(self.model, micro, temperature=temperature, replay=False, device=self.device) for micro in micros]
            return [s.forward.logprobs for s in scored]
        finally:
            copy_tensors(self.model.parameters, current, "weight")

    def _update(self, step: int, tally: _Tally) -> None:
        norm = self.optimizer.grad_norm()
        rate = self.config.learning_rate * min(1.0, (step + 1) / (self.config.warmup_steps + 1))
        self.optimizer.step(rate, min(1.0, self.config.grad_clip / norm) if norm > 0 else 1.0)
        tally.grad_norms.append(norm)
        tally.learning_rate = rate

    def _check(self, tally: _Tally) -> None:
        """Compare rollout and trainer on the tokens that this very version sampled, before any weight moves."""
        for part, micro, trainer in tally.observed:
            bad = np.flatnonzero(~np.isfinite(trainer) | ~np.isfinite(micro.generator_logprobs))
            if len(bad):
                raise NumericsError(f"log-probability is not finite at {_name(part, micro, int(bad[0]))}; no weight was changed")
            newer = np.flatnonzero(micro.versions > self.version)
            if len(newer):
                raise NumericsError(
                    f"{_name(part, micro, int(newer[0]))} was sampled by version {micro.versions[newer[0]]}, newer than {self.version}"
                )
            if self.numerics.mode == "off":
                continue
            difference = np.abs(trainer.astype(np.float64) - micro.generator_logprobs)
            limit = 0.0 if self.numerics.mode == "exact" else self.numerics.max_abs_diff
            over = np.flatnonzero((difference > limit) & (micro.oldest == self.version))
            if len(over):
                first = int(over[0])
                raise NumericsError(
                    f"rollout and trainer disagree on {len(over)} of {len(trainer)} tokens, first at {_name(part, micro, first)}: "
                    f"rollout {micro.generator_logprobs[first]:.9g}, trainer {trainer[first]:.9g}; numerics.mode "
                    f"{self.numerics.mode!r} allows {limit:g}"
                )
        is_pure = all((micro.oldest == self.version).all() for _, micro, _ in tally.observed)
        if self.numerics.mode == "exact" and self.numerics.replay_routes != "off" and is_pure and tally.routes.differing.any():
            rows = int(tally.routes.differing.sum())
            raise NumericsError(f"log-probabilities agree, but {rows} recorded routes differ from the trainer's: damaged record")


@dataclass(slots=True)
class _Tally:
    """What one step saw; turned into metrics at its end."""

    routes: RouteStats
    observed: list[tuple[Sequence[Sample], MicroBatch, np.ndarray]] = field(default_factory=list)
    entropy: list[np.ndarray] = field(default_factory=list)
    ratio: list[np.ndarray] = field(default_factory=list)
    clipped: int = 0
    dropped: int = 0
    loss: float = 0.0
    balance: float = 0.0
    rows: int = 0
    reference: list[np.ndarray] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0

    def observe(self, part: Sequence[Sample], micro: MicroBatch, forward: Any) -> None:
        self.observed.append((part, micro, forward.logprobs.detach().cpu().numpy()))
        self.entropy.append(forward.entropy.detach().cpu().numpy())
        self.routes.add(micro, forward.expert_ids.cpu().numpy(), forward.natural_ids.cpu().numpy(), forward.router_logits[0].shape[-1])

    def add_loss(self, result: Any, loss: float, balance: float, rows: int) -> None:
        self.ratio.append(result.ratio.cpu().numpy())
        self.clipped += int(result.is_clipped.sum())
        self.dropped += int(result.is_dropped.sum())
        self.loss += loss
        self.balance += balance
        self.rows += rows

    def metrics(self, version: int, config: LossConfig, seconds: float) -> dict[str, float]:
        micros = [micro for _, micro, _ in self.observed]
        trainer = np.concatenate([values for _, _, values in self.observed])
        generator = np.concatenate([micro.generator_logprobs for micro in micros])
        advantage = np.concatenate([micro.advantage for micro in micros])
        staleness = version - np.concatenate([micro.versions for micro in micros])
        fresh = np.concatenate([micro.oldest for micro in micros]) == version
        with np.errstate(over="ignore"):
            importance = np.exp(trainer.astype(np.float64) - generator)
        ratio, tokens = np.concatenate(self.ratio), len(trainer)
        metrics = {
            "rl/loss": self.loss / len(self.grad_norms),
            "rl/aux_loss": self.balance / self.rows,
            "rl/grad_norm": float(np.mean(self.grad_norms)),
            "rl/learning_rate": self.learning_rate,
            "rl/updates": float(len(self.grad_norms)),
            "rl/entropy_nats": float(np.concatenate(self.entropy).mean(dtype=np.float64)),
            "rl/clip_frac": self.clipped / tokens,
            "rl/ratio_max": float(ratio.max()),
            "rl/importance_mean": float(importance.mean()),
            "rl/importance_max": float(importance.max()),
            "rl/importance_truncated_frac": float((importance > config.importance_cap).mean()),
            "rl/guard_dropped_tokens": float(self.dropped),
            "rl/ess_frac": effective_sample_frac(importance),
            "rl/trained_tokens": float(tokens),
            "rl/staleness_mean": float(staleness.mean()),
            "rl/staleness_max": float(staleness.max()),
            "rl/policy_version": float(version + 1),
            "rl/skipped_steps": 0.0,
            "train/tokens": float(self.rows),
            "train/s": seconds,
            "train/tokens_per_s": self.rows / seconds,
        }
        if self.reference:
            difference = np.concatenate(self.reference)
            metrics["rl/k1_nats"] = float(difference.mean())
            metrics["rl/k3_nats"] = float((np.expm1(-difference) + difference).mean())
        bounds = {"ratio_low": config.ratio_low, "ratio_high": config.ratio_high}
        metrics |= compare_logprobs(generator[fresh], trainer[fresh], advantage[fresh], **bounds)
        return metrics | self.routes.metrics()


def _name(part: Sequence[Sample], micro: MicroBatch, index: int) -> str:
    sample, position = locate(part, micro, index)
    return f"token {position} of episode {sample.key}"
