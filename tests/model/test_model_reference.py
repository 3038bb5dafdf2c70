"""Values and gradients against a float64 reference, and sampling against its definition."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_kit import SMALL, alone, configs, packed, random_streams, random_weights, reference, same_bits

from strop.model.config import DecoderConfig
from strop.model.inference import InferenceModel
from strop.model.native import bindings
from strop.model.training import TrainModel

EPS = 2.0**-23
MODEL = InferenceModel(SMALL, random_weights(SMALL), threads=1)


def double(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves in float64."""
    return {name: w.double().requires_grad_() for name, w in weights.items()}


@given(config=configs(), seed=st.integers(0, 99), length=st.integers(1, 70))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_logits_are_within_64_ulps_of_the_largest_logit(config: DecoderConfig, seed: int, length: int) -> None:
    weights = random_weights(config, seed)
    (stream,) = random_streams(config, [length], seed)
    logits, ids = alone(InferenceModel(config, weights, threads=1), stream)
    # The reference takes the same routes: a near-tie may fall the other way in float32.
    forced = torch.from_numpy(ids.astype(np.int64))
    exact, router, routes = reference(config, {n: w.double() for n, w in weights.items()}, torch.from_numpy(stream).long(), forced)
    error = np.abs(logits - exact.numpy()).max()
    assert error <= 64 * EPS * float(exact.abs().max())
    natural = router.sort(dim=-1, descending=True).values
    chosen_worst = router.gather(2, routes.transpose(0, 1)).min(-1).values
    regret = natural[..., config.top_k - 1] - chosen_worst
    assert float(regret.max()) <= 64 * EPS * float(router.abs().max())


@given(
    config=configs(),
    seed=st.integers(0, 99),
    forces=st.booleans(),
    wants=st.sampled_from([1, 7, 60, 300]),
    keeps_scores=st.booleans(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradients_match_float64_autograd(config: DecoderConfig, seed: int, forces: bool, wants: int, keeps_scores: bool) -> None:
    weights, generator = random_weights(config, seed), torch.Generator().manual_seed(seed)
    streams = random_streams(config, [33, 20, 1], seed)
    with mock.patch.object(bindings, "KEPT_SCORES_BYTES", 192 << 20 if keeps_scores else 0):
        model = TrainModel(config, weights, threads=1)
    want = torch.randint(0, 54, (wants,), generator=generator)
    targets = torch.randint(0, config.vocab_size, (wants,), generator=generator)
    shape = (54, config.num_layers, config.num_experts)
    forced = torch.rand(shape, generator=generator).topk(config.top_k).indices.sort(dim=-1).values if forces else None
    g, h = torch.randn(2, wants, generator=generator)
    r = 0.1 * torch.randn(config.num_layers, 54, config.num_experts, generator=generator)
    out = model.forward(packed(streams), want=want, targets=targets, temperature=0.7, forced_routes=forced)
    ((out.logprobs * g).sum() + (out.entropy * h).sum() + (torch.stack(out.router_logits) * r).sum()).backward()
    assert forced is None or torch.equal(out.expert_ids, forced)

    leaves = double(weights)
    logits, routers, at = [], [], 0
    for stream in streams:
        part = reference(config, leaves, torch.from_numpy(stream).long(), out.expert_ids[at : at + len(stream)])
        logits.append(part[0])
        routers.append(part[1])
        at += len(stream)
    log_p = (torch.cat(logits)[want] / 0.7).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((logprobs * g).sum() + (entropy * h).sum() + (torch.cat(routers, 1) * r).sum()).backward()
    assert float((out.logprobs - logprobs).detach().abs().max()) < 1e-4
    assert float((out.entropy - entropy).detach().abs().max()) < 1e-4
    largest = max(float(leaf.grad.norm()) for leaf in leaves.values())
    for name, leaf in leaves.items():
        error = float((model.parameters[name].grad.double() - leaf.grad).norm())
        assert error <= 2e-4 * float(leaf.grad.norm()) + 1e-6 * largest, name


def test_the_routers_gradient_under_forced_routes_is_the_finite_difference() -> None:
    weights = random_weights(SMALL)
    (stream,) = random_streams(SMALL, [12])
    forced = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(36)]).view(12, 3, 2)
    want, targets = torch.arange(12), torch.arange(12)
    model = TrainModel(SMALL, weights, threads=1)
    out = model.forward(packed([stream]), want=want, targets=targets, forced_routes=forced)
    out.logprobs.sum().backward()
    assert not torch.equal(out.natural_ids, out.expert_ids)
    assert torch.equal(out.natural_ids, model.forward(packed([stream]), want=want, targets=targets).expert_ids) is False
    name = "model.layers.0.mlp.gate.weight"
    gradient = model.parameters[name].grad
    step = 1e-5
    for e, d in [(0, 0), (3, 17), (5, 39)]:
        values = []
        for sign in (1, -1):
            moved = {n: w.double() for n, w in weights.items()}
            moved[name] = moved[name].clone()
            moved[name][e, d] += sign * step
            logits, _, _ = reference(SMALL, moved, torch.from_numpy(stream).long(), forced.sort(dim=-1).values)
            values.append(float(logits.log_softmax(-1).gather(1, targets[:, None]).sum()))
        slope = (values[0] - values[1]) / (2 * step)
        assert abs(float(gradient[e, d]) - slope) < 1e-4 * max(1.0, abs(slope))


