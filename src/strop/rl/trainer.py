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

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.errors import NumericsError
from strop.core.routes import RouterSpec
from strop.core.sample import Batch, Sample, Update
from strop.numerics.compare import compare_logprobs, effective_sample_frac
from strop.numerics.digest import weights_digest
from strop.numerics.limits import DriftGuard, skew_sums
from strop.numerics.manifest import StateSeal
from strop.rl.anchor import RouteAnchor
from strop.rl.loss import LossConfig, policy_loss
from strop.rl.optimizer import AdamW, copy_tensors
from strop.rl.pack import MicroBatch, pack, split_by_episode
from strop.rl.route_control import RouteControl
from strop.rl.route_stats import RouteStats
from strop.rl.scoring import ScoringModel, locate, score

MICRO_BATCH_ROWS = 8192


def learning_rate(config: RlConfig, step: int) -> float:
    """Return the learning rate of a step: rising over the warm-up, and falling linearly to ``final_learning_rate_frac`` of its peak.

    Example: a rate of 1 with 5 steps, one of warm-up, and a final share of .2 gives ``.5, .8, .6, .4, .2``.
    """
    rise = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = min(1.0, step / max(1, config.steps - 1))
    return config.learning_rate * rise * (1.0 - (1.0 - config.final_learning_rate_frac) * done)


