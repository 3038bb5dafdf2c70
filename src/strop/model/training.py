"""The trained network: differentiable log-probabilities of chosen tokens.

``exact`` runs the kernels that also generate, so a log-probability has the rollout's very bits; its backward pass is theirs too.
``tolerant`` runs the torch ``Decoder`` on any device (on cuda: written, not yet run).

Shape legend as in ``decoder``: R rows, W wanted rows, L layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from strop.core.errors import ConfigError, NumericsError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.model.native.bindings import Net, TrainArrays
from strop.model.native.weights import raw_arrays, weight_names


@dataclass(frozen=True, slots=True)
class TrainForward:
    """What a forward pass gives the losses.

    Attributes:
        logprobs: ``float32 [W]``, log-probability of each target at the temperature; differentiable.
        entropy: ``float32 [W]``, in nats, at the temperature; differentiable.
        router_logits: L tensors ``float32 [R, E]``; differentiable.
        expert_ids: ``int64 [R, L, K]`` routes used, ascending within a row.
        natural_ids: ``int64 [R, L, K]`` routes that the live router would have used.
    """

    logprobs: Tensor
    entropy: Tensor
    router_logits: list[Tensor]
    expert_ids: Tensor
    natural_ids: Tensor


class TrainModel:
    """Parameters and their forward pass.

    Args:
        config: Sizes.
        weights: Initial values under Hugging Face names, experts fused; copied.
        mode: ``"exact"`` (CPU kernels, bit-identical to ``InferenceModel``) or ``"tolerant"`` (torch).
        threads: CPU threads of exact mode; 0 means all cores that this process may use.
        device: Where the parameters live.

    Raises:
        ConfigError: Exact mode elsewhere than on the CPU.
        WeightsError: A tensor is missing, unknown or misshapen.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Any],
        *,
        mode: Literal["exact", "tolerant"] = "exact",
        threads: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        if mode not in ("exact", "tolerant"):
            raise ConfigError(f"mode {mode!r} must be 'exact' or 'tolerant'")
        self.config, self.mode, self.device = config, mode, torch.device(device)
        if mode == "exact" and self.device.type != "cpu":
            raise ConfigError(f"exact mode runs on the CPU only, got device {str(device)!r}; use numerics.mode = 'tolerant' there")
        arrays = raw_arrays(config, weights)
        self._short = {name: short for name, (short, _) in weight_names(config).items()}
        self.parameters = {
            name: nn.Parameter(torch.tensor(arrays[short], dtype=torch.float32, device=self.device)) for name, short in self._short.items()
        }
        self._net = Net(config, threads=threads, trains=True) if mode == "exact" else None
        self._decoder = _skeleton(config, self.device) if mode == "tolerant" else None

    def weights(self) -> dict[str, Tensor]:
        """Detached views of the parameters, the tied head included."""
        result = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if self.config.tie_embeddings:
            result["lm_head.weight"] = result["model.embed_tokens.weight"]
        return result

    def forward(
        self, packed: PackedTokens, *, want: Tensor, targets: Tensor, temperature: float = 1.0, forced_routes: Tensor | None = None
    ) -> TrainForward:
        """Run all rows and score the wanted ones.

        Args:
            packed: Streams that begin at position 0.
            want: ``int64 [W]`` rows whose next token is scored; a row may be wanted more than once.
            targets: ``int64 [W]`` those next tokens.
            temperature: Above 0.
            forced_routes: ``int64 [R, L, K]`` experts to use instead of the router's choice (scores stay live), or ``None``.

        Raises:
            NumericsError: Rows, targets or routes outside the model; names the value.
        """
        if not temperature > 0:
            raise NumericsError(f"temperature must be above 0 in training, got {temperature}")
        want, targets = want.to(torch.int64).flatten(), targets.to(torch.int64).flatten()
        forced = self._check(packed, want, targets, forced_routes)
        if self._decoder is not None:
            return self._tolerant(self._decoder, packed, want, targets, temperature, forced)
        batch = TrainArrays(
            packed.token_ids.to(torch.int32).cpu().numpy(),
            np.asarray(packed.lengths, np.int64),
            want.to(torch.int32).cpu().contiguous().numpy(),
            targets.cpu().contiguous().numpy(),
            None if forced is None else forced.cpu().contiguous().numpy(),
            float(np.float32(temperature)),
        )
        values = list(self.parameters.values())
        logprobs, entropy, router, chosen, natural = _ExactPass.apply(self, batch, torch.is_grad_enabled(), *values)
        return TrainForward(logprobs, entropy, list(router.unbind(0)), chosen, natural)

    def _check(self, packed: PackedTokens, want: Tensor, targets: Tensor, forced: Tensor | None) -> Tensor | None:
        c, rows = self.config, len(packed.token_ids)
        starts = np.repeat(np.cumsum((0, *packed.lengths[:-1])), packed.lengths)
        if rows == 0 or sum(packed.lengths) != rows or min(packed.lengths) < 1:
            raise NumericsError(f"packed lengths {packed.lengths[:8]} must be positive and sum to the {rows} rows")
        if not np.array_equal(packed.positions.cpu().numpy(), np.arange(rows) - starts):
            raise NumericsError("every packed stream must have positions 0, 1, 2, ...")
        if len(want) == 0 or len(want) != len(targets):
            raise NumericsError(f"want and targets need equal, non-zero lengths, got {len(want)} and {len(targets)}")
        limits = (("token id", packed.token_ids, c.vocab_size), ("want", want, rows), ("target", targets, c.vocab_size))
        for name, tensor, end in limits if forced is None else (*limits, ("forced route", forced, c.num_experts)):
            low, high = int(tensor.min()), int(tensor.max())
            if low < 0 or high >= end:
                raise NumericsError(f"{name} {low if low < 0 else high} is outside 0..{end - 1}")
        if forced is None:
            return None
        if tuple(forced.shape) != (rows, c.num_layers, c.top_k):
            raise NumericsError(f"forced_routes must be [{rows}, {c.num_layers}, {c.top_k}], got {list(forced.shape)}")
        ascending = forced.to(torch.int64).sort(dim=-1).values
        if c.top_k > 1 and bool((ascending[..., 1:] == ascending[..., :-1]).any()):
            raise NumericsError("forced_routes name an expert twice in one row and layer")
        return ascending

    def _tolerant(
        self, decoder: Decoder, packed: PackedTokens, want: Tensor, targets: Tensor, temperature: float, forced: Tensor | None
    ) -> TrainForward:
        device = self.device
        moved = PackedTokens(packed.token_ids.to(device), packed.positions.to(device), packed.lengths)
        forced = None if forced is None else forced.to(device)
        values: dict[str, Tensor] = dict(self.parameters)
        if self.config.tie_embeddings:
            values["lm_head.weight"] = values["model.embed_tokens.weight"]
        out = torch.func.functional_call(decoder, values, (moved, forced), tie_weights=False)
        logits = nn.functional.linear(out.hidden[want.to(device)].float(), values["lm_head.weight"].float())
        log_p = (logits / temperature).log_softmax(-1)
        logprobs = log_p.gather(1, targets.to(device)[:, None]).squeeze(1)
        natural = out.expert_ids
        if forced is not None:
            natural = torch.stack(
                [x.detach().topk(self.config.top_k, dim=-1).indices.sort(dim=-1).values for x in out.router_logits], dim=1
            )
        return TrainForward(logprobs, -(log_p.exp() * log_p).sum(-1), out.router_logits, out.expert_ids, natural)


