"""The trainer on a very small real model: exactness, checks before the step, accumulation, state, learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rl_toys import REAL_SHAPE, make_sample, make_trace

from strop.core.config import NumericsConfig, RlConfig
from strop.core.errors import CheckpointError, NumericsError
from strop.core.sample import Batch, Sample
from strop.model.decoder import Decoder, PackedTokens
from strop.model.training import TrainModel
from strop.rl.optimizer import AdamW
from strop.rl.supervised import SupervisedTrainer, linear_schedule
from strop.rl.trainer import PolicyTrainer, learning_rate

SHAPE = replace(REAL_SHAPE, vocab_size=24)


def model(mode: str = "exact") -> TrainModel:
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(0), std=0.2)
    return TrainModel(SHAPE, decoder.state_dict(), mode=mode, threads=1)  # type: ignore[arg-type]


def on_policy(net: TrainModel, count: int = 6, *, version: int = 0, noise: float = 0.0, advantages: Any = None) -> Batch:
    """A batch with the model's own log-probabilities and routes."""
    draw = np.random.default_rng(5)
    samples = []
    for number in range(count):
        n = 8 + number
        ids = draw.integers(0, SHAPE.vocab_size, n)
        mask = np.arange(n) % 3 == 2
        rows = np.flatnonzero(mask[1:])
        packed = PackedTokens.of([torch.from_numpy(ids[:-1])])
        with torch.no_grad():
            forward = net.forward(packed, want=torch.from_numpy(rows), targets=torch.from_numpy(ids[rows + 1]))
        logprobs = np.zeros(n, np.float32)
        logprobs[rows + 1] = forward.logprobs.numpy() + np.float32(noise)
        routes = forward.expert_ids.numpy().astype(np.uint8)
        trace = make_trace(ids.tolist(), mask.tolist(), logprobs=logprobs.tolist(), version=version, routes=routes)
        advantage = advantages[number] if advantages is not None else (-1.0) ** number
        samples.append(make_sample(trace, advantage, sample=number))
    return Batch(step=version, samples=tuple(samples), normaliser=40.0)


def trainer(net: TrainModel, *, numerics: dict[str, Any] | None = None, **rl: Any) -> PolicyTrainer:
    rows = rl.pop("micro_batch_rows", 4096)
    config = RlConfig.model_validate({"learning_rate": 1e-2, "warmup_steps": 0, **rl})
    return PolicyTrainer(net, config, NumericsConfig.model_validate(numerics or {}), micro_batch_rows=rows)


def copies(net: TrainModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.parameters.items()}


def unchanged(before: dict[str, torch.Tensor], net: TrainModel) -> bool:
    return all(torch.equal(before[name], parameter) for name, parameter in net.parameters.items())


def test_on_policy_step_is_exact_and_moves_the_weights() -> None:
    net = model()
    before = copies(net)
    update = trainer(net).step(on_policy(net))
    assert update.policy_version == 1
    assert update.metrics["numerics/logprob_diff_max_nats"] == 0.0
    assert update.metrics["numerics/is_exact"] == 1.0
    assert update.metrics["rl/ratio_max"] == 1.0
    assert update.metrics["rl/ess_frac"] == pytest.approx(1.0)
    assert update.metrics["routes/mismatch_frac"] == 0.0
    load = [update.metrics[f"routes/load_layer1_expert{e}"] for e in range(4)]
    assert sum(load) == pytest.approx(1.0)
    assert not unchanged(before, net)


def test_metrics_are_in_the_table() -> None:
    from strop.core.metrics import validate

    net = model()
    metrics = trainer(net, kl_coefficient=0.1, entropy_coefficient=0.01).step(on_policy(net)).metrics
    assert validate(metrics).keys() == metrics.keys()
    assert metrics["rl/k1_nats"] == 0.0


@pytest.mark.parametrize("numerics", [{"mode": "exact"}, {"mode": "tolerant", "max_abs_diff": 1e-4}])
def test_disagreement_stops_before_the_weights_move(numerics: dict[str, Any]) -> None:
    net = model()
    before = copies(net)
    subject = trainer(net, numerics=numerics)
    with pytest.raises(NumericsError, match=r"token 2 of episode rl/0/t/\d.*numerics.mode"):
        subject.step(on_policy(net, noise=1e-3))
    assert unchanged(before, net)
    assert (subject.version, subject.optimizer.steps) == (0, 0)
    trainer(net, numerics={"mode": "off"}).step(on_policy(net, noise=1e-3))