def test_natural_routes_are_reported_beside_forced_ones() -> None:
    (stream,) = random_streams(SMALL, [25])
    model = TrainModel(SMALL, random_weights(SMALL), threads=1)
    want, targets = torch.arange(25), torch.zeros(25, dtype=torch.long)
    free = model.forward(packed([stream]), want=want, targets=targets)
    assert torch.equal(free.natural_ids, free.expert_ids)
    replayed = model.forward(packed([stream]), want=want, targets=targets, forced_routes=free.expert_ids.flip(-1))
    assert same_bits(replayed.logprobs.detach().numpy(), free.logprobs.detach().numpy())
    assert torch.equal(replayed.natural_ids, free.expert_ids)


def test_tolerant_mode_agrees_with_exact_mode() -> None:
    streams = random_streams(SMALL, [40, 12])
    want, targets = torch.arange(3, 52, 3), torch.arange(17)
    exact, tolerant = (TrainModel(SMALL, random_weights(SMALL), mode=mode, threads=1) for mode in ("exact", "tolerant"))
    for forced in (None, torch.tensor([1, 4]).expand(52, 3, 2)):
        outs = [m.forward(packed(streams), want=want, targets=targets, temperature=1.3, forced_routes=forced) for m in (exact, tolerant)]
        assert torch.equal(outs[0].expert_ids, outs[1].expert_ids)
        assert torch.equal(outs[0].natural_ids, outs[1].natural_ids)
        for name in ("logprobs", "entropy"):
            assert float((getattr(outs[0], name) - getattr(outs[1], name)).detach().abs().max()) < 2e-5
    for out in outs:
        (out.logprobs.mean() + sum(x.square().mean() for x in out.router_logits)).backward()
    for name, parameter in exact.parameters.items():
        torch.testing.assert_close(parameter.grad, tolerant.parameters[name].grad, rtol=2e-3, atol=2e-5)


def test_an_optimizer_step_in_place_reaches_the_kernels() -> None:
    (stream,) = random_streams(SMALL, [40])
    model = TrainModel(SMALL, random_weights(SMALL), threads=1)
    targets = torch.from_numpy(np.roll(stream, -1)).long()
    losses = []
    for _ in range(12):
        loss = -model.forward(packed([stream]), want=torch.arange(40), targets=targets).logprobs.mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters.values():
                assert parameter.grad is not None
                parameter.sub_(3e-3 * parameter.grad.sign())
                parameter.grad = None
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        last = model.forward(packed([stream]), want=torch.arange(40), targets=targets)
    engine = InferenceModel(SMALL, model.weights(), threads=1)
    assert same_bits(engine.logprobs(alone(engine, stream)[0], targets.numpy(), 1.0)[0], last.logprobs.numpy())


