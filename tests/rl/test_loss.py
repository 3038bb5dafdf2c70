"""The policy loss: values by hand, gradients against finite differences, planted extremes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.core.config import RlConfig
from strop.rl.loss import LossConfig, entropies, k3, policy_loss, supervised_loss

CONFIG = LossConfig(ratio_low=0.8, ratio_high=1.28, importance_cap=2.0)


def vectors(*values: list[float]) -> list[Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


def test_config_takes_every_field() -> None:
    config = LossConfig.of(RlConfig.model_validate({"ratio_low": 0.7, "guard_high": 20.0}))
    assert (config.ratio_low, config.guard_high, config.importance_cap) == (0.7, 20.0, 2.0)


def test_on_policy_ratio_is_exactly_one_and_gradient_is_the_advantage() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    policy = logits.log_softmax(-1)[:, 3].requires_grad_()
    advantage = torch.linspace(-1, 1, 50)
    result = policy_loss(policy, policy.detach(), policy.detach(), advantage, CONFIG)
    assert torch.equal(result.ratio, torch.ones(50))
    assert torch.equal(result.importance, torch.ones(50))
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert torch.equal(gradient, -advantage)
    assert not result.is_clipped.any()


def test_clip_cuts_the_gradient_on_the_far_side_only() -> None:
    anchor, advantage = vectors([-1.0] * 4, [1.0, 1.0, -1.0, -1.0])
    policy = (anchor + torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64))).requires_grad_()
    result = policy_loss(policy, anchor, anchor, advantage, CONFIG)
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert result.is_clipped.tolist() == [True, False, False, True]
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert result.total.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8))


def test_importance_is_truncated_and_guarded() -> None:
    anchor, generator, advantage = vectors([-1.0, -1.0, -1.0, -1.0], [-1.0, -2.2, -5.0, 4.0], [1.0] * 4)
    policy = anchor.clone().requires_grad_()
    result = policy_loss(policy, anchor, generator, advantage, CONFIG)
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert result.is_dropped.tolist() == [False, False, True, True]
    assert gradient.tolist() == pytest.approx([-1.0, -2.0, 0.0, 0.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_dropped_token_poisons_nothing(bad: float) -> None:
    anchor, generator, advantage = vectors([-1.0, -1.0], [-1.0, bad], [1.0, 1.0])
    policy = anchor.clone().requires_grad_()
    result = policy_loss(policy, anchor, generator, advantage, CONFIG)
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert gradient.tolist() == [-1.0, 0.0]
    assert result.total.item() == -1.0


def finite_difference(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    out = torch.zeros_like(at)
    for i in range(at.numel()):
        shift = torch.zeros_like(at).view(-1)
        shift[i] = step
        shift = shift.view_as(at)
        out.view(-1)[i] = (function(at + shift) - function(at - shift)) / (2 * step)
    return out


@pytest.mark.parametrize("case", ["policy", "entropy", "supervised"])
def test_gradients_equal_finite_differences(case: str) -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 5, (9, 1), generator=draw)
    anchor = logits.log_softmax(-1).gather(1, targets)[:, 0] + 0.3 * torch.randn(9, generator=draw, dtype=torch.float64)
    generator = anchor + 0.4 * torch.randn(9, generator=draw, dtype=torch.float64)
    advantage = torch.randn(9, generator=draw, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        logprobs = x.log_softmax(-1).gather(1, targets)[:, 0]
        if case == "policy":
            return policy_loss(logprobs, anchor, generator, advantage, CONFIG).total
        return entropies(x).sum() if case == "entropy" else supervised_loss(logprobs, advantage)

    live = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(live), live)
    assert torch.allclose(gradient, finite_difference(function, logits), atol=1e-7)


def test_k1_penalty_lowers_the_advantage_by_the_log_ratio() -> None:
    config = LossConfig(kl_coefficient=0.5)
    anchor, reference, advantage = vectors([-1.0, -1.0], [-2.0, -0.5], [1.0, 1.0])
    policy = anchor.clone().requires_grad_()
    result = policy_loss(policy, anchor, anchor, advantage, config, reference=reference)
    (gradient,) = torch.autograd.grad(result.total, policy)
    assert gradient.tolist() == pytest.approx([-(1 - 0.5 * 1.0), -(1 + 0.5 * 0.5)])


def test_k1_penalty_has_the_gradient_of_the_divergence_in_expectation() -> None:
    """Summed over the whole distribution, the penalty's gradient is that of KL(policy || reference)."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(6, generator=draw, dtype=torch.float64)
    reference = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(-1)
    live = logits.clone().requires_grad_()
    logprobs = live.log_softmax(-1)
    config = LossConfig(kl_coefficient=1.0)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(6):
        policy = logprobs[token : token + 1]
        result = policy_loss(
            policy, policy.detach(), policy.detach(), torch.zeros(1, dtype=torch.float64), config, reference=reference[token : token + 1]
        )
        total = total + result.total * policy.detach().exp().item()
    (penalty,) = torch.autograd.grad(total, live)
    other = logits.clone().requires_grad_()
    q = other.log_softmax(-1)
    (divergence,) = torch.autograd.grad((q.exp() * (q - reference)).sum(), other)
    assert torch.allclose(penalty, divergence)


def test_k3_is_never_negative_and_zero_on_equals() -> None:
    policy, other = vectors([-1.0, -2.0, -3.0], [-1.0, -1.0, -4.0])
    values = k3(policy, other)
    assert values[0] == 0
    assert (values >= 0).all()
