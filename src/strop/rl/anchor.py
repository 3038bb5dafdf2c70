"""Run-to-run anchor: routers of a new run start close to those of a recorded one, hard at first, then less and less.

A record has the routes of streams that the good run saw, and a distilled form that carries over to data it never saw: for every layer
and token class, how often each expert was chosen. The class of a token is its id, modulo the number of classes.

Shape legend: R rows, L MoE layers, K experts per token, E experts, C token classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from torch import Tensor

from strop.core.config import RoutesConfig
from strop.core.errors import CheckpointError, ConfigError
from strop.core.route_pack import RoutePack, token_digest
from strop.core.routes import RouterSpec
from strop.rl.pack import MicroBatch
from strop.rl.scoring import ScoringModel, score
from strop.store.files import write_atomic

FOLDER, FACTS, CLASSES, PACKS = "routes", "record.json", "classes.safetensors", "packs.bin"
MAX_CLASSES = 8192


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """Routes that a run keeps for later ones.

    Attributes:
        spec: Of the router.
        counts: ``int64 [L, C, E]`` choices of each expert by token class.
        packs: One for every stream, from its first row.
        facts: Where they come from; JSON values.
    """

    spec: RouterSpec
    counts: np.ndarray
    packs: tuple[RoutePack, ...]
    facts: Mapping[str, Any]


def distil(streams: Iterable[tuple[np.ndarray, np.ndarray]], *, spec: RouterSpec, vocab: int) -> np.ndarray:
    """Count expert choices by layer and token class.

    Args:
        streams: Token ids ``[R]`` and expert ids ``[R, L, K]`` of each.
        spec: Of the router.
        vocab: Size of the vocabulary; beyond ``MAX_CLASSES`` ids share classes.

    Returns:
        ``int64 [L, C, E]``.
    """
    classes = min(vocab, MAX_CLASSES)
    counts = np.zeros((len(spec.layers), classes, spec.experts), np.int64)
    for token_ids, expert_ids in streams:
        flat = (token_ids.astype(np.int64) % classes)[:, None] * spec.experts
        for layer in range(len(spec.layers)):
            places = (flat + expert_ids[:, layer].astype(np.int64)).reshape(-1)
            counts[layer] += np.bincount(places, minlength=classes * spec.experts).reshape(classes, spec.experts)
    return counts


def save_record(folder: Path, record: RouteRecord) -> None:
    """Write a record into a run directory's ``routes`` folder; each file appears whole or not at all.

    Raises:
        CheckpointError: The disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [pack.encode() for pack in record.packs]
    write_atomic(folder / PACKS, b"".join(len(data).to_bytes(4, "little") + data for data in encoded))
    write_atomic(folder / CLASSES, save_tensors({"counts": record.counts}))
    spec = {name: getattr(record.spec, name) for name in RouterSpec.__dataclass_fields__}
    body = {"format": 1, "router": spec, "streams": len(record.packs), **record.facts}
    write_atomic(folder / FACTS, (json.dumps(body, indent=2) + "\n").encode())