class PolicyTrainer:
    """Implements ``ports.Trainer`` with the loss of ``strop.rl.loss``.

    Args:
        model: The trained model; its parameters are updated in place.
        config: Section ``rl``.
        numerics: Section ``numerics``: what a difference between rollout and trainer means, and what to do with routes.
        routes: Section ``routes``: how routes are replayed.
        router: What ids of the model's routes mean; ``None`` leaves the router of a record unchecked.
        anchor: Record of routes of another run.
        micro_batch_rows: Token rows of one forward pass; bounds memory, changes no result beyond summation order.
        version: Version of the weights that ``model`` holds.
    """

    def __init__(
        self,
        model: ScoringModel,
        config: RlConfig,
        numerics: NumericsConfig | None = None,
        *,
        routes: RoutesConfig | None = None,
        router: RouterSpec | None = None,
        anchor: RouteAnchor | None = None,
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
        self.guard = DriftGuard(self.numerics)
        self.seal = StateSeal()
        self.routes = RouteControl(self.numerics, routes or RoutesConfig.model_validate({}), config, self.device, router, anchor)
        self.route_stats: RouteStats | None = None
        """What the routers did in the last step (for the report)."""

    # ------------------------------------------------------------------------------------------------ the port

    def step(self, batch: Batch) -> Update:
        """Train on one batch: ``updates_per_batch`` optimizer steps over mini-batches of whole episodes.

        A batch without samples (no group had a signal) moves no weight; the version rises all the same, so that version and step agree.

        Raises:
            NumericsError: A log-probability, loss or gradient isn't finite, rollout and trainer disagree beyond the limit of
                ``numerics.mode``, or the record of routes is damaged or foreign. Weights, optimizer and version are as before the call.
        """
        began = time.perf_counter()
        self.seal.check(self._still())
        parts = split_by_episode(batch.samples, self.config.updates_per_batch)
        micros = [pack(part, self.micro_batch_rows) for part in parts]
        if not any(micros):
            self.version += 1
            return Update(policy_version=self.version, metrics={"rl/skipped_steps": 1.0}, weights_digest=weights_digest(self.weights()))
        self.routes.begin(self.version)
        self.routes.admit(batch.samples)
        before = self.state() if len(parts) > 1 else None
        seen = self.guard.state()
        tally = _Tally(routes=self.routes.stats)
        try:
            anchors = [self._anchors(part, sub, tally) for part, sub in zip(parts, micros, strict=True)] if len(parts) > 1 else None
            for number, (part, sub) in enumerate(zip(parts, micros, strict=True)):
                self.optimizer.zero_grad()
                self._accumulate(part, sub, anchors[number] if anchors else None, batch.normaliser / len(parts), tally, batch.step)
                if number == 0:
                    self._check(tally)
                if number == len(parts) - 1:
                    self.routes.measure_tax(self.model, part)
                self._update(batch.step, tally)
        except NumericsError:
            if before is not None:
                self.load_state(before)
            self.guard.load_state(seen)
            raise
        finally:
            self.optimizer.zero_grad()
        self.seal.close(self._still())
        self.version += 1
        self.route_stats = tally.routes
        metrics = self.routes.finish(self.model, batch.samples, tally.drift.get("numerics/k3_nats", 0.0), batch.step)
        metrics |= tally.metrics(self.version - 1, self.loss_config, time.perf_counter() - began)
        return Update(policy_version=self.version, metrics=metrics, weights_digest=weights_digest(self.weights()))

    def weights(self) -> Mapping[str, Any]:
        """Return a copy of the current weights under Hugging Face names."""
        return {name: tensor.detach().clone() for name, tensor in self.model.weights().items()}

    def state(self) -> Mapping[str, Any]:
        """Return version, weights, optimizer and reference; tensors are copies.

        Raises:
            NumericsError: Something changed since the last step although nobody wrote to it; it must not be committed.
        """
        self.seal.check(self._still())
        state: dict[str, Any] = {
            "version": self.version,
            "weights": {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()},
            "optimizer": self.optimizer.state(),
            "guard": self.guard.state(),
            "routes": self.routes.state(),
        }
        if self.reference is not None:
            state["reference"] = dict(self.reference)
        return state

    def _still(self) -> dict[str, Any]:
        """What nobody but a step may change, without copies; nothing with ``numerics.mode = "off"``."""
        if self.numerics.mode == "off":
            return {}
        moments = {"first": self.optimizer.first, "second": self.optimizer.second}
        return {"weights": dict(self.model.parameters), "optimizer": moments, "reference": self.reference}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        self.seal.open()
        copy_tensors(self.model.parameters, state["weights"], "weight")
        self.optimizer.load_state(state["optimizer"])
        self.guard.load_state(state["guard"])
        self.routes.load_state(state["routes"])
        if self.reference is not None:
            copy_tensors(self.reference, state["reference"], "reference weight")
        self.version = int(state["version"])

    # ------------------------------------------------------------------------------------------------ inside

    def _score(self, part: Sequence[Sample], micro: MicroBatch) -> Any:
        routes = self.routes.replay.routes(self.model, part, micro)
        return score(self.model, micro, temperature=self.config.temperature, device=self.device, routes=routes)

    @torch.no_grad()
    def _anchors(self, part: Sequence[Sample], micros: Sequence[MicroBatch], tally: _Tally) -> list[Tensor]:
        """Log-probabilities under the weights before the first of several updates; also what rollout and trainer are compared on."""
        anchors = []
        ledger = self.routes.ledger(micros)
        for micro in micros:
            forward = self._score(part, micro).forward
            ledger.take(micro.samples)
            anchors.append(forward.logprobs)
            tally.observe(part, micro, forward)
            self.routes.compare(self.model, part, micro, forward, is_anchor_pass=True)
        ledger.close()
        return anchors

    def _accumulate(
        self,
        part: Sequence[Sample],
        micros: Sequence[MicroBatch],
        anchors: list[Tensor] | None,
        normaliser: float,
        tally: _Tally,
        step: int,
    ) -> None:
        """Add the gradients of one mini-batch, in the order of its micro-batches."""
        rows = sum(len(micro.token_ids) for micro in micros)
        references = self._references(micros)
        ledger = self.routes.ledger(micros)
        for number, micro in enumerate(micros):
            scores = self._score(part, micro)
            ledger.take(micro.samples)
            forward = scores.forward
            if anchors is None:
                tally.observe(part, micro, forward)
                self.routes.compare(self.model, part, micro, forward, is_anchor_pass=False)
            pull = self.routes.pull(micro, forward, step)
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
            if pull is not None:
                loss = loss + pull * (len(micro.token_ids) / rows)
            if not torch.isfinite(loss):
                raise NumericsError(f"the loss of step version {self.version} is {float(loss.detach())}; no weight was changed")
            loss.backward()
            tally.add_loss(result, float(loss.detach()), float(scores.balance.detach()) * len(micro.token_ids), len(micro.token_ids))
            if reference is not None:
                difference = (forward.logprobs.detach() - reference).double()
                tally.reference.append(difference.cpu().numpy())
        ledger.close()

    @torch.no_grad()
    def _references(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities under the weights at the start of RL, never replayed; empty without a k1 penalty."""
        if self.reference is None:
            return []
        current = {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()}
        copy_tensors(self.model.parameters, self.reference, "reference weight")
        try:
            temperature = self.config.temperature
            scored = [score(self.model, micro, temperature=temperature, device=self.device) for micro in micros]
            return [s.forward.logprobs for s in scored]
        finally:
            copy_tensors(self.model.parameters, current, "weight")

    def _update(self, step: int, tally: _Tally) -> None:
        norm = self.optimizer.grad_norm()
        rate = learning_rate(self.config, step)
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
        self.routes.judge()
        tally.drift = self._judge(tally)

    def _judge(self, tally: _Tally) -> dict[str, float]:
        """Hold the step's figures against the limits of ``numerics``; returns them."""
        generator, trainer, advantage, fresh = tally.gathered(self.version)
        streams, first = [], 0
        for _, micro, _ in tally.observed:
            streams.append(first + np.searchsorted(np.cumsum(micro.lengths), micro.rows, side="right"))
            first += len(micro.lengths)
        sums = skew_sums(generator[fresh], trainer[fresh], advantage[fresh], np.concatenate(streams)[fresh])
        bounds = {"ratio_low": self.loss_config.ratio_low, "ratio_high": self.loss_config.ratio_high}
        drift = compare_logprobs(generator[fresh], trainer[fresh], advantage[fresh], **bounds)
        routes = tally.routes.metrics()
        if fresh.all():  # routes of older weights differ because the weights do
            drift |= {key: value for key, value in routes.items() if key == "numerics/route_mismatch_frac"}
        layers = {key: value for key, value in routes.items() if key.startswith("routes/mismatch_layer")}
        hint = f"most foreign routes in {max(layers, key=lambda key: layers[key])}" if any(layers.values()) else ""
        return drift | self.guard.check(drift, sums, worst=tally.worst(self.version), hint=hint)


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
    drift: dict[str, float] = field(default_factory=dict)

    def gathered(self, version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Generator's and trainer's log-probabilities, advantages, and which tokens ``version`` sampled throughout; ``[N]`` each."""
        micros = [micro for _, micro, _ in self.observed]
        trainer = np.concatenate([values for _, _, values in self.observed])
        generator = np.concatenate([micro.generator_logprobs for micro in micros])
        advantage = np.concatenate([micro.advantage for micro in micros])
        return generator, trainer, advantage, np.concatenate([micro.oldest for micro in micros]) == version

    def worst(self, version: int) -> str:
        """Name of the fresh token with the largest difference, ``""`` where nothing differs."""
        found, name = 0.0, ""
        for part, micro, trainer in self.observed:
            size = np.where(micro.oldest == version, np.abs(trainer.astype(np.float64) - micro.generator_logprobs), 0.0)
            if float(size.max()) > found:
                found, name = float(size.max()), _name(part, micro, int(size.argmax()))
        return name

    def observe(self, part: Sequence[Sample], micro: MicroBatch, forward: Any) -> None:
        self.observed.append((part, micro, forward.logprobs.detach().cpu().numpy()))
        self.entropy.append(forward.entropy.detach().cpu().numpy())

    def add_loss(self, result: Any, loss: float, balance: float, rows: int) -> None:
        self.ratio.append(result.ratio.cpu().numpy())
        self.clipped += int(result.is_clipped.sum())
        self.dropped += int(result.is_dropped.sum())
        self.loss += loss
        self.balance += balance
        self.rows += rows

    def metrics(self, version: int, config: LossConfig, seconds: float) -> dict[str, float]:
        generator, trainer, _, _ = self.gathered(version)
        staleness = version - np.concatenate([micro.versions for _, micro, _ in self.observed])
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
        return metrics | self.drift | self.routes.metrics()


def _name(part: Sequence[Sample], micro: MicroBatch, index: int) -> str:
    sample, position = locate(part, micro, index)
    return f"token {position} of episode {sample.key}"
