"""Feeds a recorded stream again: for replay, canaries and comparisons of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from strop.core.episode import EpisodeKey, Trace
from strop.core.random import uniforms
from strop.core.routes import Routes
from strop.engine.backend import Cache, ModelBackend, RowBlock
from strop.engine.stream import token_versions, version_spans


def recompute_trace(
    model: ModelBackend,
    cache: Cache,
    trace: Trace,
    *,
    seed: int,
    version: int,
    temperature: float,
    key: EpisodeKey | None,
    weights_for: Callable[[int], Mapping[str, Any]] | None,
    chunk: int,
) -> Trace:
    """See ``EmbeddedEngine.recompute``; uses slot 0 of ``cache``. ``chunk`` is the most rows of one model call."""
    count = len(trace)
    ids, mask = trace.token_ids, trace.loss_mask
    recorded = token_versions(trace)
    # Row i was computed under the version of token i + 1: swaps happen between steps, and a step samples or feeds the token after its rows.
    row_versions = recorded[1:] if weights_for else np.full(max(count - 1, 0), version)
    draws = uniforms(seed, key, 0, count) if key is not None else np.zeros(count)
    shape = model.config
    routes = np.zeros((max(count - 1, 0), shape.num_layers, shape.top_k), np.uint8 if shape.num_experts <= 256 else np.uint16)
    tokens, logprobs = ids.copy(), np.zeros(count, np.float32)
    loaded = version
    try:
        for start, end in _pieces(row_versions, chunk):
            needed = int(row_versions[start])
            if weights_for is not None and needed != loaded:
                model.load(weights_for(needed))
                loaded = needed
            want = np.flatnonzero(mask[start + 1 : end + 1]).astype(np.int32)
            rows = RowBlock(ids[start:end].copy(), np.arange(start, end, dtype=np.int32), np.zeros(end - start, np.int32))
            result = model.infer(rows, cache, want)
            routes[start:end] = result.expert_ids
            if not len(want):
                continue
            at = want + start + 1
            if key is None:
                logprobs[at] = model.logprobs(result.logits, ids[at], temperature or 1.0)[0]
            else:
                tokens[at], logprobs[at] = model.sample(result.logits, draws[at], temperature)
    finally:
        if weights_for is not None and loaded != version:
            model.load(weights_for(version))
    return Trace(
        token_ids=tokens,
        loss_mask=mask.copy(),
        logprobs=logprobs,
        versions=trace.versions if weights_for else version_spans(np.full(count, version)),
        routes=Routes(expert_ids=routes, valid=np.ones(len(routes), np.bool_)),
    )


def _pieces(row_versions: np.ndarray, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield ``[start, end)`` of at most ``chunk`` rows of one version."""
    for span in version_spans(row_versions):
        for start in range(span.start, span.end, chunk):
            yield start, min(start + chunk, span.end)