def load_record(folder: Path) -> RouteRecord:
    """Inverse of ``save_record``.

    Raises:
        CheckpointError: Missing or damaged; names the file.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        spec = RouterSpec(**(facts["router"] | {"layers": tuple(facts["router"]["layers"])}))
        counts = load_tensors((folder / CLASSES).read_bytes())["counts"]
        packs = tuple(_read_packs((folder / PACKS).read_bytes(), str(folder / PACKS)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing: no record of routes; write one with strop routes record") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"the record of routes in {folder} is damaged: {error!r}") from None
    if counts.ndim != 3 or (counts.shape[0], counts.shape[2]) != (len(spec.layers), spec.experts):
        raise CheckpointError(f"{folder / CLASSES} has counts {counts.shape}, expected [{len(spec.layers)}, classes, {spec.experts}]")
    strangers = [pack for pack in packs if pack.router != spec.digest() or pack.start]
    if strangers or len(packs) != facts["streams"]:
        raise CheckpointError(f"{folder / PACKS}: {len(packs)} packs of {facts['streams']}, {len(strangers)} of another router")
    return RouteRecord(spec, counts, packs, {key: value for key, value in facts.items() if key not in ("format", "router", "streams")})


def _read_packs(data: bytes, name: str) -> Iterator[RoutePack]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield RoutePack.decode(data[at + 4 : at + 4 + size], f"{name} at byte {at}")
        at += 4 + size


@dataclass(frozen=True, slots=True)
class Pull:
    """What the anchor finds on one micro-batch.

    Attributes:
        nats: Mean over rows and layers of KL(record || live router), live; 0 on classes that the record never saw.
        agreement: Share of live choices among the record's most frequent experts of the class.
    """

    nats: Tensor
    agreement: float


class RouteAnchor:
    """A record with a schedule.

    Args:
        record: The routes.
        settings: Section ``routes``.
        device: Of the model.
    """

    def __init__(self, record: RouteRecord, settings: RoutesConfig, device: torch.device) -> None:
        self.settings, self.device, self.spec = settings, device, record.spec
        total = record.counts.sum(-1, keepdims=True)
        self._table = torch.from_numpy((record.counts / np.maximum(total, 1)).astype(np.float32)).to(device)
        self._known = torch.from_numpy(total[0, :, 0] > 0).to(device)
        self._favourites = self._table.topk(record.spec.top_k, dim=-1).indices
        self._streams = {pack.tokens: pack for pack in record.packs}

    def weight(self, step: int) -> float:
        """Weight of the pull at a step of a phase: full at step 0, 0 from ``routes.anchor_steps`` on."""
        return self.settings.anchor_weight * max(0.0, 1.0 - step / self.settings.anchor_steps)

    def pull(self, micro: MicroBatch, forward: Any) -> Pull:
        """Return how far the live routers lie from the record.

        Args:
            micro: Gives the token classes.
            forward: ``router_logits`` L of ``[R, E]``, live, and ``natural_ids`` ``[R, L, K]``.
        """
        classes = torch.from_numpy(micro.token_ids % self._table.shape[1]).to(self.device)
        known = self._known[classes]
        count = known.sum().clamp(min=1) * len(forward.router_logits)
        nats = torch.zeros((), device=self.device)
        for table, logits in zip(self._table, forward.router_logits, strict=True):
            wanted = table[classes]
            distance = torch.special.xlogy(wanted, wanted).sum(-1) - (wanted * logits.float().log_softmax(-1)).sum(-1)
            nats = nats + (distance * known).sum() / count
        favourites = self._favourites[:, classes].transpose(0, 1)  # [R, L, K]
        agrees = (forward.natural_ids.unsqueeze(-1) == favourites.unsqueeze(-2)).any(-1).float().mean((1, 2))
        return Pull(nats, float((agrees * known).sum() / known.sum().clamp(min=1)))

    def routes(self, model: ScoringModel, micro: MicroBatch, step: int) -> tuple[np.ndarray | None, float]:
        """Return the routes of a supervised pass, ``int64 [R, L, K]`` or ``None`` for live ones, and the share of rows from the record.

        Args:
            model: Asked for its live choice on streams that the record doesn't know.
            micro: The micro-batch.
            step: Of the phase; from ``routes.anchor_hard_steps`` on every route is live.
        """
        found = self._recorded(micro) if step < self.settings.anchor_hard_steps else None
        if found is None:
            return None, 0.0
        ids, known = found
        if not known.all():
            with torch.no_grad():
                live = score(model, micro, temperature=1.0, device=self.device).forward.natural_ids.cpu().numpy()
            ids = np.where(known[:, None, None], ids, live)
        return ids, float(known.mean())

    def _recorded(self, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray] | None:
        """Recorded routes of the streams that the record knows, ``int64 [R, L, K]`` and ``bool [R]``; ``None`` without any."""
        ids = np.zeros((len(micro.token_ids), len(self.spec.layers), self.spec.top_k), np.int64)
        known = np.zeros(len(micro.token_ids), np.bool_)
        at = 0
        for length in micro.lengths:
            pack = self._streams.get(token_digest(micro.token_ids[at : at + length]))
            if pack is not None:
                ids[at : at + length], known[at : at + length] = pack.expert_ids, pack.valid
            at += length
        return (ids, known) if known.any() else None


def load_anchor(settings: RoutesConfig, spec: RouterSpec, phase: str, device: torch.device) -> RouteAnchor | None:
    """Return the anchor of a phase, or ``None`` where the configuration names none for it.

    Raises:
        ConfigError: The record belongs to another router.
        CheckpointError: Missing or damaged.
    """
    if not settings.anchor or phase not in settings.anchor_phases:
        return None
    record = load_record(Path(settings.anchor) / FOLDER)
    if record.spec != spec:
        raise ConfigError(f"routes.anchor = {settings.anchor!r} has routes of {record.spec}, this model is {spec}")
    return RouteAnchor(record, settings, device)