# --------------------------------------------------------------------------------------------------------------- sampling


@given(seed=st.integers(0, 999), scale=st.sampled_from([0.1, 3.0, 40.0]), temperature=st.sampled_from([0.3, 1.0, 2.5]))
@settings(max_examples=30, deadline=None)
def test_sampling_inverts_the_cumulative_distribution(seed: int, scale: float, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((20, SMALL.vocab_size))).astype(np.float32)
    uniforms = rng.random(20)
    ids, logprobs = MODEL.sample(logits, uniforms, temperature)
    exact = logits.astype(np.float64) / np.float64(np.float32(temperature))
    exact -= exact.max(1, keepdims=True)
    log_p = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    upper = np.exp(log_p).cumsum(1)
    row = np.arange(20)
    assert (upper[row, ids] >= uniforms - 1e-5).all()
    assert (upper[row, ids] - np.exp(log_p)[row, ids] <= uniforms + 1e-5).all()
    np.testing.assert_allclose(logprobs, log_p[row, ids], rtol=2e-6, atol=2e-6)
    assert same_bits(MODEL.logprobs(logits, ids, temperature)[0], logprobs)
    entropy = MODEL.logprobs(logits, ids, temperature)[1]
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(1), rtol=1e-4, atol=1e-5)


def test_sampling_frequencies_follow_the_probabilities() -> None:
    logits = np.random.default_rng(0).standard_normal((1, SMALL.vocab_size)).astype(np.float32)
    draws = 20_000
    ids, _ = MODEL.sample(np.repeat(logits, draws, 0), (np.arange(draws) + 0.5) / draws, 1.0)
    p = np.exp(logits[0] - logits[0].max())
    counts = np.bincount(ids, minlength=SMALL.vocab_size)
    assert np.abs(counts - draws * p / p.sum()).max() <= 1.01


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = np.full((2, SMALL.vocab_size), -1e4, np.float32)
    logits[:, [40, 60]] = 0.0
    ids, logprobs = MODEL.sample(logits, np.array([0.0, np.nextafter(1.0, 0.0)]), 1.0)
    assert ids.tolist() == [40, 60]
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_greedy_takes_the_lowest_of_equal_ids_and_reports_temperature_one() -> None:
    logits = np.zeros((3, SMALL.vocab_size), np.float32)
    logits[0, [5, 9]] = 2.0
    logits[1, 100] = 1.0
    ids, logprobs = MODEL.sample(logits, np.full(3, 0.99), np.array([0.0, 0.0, 0.0]))
    assert ids.tolist() == [5, 100, 0]
    assert same_bits(logprobs, MODEL.logprobs(logits, ids, 1.0)[0])


def test_each_row_has_its_own_temperature() -> None:
    logits = np.random.default_rng(3).standard_normal((3, SMALL.vocab_size)).astype(np.float32)
    temperatures = np.array([0.0, 0.5, 2.0], np.float32)
    ids, logprobs = MODEL.sample(logits, np.full(3, 0.7), temperatures)
    for i, t in enumerate(temperatures):
        one = MODEL.sample(logits[i : i + 1], np.array([0.7]), float(t))
        assert (ids[i], logprobs[i]) == (one[0][0], one[1][0])


@pytest.mark.parametrize("vocab", [1, 15, 16, 17])
def test_vocabularies_around_the_lane_width(vocab: int) -> None:
    config = DecoderConfig(**{f: getattr(SMALL, f) for f in SMALL.__slots__} | {"vocab_size": vocab})
    model = InferenceModel(config, random_weights(config), threads=1)
    logits = np.linspace(-1, 1, vocab, dtype=np.float32)[None]
    ids, _ = model.sample(np.repeat(logits, 50, 0), np.linspace(0, 0.999, 50), 1.0)
    assert ids.max() == vocab - 1
    assert ids.min() == 0
    np.testing.assert_allclose(np.exp(model.logprobs(np.repeat(logits, vocab, 0), np.arange(vocab), 1.0)[0]).sum(), 1.0, rtol=1e-5)