def test_exact_mode_sees_the_last_bit() -> None:
    net = model()
    batch = on_policy(net)
    trace = batch.samples[0].trace
    at = int(np.flatnonzero(trace.loss_mask)[0])
    nudged = trace.logprobs.copy()
    nudged[at] = np.nextafter(nudged[at], np.float32(0))
    sample = make_sample(
        make_trace(trace.token_ids.tolist(), trace.loss_mask.tolist(), logprobs=nudged.tolist(), routes=trace.routes.expert_ids)
    )  # type: ignore[union-attr]
    with pytest.raises(NumericsError, match="disagree on 1 of"):
        trainer(net).step(Batch(step=0, samples=(sample, *batch.samples[1:]), normaliser=1.0))


def test_stale_tokens_are_not_held_to_exactness_but_weighted() -> None:
    net = model()
    subject = trainer(net)
    subject.version = 1
    metrics = subject.step(on_policy(net, noise=-0.5)).metrics
    assert metrics["rl/staleness_max"] == 1
    assert metrics["numerics/tokens"] == 0
    assert metrics["rl/importance_mean"] == pytest.approx(np.exp(0.5), rel=1e-5)


def test_tokens_from_the_future_are_refused() -> None:
    net = model()
    with pytest.raises(NumericsError, match="version 2, newer than 0"):
        trainer(net).step(on_policy(net, version=2))


def test_damaged_route_record_is_found_in_exact_mode() -> None:
    net = model()
    batch = on_policy(net)
    first = batch.samples[0].trace
    assert first.routes is not None
    shifted = np.roll(first.routes.expert_ids, 1, axis=0)
    bad = make_sample(make_trace(first.token_ids.tolist(), first.loss_mask.tolist(), logprobs=first.logprobs.tolist(), routes=shifted))
    with pytest.raises(NumericsError, match="recorded routes differ"):
        trainer(net).step(Batch(step=0, samples=(bad, *batch.samples[1:]), normaliser=1.0))


def test_replay_uses_the_record_and_reports_what_it_suppressed() -> None:
    net = model()
    batch = on_policy(net)
    with torch.no_grad():
        for name, parameter in net.parameters.items():
            if name.endswith("gate.weight"):
                parameter.mul_(-1.0)
    subject = trainer(net, numerics={"mode": "off", "replay_routes": "r3"})
    metrics = subject.step(batch).metrics
    assert metrics["routes/suppressed_frac"] > 0.3
    assert metrics["routes/mismatch_frac"] == pytest.approx(metrics["routes/suppressed_frac"])


@pytest.mark.parametrize("fault", ["missing", "duplicate", "unknown expert"])
def test_routes_that_cannot_be_replayed_are_refused(fault: str) -> None:
    net = model()
    before = copies(net)
    trace = on_policy(net).samples[0].trace
    assert trace.routes is not None
    routes = None if fault == "missing" else trace.routes.expert_ids.copy()
    if routes is not None:
        routes[0, 0] = [1, 1] if fault == "duplicate" else [1, 200]
    sample = make_sample(make_trace(trace.token_ids.tolist(), trace.loss_mask.tolist(), logprobs=trace.logprobs.tolist(), routes=routes))
    with pytest.raises(NumericsError, match=r"route|expert"):
        trainer(net, numerics={"replay_routes": "r3"}).step(Batch(step=0, samples=(sample,), normaliser=1.0))
    assert unchanged(before, net)


def test_micro_batches_sum_to_the_whole_batch() -> None:
    whole, parts = model(), model()
    batch = on_policy(whole)
    first = trainer(whole, aux_coefficient=0.0)
    second = trainer(parts, aux_coefficient=0.0, micro_batch_rows=1)
    one, two = first.step(batch).metrics, second.step(batch).metrics
    assert one["rl/grad_norm"] == pytest.approx(two["rl/grad_norm"], rel=1e-5)
    assert one["rl/loss"] == pytest.approx(two["rl/loss"], abs=1e-6)


