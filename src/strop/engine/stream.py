"""One token stream as the engine keeps it: tokens, what was sampled, under which version, along which experts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from strop.core.episode import EpisodeKey, Trace, VersionSpan
from strop.core.route_pack import token_digest
from strop.core.routes import RouteOrigin, Routes, ids_digest
from strop.model.config import DecoderConfig
from strop.model.routing.families import router_spec
from strop.ports import Generation

BLOCK = 16
"""Tokens of a block of the prefix index."""


@dataclass(slots=True)
class Request:
    """One ``generate`` call.

    Attributes:
        max_new_tokens: Most tokens to sample.
        stop_ids: Tokens that end it.
        temperature: 0 is greedy.
        uniforms: One for each position.
        future: Resolves to the ``Generation``.
        arrived: Order of arrival.
        is_started: Whether any of its rows was computed.
        ticket: Its place in the queue: a new one, at the end, after each step that served it.
        sampled: Tokens so far.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    uniforms: list[float]
    future: asyncio.Future[Generation]
    arrived: int
    is_started: bool = False
    ticket: int = 0
    sampled: list[int] = field(default_factory=list)


class Stream:
    """State of one session. Only the engine's event loop touches it.

    What decode steps add waits in a list and is written to the arrays by ``flush``: one array write for many tokens.
    Invariants: ``computed <= length``; row ``i`` of the cache is valid for ``i < computed``; while a request runs, at least one token is
    pending. Row ``i`` was computed under the version of token ``i + 1``, because swaps never split the feed of a request.

    Args:
        key: Names the stream; sampling depends on it.
        slot: Its cache slot.
        max_tokens: Capacity.
        moe_layers: Layers with routes.
        top_k: Experts per token.
        num_experts: Decides the number type of routes.
        router: Digest of the model's router; ``b""`` leaves the origin of routes unsaid.
    """

    def __init__(
        self, key: EpisodeKey, slot: int, *, max_tokens: int, moe_layers: int, top_k: int, num_experts: int, router: bytes = b""
    ) -> None:
        self.key = key
        self.router = router
        self.slot = slot
        self.place = (key.task_id, key.phase, key.step, key.sample)  # samples of a group, which share a prompt, follow each other
        self.length = 0
        self.computed = 0
        self.ids = np.zeros(max_tokens, np.int32)
        self.mask = np.zeros(max_tokens, np.bool_)
        self.logprobs = np.zeros(max_tokens, np.float32)
        self.versions = np.zeros(max_tokens, np.int64)
        self.routes = np.zeros((max_tokens, moe_layers, top_k), np.uint8 if num_experts <= 256 else np.uint16)
        self.request: Request | None = None
        self.is_closed = False
        self.is_shareable = True  # every computed row belongs to the engine's current version
        self.cached_tokens = 0
        self.digests: list[int] = []
        self._tail: list[tuple[int, float, int, np.ndarray]] = []  # token, log-probability, version, routes of the row before it

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return self.length - self.computed

    @property
    def is_mid_feed(self) -> bool:
        """Whether a step computed a part of what was fed and left the rest (if only its last token) for later steps."""
        return self.request is not None and self.request.is_started and not self.request.sampled

    def append_fed(self, ids: Sequence[int] | np.ndarray, version: int) -> None:
        """Append tokens that came from outside."""
        self.flush()
        end = self.length + len(ids)
        self.ids[self.length : end] = ids
        self.versions[self.length : end] = version
        self.length = end

    def append_sampled(self, token: int, logprob: float, version: int) -> None:
        """Append a token that the policy sampled."""
        self.flush()
        at = self.length
        self.ids[at], self.mask[at], self.logprobs[at], self.versions[at] = token, True, logprob, version
        self.length = at + 1

    def append_decoded(self, token: int, logprob: float, version: int, routes: np.ndarray) -> None:
        """Append a token sampled from the row of the sampled token before it, whose ``routes [L, K]`` are now known."""
        self._tail.append((token, logprob, version, routes))
        self.length += 1
        self.computed += 1

    @property
    def next_token(self) -> int:
        """The first token that isn't computed yet."""
        return self._tail[-1][0] if self._tail else int(self.ids[self.computed])

    def flush(self) -> None:
        """Write what decode steps left to the arrays."""
        if not self._tail:
            return
        tokens, logprobs, versions, routes = zip(*self._tail, strict=True)
        start, end = self.length - len(tokens), self.length
        self.ids[start:end], self.logprobs[start:end], self.versions[start:end] = tokens, logprobs, versions
        self.mask[start:end] = True
        self.routes[start - 1 : end - 1] = routes
        self._tail.clear()

    def mark_computed(self, count: int, routes: np.ndarray, version: int) -> None:
        """Record that the next ``count`` rows were computed under ``version`` along ``routes [count, L, K]``."""
        self.flush()
        start, end = self.computed, self.computed + count
        self.routes[start:end] = routes
        if count > 1 or not self.mask[start]:
            fed = ~self.mask[start:end]
            self.versions[start:end][fed] = version
        self.computed = end

    def block_digests(self) -> list[int]:
        """Chained digests of the full blocks so far; equal digests mean equal prefixes (up to collisions, so compare tokens)."""
        self.flush()
        for start in range(len(self.digests) * BLOCK, self.length - BLOCK + 1, BLOCK):
            previous = self.digests[-1] if self.digests else 0
            self.digests.append(hash((previous, self.ids[start : start + BLOCK].tobytes())))
        return self.digests

    def trace(self) -> Trace:
        """The stream so far; rows that aren't computed have ``valid = False``."""
        self.flush()
        n = self.length
        rows = max(n - 1, 0)
        valid = np.arange(rows) < self.computed
        routes = self.routes[:rows].copy()
        routes[~valid] = 0
        origin = None
        if self.router and rows:
            spans = tuple((span.start, span.end, span.version) for span in version_spans(self.versions[1:n]))
            origin = RouteOrigin(router=self.router, tokens=token_digest(self.ids[:rows]), ids=ids_digest(routes, valid), versions=spans)
        return Trace(
            token_ids=self.ids[:n].copy(),
            loss_mask=self.mask[:n].copy(),
            logprobs=self.logprobs[:n].copy(),
            versions=version_spans(self.versions[:n]),
            routes=Routes(expert_ids=routes, valid=valid, origin=origin),
        )


def stream_shape(config: DecoderConfig) -> dict[str, Any]:
    """Return what a ``Stream`` must know of a model, as keyword arguments."""
    router = router_spec(config).digest()
    return {"moe_layers": config.num_layers, "top_k": config.top_k, "num_experts": config.num_experts, "router": router}


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return contiguous spans of equal versions: ``[3, 3, 4]`` gives spans ``[0, 2)`` of 3 and ``[2, 3)`` of 4."""
    if not len(versions):
        return ()
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(VersionSpan(start=a, end=b, version=int(versions[a])) for a, b in pairwise(edges))


def token_versions(trace: Trace) -> np.ndarray:
    """Inverse of ``version_spans``: ``int64 [L]``."""
    out = np.zeros(len(trace), np.int64)
    for span in trace.versions:
        out[span.start : span.end] = span.version
    return out
