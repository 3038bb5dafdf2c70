"""Capture and replay of routes in transformers models, one pass at a time.

Replay looks a row's routes up by (layer, rows of this pass), never by the order of calls: gradient checkpointing runs a layer twice, and
the second run must see what the first saw. A tape ends when its ``with`` block ends; outside of it the model is untouched.

Shape legend: R rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from strop.core.errors import NumericsError
from strop.core.routes import RouterSpec
from strop.model.routing.families import BoundRouter, bind_routers, chosen_set, spec_of

Policy = Callable[[BoundRouter, Tensor, Tensor, Tensor], Tensor]
"""Decides a layer's routes: router, live logits ``[R, E]``, live ids ``[R, K]``, recorded ids ``[R, K]`` -> ids ``[R, K]``."""


class RouteTape:
    """Records the routes of every pass in its block; with ``routes`` it replays them.

    Example::

        with RouteTape(model) as tape:
            model(ids)
        with RouteTape(model, routes=tape.routes()) as again:
            model(ids)

    Args:
        model: A transformers model of a known family.
        routes: ``int [R, L, K]``, rows in the order in which the model sees them (batch first); ``None`` captures only.
        valid: ``bool [R]``; other rows take the live router's choice and are counted. ``None``: every row is.
        policy: What to do with live and recorded ids; by default the recorded ones are used.
        routers: The model's, where they are bound already.

    Raises:
        NumericsError: Routes of another shape, or ids that no router makes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        routes: np.ndarray | Tensor | None = None,
        valid: np.ndarray | None = None,
        policy: Policy | None = None,
        routers: list[BoundRouter] | None = None,
    ) -> None:
        self.routers = routers or bind_routers(model)
        self.spec: RouterSpec = spec_of(self.routers)
        self.policy = policy
        self.fallback_rows = 0
        self._recorded = None if routes is None else self._checked(torch.as_tensor(np.asarray(routes).astype(np.int64)))
        self._valid = None if valid is None else torch.as_tensor(valid)
        if self._recorded is not None and self._valid is not None:
            if len(self._valid) != len(self._recorded):
                raise NumericsError(f"valid has {len(self._valid)} rows, the routes {len(self._recorded)}")
            self.fallback_rows = int((~self._valid).sum())
        self._used: dict[int, Tensor] = {}
        self._natural: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}
        """Runs of each layer; more than one where a layer was computed again for the backward pass."""
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> RouteTape:
        for number, router in enumerate(self.routers):
            self._handles.append(router.module.register_forward_hook(self._hook(number, router)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if error is None and self._recorded is not None and len(self._used) != len(self.routers):
            missing = [router.name for number, router in enumerate(self.routers) if number not in self._used]
            raise NumericsError(f"recorded routes were not used: {len(missing)} routers never ran, first {missing[0]!r}")

    def routes(self) -> np.ndarray:
        """Routes that the pass used, ``int64 [R, L, K]``, ascending within a row."""
        return self._stack(self._used)

    def natural(self) -> np.ndarray:
        """Routes that the live routers would have used, ``int64 [R, L, K]``, ascending within a row."""
        return self._stack(self._natural)

    def logits(self) -> list[Tensor]:
        """Live router logits of every MoE layer, ``[R, E]`` each, with gradient: what auxiliary losses take."""
        return [self._logits[number] for number in range(len(self.routers))]

    def preferences(self) -> np.ndarray:
        """What the routers ordered experts by, ``float32 [R, L, E]``, with the bias of the choice."""
        layers = [router.preference(self._logits[number]).detach().cpu() for number, router in enumerate(self.routers)]
        return torch.stack(layers, dim=1).numpy()

    def _stack(self, parts: dict[int, Tensor]) -> np.ndarray:
        if len(parts) != len(self.routers):
            raise NumericsError(f"{len(parts)} of {len(self.routers)} routers ran in this block")
        return torch.stack([parts[number] for number in range(len(self.routers))], dim=1).cpu().numpy()

    def _checked(self, routes: Tensor) -> Tensor:
        layers, top_k = len(self.spec.layers), self.spec.top_k
        if routes.ndim != 3 or tuple(routes.shape[1:]) != (layers, top_k):
            raise NumericsError(f"routes are {list(routes.shape)}, this model needs [rows, {layers}, {top_k}] (layers {self.spec.layers})")
        return routes

    def _hook(self, number: int, router: BoundRouter) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
            logits, weights, ids = output
            natural = chosen_set(ids.detach())
            self._natural[number], self._logits[number] = natural, logits
            self.calls[number] = self.calls.get(number, 0) + 1
            if self._recorded is None:
                self._used[number] = natural
                return None
            used = self._decide(number, router, logits, natural)
            self._used[number] = used
            return logits, router.weights(logits, used).to(weights.dtype), used

        return hook

    def _decide(self, number: int, router: BoundRouter, logits: Tensor, natural: Tensor) -> Tensor:
        assert self._recorded is not None
        if len(self._recorded) != len(natural):
            raise NumericsError(f"the model sees {len(natural)} rows, the record has {len(self._recorded)}; routes are never cut or padded")
        recorded = self._recorded[:, number].to(natural.device)
        valid = torch.ones(len(recorded), dtype=torch.bool) if self._valid is None else self._valid
        valid = valid.to(natural.device)
        recorded = torch.where(valid[:, None], recorded, natural)
        if int(recorded.min()) < 0 or int(recorded.max()) >= router.experts:
            raise NumericsError(f"routes of layer {router.layer} name an expert outside 0..{router.experts - 1}: another model's record?")
        recorded = chosen_set(recorded)
        if self.spec.top_k > 1 and bool((recorded[:, 1:] == recorded[:, :-1]).any()):
            raise NumericsError(f"routes of layer {router.layer} name an expert twice in one row")
        if self.policy is None:
            return recorded
        chosen = chosen_set(self.policy(router, logits.detach(), natural, recorded))
        return torch.where(valid[:, None], chosen, natural)


def fragile_only(margin: float) -> Policy:
    """Replay where the live K-th expert leads the next one by less than ``margin``, in the unit of the router's preference."""

    def policy(router: BoundRouter, logits: Tensor, natural: Tensor, recorded: Tensor) -> Tensor:
        preference = router.preference(logits)
        top = preference.topk(min(router.top_k + 1, router.experts), dim=-1).values
        lead = top[:, router.top_k - 1] - top[:, -1] if router.experts > router.top_k else torch.full_like(top[:, 0], torch.inf)
        return torch.where((lead < margin)[:, None], recorded, natural)

    return policy


def plausible(gap: float) -> Policy:
    """Give up recorded experts that lie more than ``gap`` below the live K-th preference; the router's best others take their place.

    Only the score counts: where a router with groups passed an expert over because of its group, the expert stays plausible.
    """

    def policy(router: BoundRouter, logits: Tensor, natural: Tensor, recorded: Tensor) -> Tensor:
        preference = router.preference(logits)
        kth = preference.gather(1, natural).min(-1, keepdim=True).values
        stays = preference.gather(1, recorded) >= kth - gap
        # Whoever stays goes first, then the live choice, then the rest in order of preference.
        order = torch.sort(preference, dim=-1, descending=True, stable=True).indices
        rank = torch.sort(order, dim=-1).indices.float()
        first = torch.zeros_like(rank).scatter(1, natural, -1.0 * router.experts)
        first = torch.where(torch.zeros_like(rank, dtype=torch.bool).scatter(1, recorded, stays), -2.0 * router.experts, first)
        return (first + rank).topk(router.top_k, dim=-1, largest=False).indices

    return policy
