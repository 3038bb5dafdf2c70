"""AdamW with a state that can be saved, and the checks before a step. Every operation is one correctly rounded elementwise operation, so
that neither thread count nor vector width changes a bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.core.errors import CheckpointError, NumericsError, nearest


class AdamW:
    """Adam with decoupled weight decay on matrices.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.

    Args:
        parameters: Name to leaf tensor; updated in place.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Per step, times the learning rate; tensors of fewer than two dimensions (norms) are exempt.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        self.parameters = dict(sorted(parameters.items()))
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.steps = 0
        self.first = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def grad_norm(self) -> float:
        """Return the global gradient norm.

        Raises:
            NumericsError: A gradient holds NaN or infinity; names the tensor. Nothing was changed.
        """
        total = 0.0
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            # numpy sums pairwise on one thread: the same bits on any machine with any thread count
            square = float(np.square(parameter.grad.detach().cpu().numpy(), dtype=np.float64).sum())
            if not math.isfinite(square):
                raise NumericsError(f"gradient of {name} is not finite ({_describe(parameter.grad)}); no weight was changed")
            total += square
        return math.sqrt(total)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient.

        Args:
            learning_rate: Step size.
            grad_scale: Factor on every gradient (clipping).
        """
        self.steps += 1
        beta1, beta2 = self.betas
        rate = learning_rate / (1 - beta1**self.steps)
        root_correction = math.sqrt(1 - beta2**self.steps)
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            grad = parameter.grad * grad_scale
            first, second = self.first[name], self.second[name]
            first.mul_(beta1).add_(grad * (1 - beta1))
            second.mul_(beta2).add_(grad.mul_(grad).mul_(1 - beta2))
            if self.weight_decay and parameter.ndim >= 2:
                parameter.mul_(1 - learning_rate * self.weight_decay)
            denominator = second.sqrt().div_(root_correction).add_(self.eps)
            parameter.sub_((first / denominator).mul_(rate))

    def state(self) -> dict[str, Any]:
        """Return moments and step count; tensors are copies."""
        return {
            "steps": self.steps,
            "first": {name: tensor.clone() for name, tensor in self.first.items()},
            "second": {name: tensor.clone() for name, tensor in self.second.items()},
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            CheckpointError: A tensor is missing, unknown or of another shape.
        """
        copy_tensors(self.first, state["first"], "first moment")
        copy_tensors(self.second, state["second"], "second moment")
        self.steps = int(state["steps"])


@torch.no_grad()
def copy_tensors(target: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors by name, all or none.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape; names it.
    """
    for name in target:
        if name not in source:
            raise CheckpointError(f"{what} of {name} is missing in the saved state.{nearest(name, source)}")
        if target[name].shape != source[name].shape:
            raise CheckpointError(
                f"{what} of {name} has shape {list(source[name].shape)} in the saved state, expected {list(target[name].shape)}"
            )
    unknown = sorted(set(source) - set(target))
    if unknown:
        raise CheckpointError(f"saved state holds a {what} that the model doesn't have: {', '.join(unknown[:3])}")
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _describe(tensor: Tensor) -> str:
    bad = torch.nonzero(~torch.isfinite(tensor))
    where = bad[0].tolist() if len(bad) else []
    return f"{len(bad)} of {tensor.numel()} values, first at {where}" if len(bad) else "its square overflows"