def _skeleton(config: DecoderConfig, device: torch.device) -> Decoder:
    """The decoder's code without memory for weights."""
    with torch.device("meta"):
        return Decoder(config, has_wide_attention=device.type == "cpu")


class _ExactPass(torch.autograd.Function):
    """The whole network as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, model: TrainModel, batch: TrainArrays, keep: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        assert model._net is not None
        c = model.config
        # Packed on every pass: it costs milliseconds, and nothing tells reliably whether an optimizer wrote to the parameters.
        model._net.load(dict(zip(model.parameters, parameters, strict=True)))
        logprobs, entropy = torch.empty(len(batch.want)), torch.empty(len(batch.want))
        router = torch.empty(c.num_layers, len(batch.tokens), c.num_experts)
        tape, chosen, natural = model._net.train_forward(batch, logprobs.numpy(), entropy.numpy(), router.numpy())
        if keep:
            ctx.model, ctx.tape = model, tape
        else:
            tape.release()
        ctx.set_materialize_grads(False)
        routes = torch.from_numpy(chosen).long(), torch.from_numpy(natural).long()
        ctx.mark_non_differentiable(*routes)
        return logprobs, entropy, router, *routes

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Any, ...]:
        model, tape = ctx.model, ctx.tape
        g_logprobs, g_entropy, g_router = outputs[:3]
        if not tape.handle:
            raise NumericsError("this forward pass was already used for a backward pass; run forward again")
        grads = {name: torch.empty_like(parameter) for name, parameter in model.parameters.items()}
        arrays = {model._short[name]: grad.numpy() for name, grad in grads.items()}
        wants = [_dense(g, tape.wants) for g in (g_logprobs, g_entropy)]
        router = None if g_router is None else g_router.contiguous().numpy()
        model._net.train_backward(tape, wants[0], wants[1], router, arrays)
        return None, None, None, *grads.values()


def _dense(gradient: Tensor | None, count: int) -> np.ndarray:
    return np.zeros(count, np.float32) if gradient is None else gradient.contiguous().numpy()
