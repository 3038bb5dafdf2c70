"""The token-level policy loss and its side terms.

Three log-probabilities of a sampled token meet here; names say who computed them:

- ``generator``: the engine, when it sampled (temperature applied);
- ``anchor``: the trainer, with the weights at the start of the optimizer step's batch, no gradient;
- ``policy``: the trainer, with the weights being trained, live gradient. In the first mini-batch ``policy == anchor`` bit for bit.

``policy / anchor`` is the ratio that is clipped; ``anchor / generator`` is the importance weight that is truncated. The second one
carries the numerical mismatch and the staleness, and is 1 exactly on-policy in exact mode.
Shape legend: N sampled tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.core.config import RlConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Constants of the policy loss.

    Attributes:
        ratio_low: Lower clip of policy/anchor, in ``(0, 1]``.
        ratio_high: Upper clip of policy/anchor, at least 1.
        importance_cap: Truncation of anchor/generator, at least 1.
        guard_low: A token whose anchor/generator lies below is left out and counted.
        guard_high: The same above.
        kl_coefficient: Weight of the k1 penalty against the reference.
        entropy_coefficient: Weight of the entropy bonus.
        aux_coefficient: Weight of the router's load-balancing loss.
    """

    ratio_low: float = 0.8
    ratio_high: float = 1.28
    importance_cap: float = 2.0
    guard_low: float = 0.1
    guard_high: float = 10.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    aux_coefficient: float = 0.0

    @classmethod
    def of(cls, config: RlConfig) -> LossConfig:
        """Take the constants out of the section ``rl`` of a run's configuration."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The summed loss of some tokens and what it was made of; no field but ``total`` has a gradient.

    Attributes:
        total: Sum over tokens, not yet divided by the normaliser.
        ratio: ``[N]`` policy/anchor.
        importance: ``[N]`` anchor/generator before truncation.
        is_clipped: ``bool [N]``, the clip cut the gradient of the token.
        is_dropped: ``bool [N]``, the guard left the token out.
    """

    total: Tensor
    ratio: Tensor
    importance: Tensor
    is_clipped: Tensor
    is_dropped: Tensor


def policy_loss(
    policy: Tensor, anchor: Tensor, generator: Tensor, advantage: Tensor, config: LossConfig, *, reference: Tensor | None = None
) -> PolicyLoss:
    """Return the clipped, importance-weighted policy-gradient loss, summed over tokens (no length term anywhere).

    ``-sum_t w_t min(r_t A_t, clip(r_t, low, high) A_t)`` with ``r = policy/anchor`` and ``w = min(anchor/generator, cap)``, constant.

    Source: clip: Schulman et al., arXiv 1707.06347, eq. 7, with the asymmetric band of Yu et al. (DAPO), arXiv 2503.14476, eq. 10;
    sum over tokens and a constant divisor: Liu et al. (Dr.GRPO), arXiv 2503.20783, section 3.2; decoupled anchor: Hilton et al.,
    arXiv 2110.00641, eq. 5; truncation: Espeholt et al. (IMPALA), arXiv 1802.01561, section 4.1, as token-level weights between
    sampler and trainer.

    With ``reference`` and ``kl_coefficient`` the advantage is lowered by ``kl_coefficient * k1``, ``k1 = policy - reference``, as a
    constant: the k1 estimate belongs into the reward, since differentiating it directly has an expected gradient of zero.
    Source: Schulman, "Approximating KL divergence" (2020); Tang and Munos, arXiv 2506.09477.

    Args:
        policy: ``[N]``, live.
        anchor: ``[N]``, constant.
        generator: ``[N]``, constant.
        advantage: ``[N]``, constant.
        config: Constants.
        reference: ``[N]`` log-probabilities under the reference weights, or ``None``.
    """
    importance = (anchor - generator).exp()
    is_dropped = ~((importance >= config.guard_low) & (importance <= config.guard_high))
    weight = importance.clamp(max=config.importance_cap).masked_fill(is_dropped, 0.0)
    if reference is not None and config.kl_coefficient:
        advantage = advantage - config.kl_coefficient * (policy.detach() - reference)
    ratio = (policy - anchor).exp()
    free = ratio * advantage
    bounded = ratio.clamp(config.ratio_low, config.ratio_high) * advantage
    gain = torch.minimum(free, bounded)
    # A dropped token's importance may be infinite or NaN: select, don't multiply by zero.
    total = -(torch.where(is_dropped, torch.zeros_like(gain), gain) * weight).sum()
    with torch.no_grad():
        is_clipped = (bounded < free) & ~is_dropped
    return PolicyLoss(total=total, ratio=ratio.detach(), importance=importance, is_clipped=is_clipped, is_dropped=is_dropped)


def supervised_loss(policy: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted cross entropy ``-sum_t weight_t log p_t``, summed over tokens. Both ``[N]``."""
    return -(policy * weight).sum()


def entropies(logits: Tensor) -> Tensor:
    """Return the entropy of every row in nats, ``[N, V] -> [N]``."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def k3(policy: Tensor, other: Tensor) -> Tensor:
    """Return the k3 estimate per token of KL(policy || other) on tokens sampled from ``policy``: ``r - 1 - log r``, ``r = other/policy``.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    difference = other - policy
    return difference.expm1() - difference
