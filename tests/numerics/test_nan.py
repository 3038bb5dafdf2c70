"""NaN and infinities: behind the mask they reach nothing, before it they stop the step and are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
BAD = [float("nan"), float("inf"), -float("inf")]
DECODER = Decoder(SHAPE)
DECODER.initialise(torch.Generator().manual_seed(0), std=0.2)


def net(mode: str = "exact") -> TrainModel:
    return TrainModel(SHAPE, DECODER.state_dict(), mode=mode, threads=1)  # type: ignore[arg-type]


def samples(model: TrainModel, poison: dict[tuple[int, int], float]) -> tuple[Sample, ...]:
    """Four on-policy samples; ``poison`` puts values on positions ``(sample, token)`` of the recorded log-probabilities."""
    draw = np.random.default_rng(5)
    made = []
    for number in range(4):
        n = 9 + number
        ids = draw.integers(0, SHAPE.vocab_size, n).astype(np.int32)
        mask = np.arange(n) % 3 == 2
        rows = np.flatnonzero(mask[1:])
        with torch.no_grad():
            forward = model.forward(
                PackedTokens.of([torch.from_numpy(ids[:-1].astype(np.int64))]),
                want=torch.from_numpy(rows),
                targets=torch.from_numpy(ids[rows + 1].astype(np.int64)),
            )
        logprobs = np.zeros(n, np.float32)
        logprobs[rows + 1] = forward.logprobs.numpy()
        for (sample, token), value in poison.items():
            if sample == number:
                logprobs[token] = value
        trace = Trace(
            token_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=(VersionSpan(start=0, end=n, version=0),),
            routes=Routes(expert_ids=forward.expert_ids.numpy().astype(np.uint8), valid=np.ones(n - 1, np.bool_)),
        )
        key = EpisodeKey(phase="rl", step=0, task_id="t", sample=number)
        made.append(Sample(key=key, trace=trace, advantage=np.where(mask, np.float32((-1.0) ** number), np.float32(0))))
    return tuple(made)


def trained(model: TrainModel, poison: dict[tuple[int, int], float], **rl: Any) -> Any:
    config = RlConfig.model_validate({"learning_rate": 1e-2, "warmup_steps": 0, **rl})
    mode = NumericsConfig.model_validate({"mode": "exact" if model.mode == "exact" else "tolerant"})
    subject = PolicyTrainer(model, config, mode)
    return subject.step(Batch(step=0, samples=samples(model, poison), normaliser=20.0))


MASKED = [(sample, token) for sample in range(4) for token in range(9) if token % 3 != 2]
CLEAN: dict[str, Any] = {}


@pytest.mark.parametrize("mode", ["exact", "tolerant"])
@settings(max_examples=12, deadline=None)
@given(poison=st.dictionaries(st.sampled_from(MASKED), st.sampled_from(BAD), min_size=1))
def test_behind_the_mask_nothing_reaches_loss_gradient_or_weights(mode: str, poison: dict[tuple[int, int], float]) -> None:
    rl = {"updates_per_batch": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    if mode not in CLEAN:
        CLEAN[mode] = trained(net(mode), {}, **rl)
    found = trained(net(mode), poison, **rl)
    assert found.weights_digest == CLEAN[mode].weights_digest
    for key, value in CLEAN[mode].metrics.items():
        if not key.endswith(("/s", "_s")):
            assert found.metrics[key] == value, key


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", ["exact", "tolerant"])
def test_before_the_mask_it_stops_the_step_and_names_the_token(mode: str, bad: float) -> None:
    model = net(mode)
    before = {name: value.detach().clone() for name, value in model.parameters.items()}
    with pytest.raises(NumericsError, match="not finite at token 5 of episode rl/0/t/2"):
        trained(model, {(2, 5): bad})
    assert all(torch.equal(before[name], value) for name, value in model.parameters.items())


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_gradient_that_is_not_finite_names_the_tensor(name: str, bad: float) -> None:
    model = net()
    before = {key: value.detach().clone() for key, value in model.parameters.items()}

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[1] = bad
        return gradient

    model.parameters[name].register_hook(spoil)
    with pytest.raises(NumericsError, match=rf"gradient of {name} is not finite"):
        trained(model, {})
    assert all(torch.equal(before[key], value) for key, value in model.parameters.items())


@pytest.mark.parametrize("bad", BAD)
def test_a_weight_that_is_not_finite_stops_before_it_spreads(bad: float) -> None:
    model = net()
    good = samples(model, {})
    with torch.no_grad():
        model.parameters["model.layers.0.self_attn.v_proj.weight"].view(-1)[3] = bad
    before = {key: value.detach().clone() for key, value in model.parameters.items()}
    subject = PolicyTrainer(model, RlConfig.model_validate({}), NumericsConfig.model_validate({}))
    with pytest.raises(NumericsError, match=r"no weight was changed|not finite|disagree"):
        subject.step(Batch(step=0, samples=good, normaliser=20.0))
    assert all(
        torch.equal(
            before[key],
            value,
        )
        or torch.isnan(value).any()
        for key, value in model.parameters.items()
    )


@pytest.mark.parametrize("where", ["weights", "first", "second"])
@pytest.mark.parametrize("bit", [0, 15, 30])
def test_a_bit_that_flips_between_two_steps_is_named(where: str, bit: int) -> None:
    model = net()
    subject = PolicyTrainer(model, RlConfig.model_validate({"warmup_steps": 0}), NumericsConfig.model_validate({"mode": "tolerant"}))
    subject.step(Batch(step=0, samples=samples(model, {}), normaliser=20.0))
    name = "model.layers.1.mlp.gate.weight"
    held = {"weights": model.parameters, "first": subject.optimizer.first, "second": subject.optimizer.second}[where]
    with torch.no_grad():
        held[name].data.view(-1).view(torch.int32)[2] ^= 1 << bit
    path = f"{'weights' if where == 'weights' else 'optimizer/' + where}/{name}"
    with pytest.raises(NumericsError, match=rf"{path} changed between two steps although nobody wrote to it"):
        subject.step(Batch(step=1, samples=(), normaliser=1.0))
    with pytest.raises(NumericsError, match=f"{path} changed"):
        subject.state()  # and it is never committed