def test_gradient_is_that_of_the_loss_by_finite_differences() -> None:
    net = model("tolerant")
    batch = on_policy(net, advantages=[1.0, -0.5, 2.0, 0.3, -1.0, 0.7])
    name = "model.layers.1.mlp.experts.down_proj"  # behind the last router, so that no route flips on the way
    grads: dict[str, torch.Tensor] = {}
    subject = trainer(net, numerics={"mode": "off"}, aux_coefficient=0.0, grad_clip=1e9)
    subject.optimizer.step = lambda *args, **kwargs: grads.update({n: p.grad.clone() for n, p in net.parameters.items()})  # type: ignore[method-assign,union-attr]
    subject.step(batch)

    def objective() -> float:
        total = 0.0
        for sample in batch.samples:
            trace = sample.trace
            rows = np.flatnonzero(trace.loss_mask[1:])
            packed = PackedTokens.of([torch.from_numpy(trace.token_ids[:-1].astype(np.int64))])
            with torch.no_grad():
                forward = net.forward(
                    packed, want=torch.from_numpy(rows), targets=torch.from_numpy(trace.token_ids[rows + 1].astype(np.int64))
                )
            total -= float((forward.logprobs.double() * torch.from_numpy(sample.advantage[rows + 1].astype(np.float64))).sum())
        return total / batch.normaliser

    direction = torch.randn(grads[name].shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        net.parameters[name] += 1e-2 * direction
        up = objective()
        net.parameters[name] -= 2e-2 * direction
        down = objective()
    assert (up - down) / 2e-2 == pytest.approx(float((grads[name] * direction).sum()), rel=2e-2, abs=1e-4)


def test_nothing_to_learn_moves_no_weight_but_the_version() -> None:
    net = model()
    before = copies(net)
    subject = trainer(net)
    update = subject.step(Batch(step=0, samples=(), normaliser=1.0))
    assert (update.policy_version, subject.version, update.metrics["rl/skipped_steps"]) == (1, 1, 1.0)
    assert unchanged(before, net)


def test_nan_gradient_names_the_tensor_and_changes_nothing() -> None:
    net = model()
    before = copies(net)
    name = "model.layers.0.mlp.gate.weight"
    handle = net.parameters[name].register_hook(lambda grad: grad * float("nan"))
    subject = trainer(net)
    with pytest.raises(NumericsError, match=rf"gradient of {name} is not finite"):
        subject.step(on_policy(net))
    handle.remove()
    assert unchanged(before, net)
    assert subject.step(on_policy(net)).policy_version == 1


def test_nan_in_the_second_mini_batch_rolls_back_the_first() -> None:
    net = model()
    before = copies(net)
    calls = 0

    def hook(grad: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grad * float("nan") if calls == 2 else grad

    net.parameters["model.norm.weight"].register_hook(hook)
    subject = trainer(net, updates_per_batch=2)
    with pytest.raises(NumericsError, match=r"model\.norm\.weight"):
        subject.step(on_policy(net))
    assert calls == 2
    assert unchanged(before, net)
    assert subject.optimizer.steps == 0


def test_two_updates_on_a_batch_use_the_anchor_of_its_start() -> None:
    net = model()
    subject = trainer(net, updates_per_batch=2)
    metrics = subject.step(on_policy(net)).metrics
    assert metrics["rl/updates"] == 2
    assert metrics["numerics/logprob_diff_max_nats"] == 0.0
    assert metrics["rl/ratio_max"] > 1.0
    assert subject.version == 1


def test_state_continues_bit_for_bit() -> None:
    one, two = model(), model()
    first, second = trainer(one, kl_coefficient=0.1), trainer(two, kl_coefficient=0.1)
    first.step(on_policy(one))
    second.load_state(first.state())
    third, fourth = first.step(on_policy(one, version=1)), second.step(on_policy(two, version=1))
    assert third.weights_digest == fourth.weights_digest
    assert third.metrics["rl/k1_nats"] == fourth.metrics["rl/k1_nats"] != 0
    with pytest.raises(CheckpointError, match="missing"):
        second.load_state({**first.state(), "weights": {}})


def test_learns_a_bandit() -> None:
    """From the same prompt, one of 24 tokens pays: its probability rises from chance to near 1 in a few steps."""
    net = model()
    subject = trainer(net, learning_rate=2e-2)
    prompt, pays = [1, 2, 3], 7
    draw = np.random.default_rng(0)

    def probabilities() -> np.ndarray:
        packed = PackedTokens.of([torch.tensor(prompt)])
        with torch.no_grad():
            want, targets = torch.full((24,), 2), torch.arange(24)
            return net.forward(packed, want=want, targets=targets).logprobs.numpy()

    start = float(np.exp(probabilities()[pays]))
    for step in range(25):
        logprobs = probabilities()
        p = np.exp(logprobs.astype(np.float64))
        actions = draw.choice(24, size=32, p=p / p.sum())
        rewards = (actions == pays).astype(float) + 0.2 * (np.abs(actions - pays) <= 3)
        samples = []
        for number, (action, reward) in enumerate(zip(actions.tolist(), rewards, strict=True)):
            trace = make_trace([*prompt, action], [0, 0, 0, 1], logprobs=[0, 0, 0, logprobs[action]], version=step)
            samples.append(make_sample(trace, float(reward - rewards.mean()), sample=number, step=step))
        subject.numerics = NumericsConfig.model_validate({"replay_routes": "off"})
        assert subject.step(Batch(step=step, samples=tuple(samples), normaliser=32.0)).metrics["numerics/is_exact"] == 1.0
    assert start < 0.15
    assert float(np.exp(probabilities()[pays])) > 0.7


def test_adamw_equals_the_reference_implementation() -> None:
    draw = torch.Generator().manual_seed(0)
    ours = {"a": torch.randn(5, 3, generator=draw), "b": torch.randn(4, generator=draw)}
    theirs = [torch.nn.Parameter(ours["a"].clone()), torch.nn.Parameter(ours["b"].clone())]
    optimizer = AdamW(ours, weight_decay=0.1)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(5):
        for name, other in zip(("a", "b"), theirs, strict=True):
            ours[name].grad = torch.randn(ours[name].shape, generator=draw)
            other.grad = ours[name].grad.clone()
        optimizer.step(0.01)
        reference.step()
    assert torch.allclose(ours["a"], theirs[0], atol=1e-6)
    assert torch.allclose(ours["b"], theirs[1], atol=1e-6)


def test_supervised_phase_learns_and_weights_count() -> None:
    net = model()
    samples = [make_sample(make_trace([1, 2, a, b], [0, 0, 1, 1]), 1.0, sample=i) for i, (a, b) in enumerate([(5, 6), (5, 7)])]
    subject = SupervisedTrainer(net, linear_schedule(2e-2, steps=30, warmup_frac=0.1))
    batch = Batch(step=0, samples=tuple(samples), normaliser=4.0)
    before = subject.evaluate(batch)
    losses = [subject.step(Batch(step=s, samples=batch.samples, normaliser=4.0)).metrics["train/loss"] for s in range(30)]
    assert losses[0] == pytest.approx(before, rel=1e-6)
    assert losses[-1] < 0.5 * losses[0]
    light = Batch(
        step=0, samples=tuple(Sample(key=s.key, trace=s.trace, advantage=s.advantage * np.float32(0.5)) for s in samples), normaliser=4.0
    )
    assert subject.evaluate(light) == pytest.approx(0.5 * subject.evaluate(batch), rel=1e-5)


def test_linear_schedule() -> None:
    rate = linear_schedule(1.0, steps=10, warmup_frac=0.2)
    assert [rate(0), rate(1), rate(9)] == pytest.approx([0.5, 1.0, 0.1])


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_its_final_share() -> None:
    def rates(**rl: float) -> list[float]:
        config = RlConfig.model_validate({"steps": 5, "learning_rate": 1.0, **rl})
        return [learning_rate(config, step) for step in range(5)]

    assert rates(warmup_steps=1, final_learning_rate_frac=0.2) == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])
    assert rates(warmup_steps=0) == [1.0] * 5
    assert rates(warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
