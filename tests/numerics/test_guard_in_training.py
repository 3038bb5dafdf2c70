"""The guard inside the trainer: stops come before the optimizer step, name the figure and the token, and leave everything as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from strop.core.config import NumericsConfig, RlConfig
from strop.core.episode import EpisodeKey, Trace, VersionSpan
from strop.core.errors import NumericsError
from strop.core.routes import Routes
from strop.core.sample import Batch, Sample
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.model.training import TrainModel
from strop.rl.trainer import PolicyTrainer

SHAPE = DecoderConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2, expert_size=16
)
STREAMS, LENGTH = 24, 40


def trainer(**numerics: Any) -> PolicyTrainer:
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(0), std=0.2)
    config = NumericsConfig.model_validate({"mode": "tolerant", "max_abs_diff": 5.0, **numerics})
    rl = RlConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 0})
    return PolicyTrainer(TrainModel(SHAPE, decoder.state_dict(), threads=1), rl, config)


@torch.no_grad()
def batch(subject: PolicyTrainer, *, noise: float = 0.0, bias: float = 0.0, odd_routes: bool = False) -> Batch:
    """On-policy samples of the trainer's present weights, with planted differences ``trainer - rollout``."""
    version = subject.version
    draw = np.random.default_rng(version)
    ids = [draw.integers(0, SHAPE.vocab_size, LENGTH).astype(np.int32) for _ in range(STREAMS)]
    packed = PackedTokens.of([torch.from_numpy(stream[:-1].astype(np.int64)) for stream in ids])
    targets = torch.from_numpy(np.concatenate([stream[1:] for stream in ids]).astype(np.int64))
    forward = subject.model.forward(packed, want=torch.arange(len(targets)), targets=targets)
    logprobs = forward.logprobs.numpy().reshape(STREAMS, -1)
    routes = forward.expert_ids.numpy().astype(np.uint8).reshape(STREAMS, LENGTH - 1, SHAPE.num_layers, SHAPE.top_k)
    samples = []
    for number in range(STREAMS):
        side = 1.0 if number % 2 else -1.0
        d = draw.normal(0, noise, LENGTH - 1) - noise**2 / 2 + bias * side if noise or bias else np.zeros(LENGTH - 1)
        mask = np.arange(LENGTH) > 0
        recorded = np.concatenate([[0.0], logprobs[number] - d]).astype(np.float32)
        experts = np.roll(routes[number], 1, axis=0) if odd_routes else routes[number]
        trace = Trace(
            token_ids=ids[number],
            loss_mask=mask,
            logprobs=recorded,
            versions=(VersionSpan(start=0, end=LENGTH, version=version),),
            routes=Routes(expert_ids=experts.copy(), valid=np.ones(LENGTH - 1, np.bool_)),
        )
        key = EpisodeKey(phase="rl", step=version, task_id="t", sample=number)
        samples.append(Sample(key=key, trace=trace, advantage=np.where(mask, np.float32(0.5 * side), np.float32(0))))
    return Batch(step=version, samples=tuple(samples), normaliser=1000.0)


def test_clean_steps_are_silent_and_carry_every_figure() -> None:
    subject = trainer(mode="exact")
    for _ in range(3):
        metrics = subject.step(batch(subject)).metrics
        assert metrics["numerics/warnings"] == 0
        assert metrics["numerics/advantage_skew_z"] == 0
        assert metrics["numerics/logprob_diff_max_nats"] == 0


def test_sixteen_bit_noise_passes_in_tolerant_mode() -> None:
    subject = trainer()
    for _ in range(10):
        assert subject.step(batch(subject, noise=0.02)).metrics["numerics/warnings"] == 0


def test_a_bias_along_the_advantage_stops_within_ten_steps() -> None:
    subject = trainer()
    k3 = []

    def run() -> None:
        for _ in range(10):
            k3.append(subject.step(batch(subject, noise=0.02, bias=0.005)).metrics["numerics/k3_nats"])

    with pytest.raises(NumericsError, match="favours tokens that were rewarded"):
        run()
    assert all(value < 3e-4 for value in k3)
    assert subject.version == len(k3)


def test_drift_stops_before_the_step_and_names_figure_and_token() -> None:
    subject = trainer()
    subject.step(batch(subject))
    before = {name: value.detach().clone() for name, value in subject.model.parameters.items()}
    window, steps = subject.guard.state(), subject.optimizer.steps
    with pytest.raises(
        NumericsError, match=r"numerics/token_mult_error is .*largest difference at token \d+ of episode rl/1/t/\d+.*no weight was changed"
    ):
        subject.step(batch(subject, noise=0.4))
    assert all(torch.equal(before[name], value) for name, value in subject.model.parameters.items())
    assert (subject.version, subject.optimizer.steps, subject.guard.state()) == (1, steps, window)
    assert subject.step(batch(subject)).policy_version == 2


def test_foreign_routes_stop_and_name_the_layer() -> None:
    subject = trainer()
    with pytest.raises(NumericsError, match=r"(?s)route"):
        subject.step(batch(subject, odd_routes=True))


def test_off_logs_and_lets_everything_pass() -> None:
    subject = trainer(mode="off")
    metrics = subject.step(batch(subject, noise=0.4, bias=0.1)).metrics
    assert metrics["numerics/token_mult_error"] > 1.1
    assert metrics["numerics/advantage_skew_z"] > 3


def test_the_window_is_part_of_the_state() -> None:
    one, two = trainer(), trainer()
    for _ in range(3):
        one.step(batch(one, noise=0.02))
    two.load_state(one.state())
    first, second = one.step(batch(one, noise=0.02)), two.step(batch(two, noise=0.02))
    assert first.metrics["numerics/advantage_skew_z"] == second.metrics["numerics/advantage_skew_z"] != 0
    assert first.weights_digest == second.weights_digest
