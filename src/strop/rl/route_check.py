"""Holds received routes against what they must belong to, before anything is trained with them.

Every published bug of this kind had fitting shapes. So identity is checked by digest (router, tokens, weights), completeness by spans,
and the rest by the live router: honest routes differ from the live choice at near-ties only. Rows of older weights have no such bound;
there an origin finds what happened after the engine, and ``check_overlap`` what is as good as random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.core.config import NumericsConfig, RoutesConfig
from strop.core.episode import Trace
from strop.core.route_pack import RoutePack, RouteSegment, token_digest
from strop.core.routes import RouterSpec, Routes, ids_digest
from strop.rl.pack import trace_versions
from strop.rl.replay import route_regret

HONEST_REGRET = {"fp32": 1e-3, "tf32": 0.1, "fp16": 0.1, "bf16": 0.25, "int8": 0.5, "mxfp8": 1.0, "nvfp4": 2.0}
"""Largest honest regret by the rollout's precision, in router logits; experiments/routes_tradeoff.py finds about half of it."""

LOGIT_SCALE, DEPTH_SCALE = 2.0, 6
"""Spread of a row's router logits, and number of MoE layers, up to which these limits hold; beyond they grow in proportion, as rounding
errors at worst do."""

MIN_OVERLAP = 0.25
"""Least overlap of older routes with the live choice, on a scale from 0 (chance) to 1 (equal)."""

MIN_OVERLAP_ROWS = 16
"""Fewer rows of one stream aren't judged by their overlap with the live choice."""


def regret_limit(settings: RoutesConfig, numerics: NumericsConfig, logits: np.ndarray) -> float:
    """Return the largest regret that is honest: ``routes.max_regret``, or what the rollout's precision explains.

    Args:
        settings: With ``max_regret``; 0 leaves it to the precision.
        numerics: With the rollout's precision.
        logits: ``[rows, layers, E]``, the live router's.
    """
    if settings.max_regret:
        return settings.max_regret
    limit = max(HONEST_REGRET.values()) if numerics.precision else HONEST_REGRET[numerics.rollout_precision]
    return limit * max(1.0, float(logits.std(-1).mean()) / LOGIT_SCALE) * max(1.0, logits.shape[1] / DEPTH_SCALE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a pack of a whole stream must belong to.

    Attributes:
        spec: The trainer's router.
        token_ids: ``[tokens]`` of the stream; it has one row less.
        versions: Weight version of every row, ``int64 [rows]``.
        engine_class: The engine's, or ``b""`` where any will do.
    """

    spec: RouterSpec
    token_ids: np.ndarray
    versions: np.ndarray
    engine_class: bytes = b""


def check_pack(pack: RoutePack, expected: Expected) -> list[str]:
    """Return what is wrong with a pack by its digests and spans alone; empty if nothing is."""
    found = []
    rows = len(expected.token_ids) - 1
    if pack.router != expected.spec.digest():
        found.append("router: the pack was made by another router (layers, experts, top_k, scoring or bias differ)")
    if (pack.start, pack.end) != (0, rows):
        found.append(f"rows: the pack has [{pack.start}, {pack.end}), {rows + 1} tokens need [0, {rows})")
    elif pack.tokens != token_digest(expected.token_ids[:rows]):
        found.append("tokens: the pack belongs to another stream")
    shape = (len(expected.spec.layers), expected.spec.top_k)
    if pack.expert_ids.shape[1:] != shape or pack.experts != expected.spec.experts:
        found.append(f"shape: {pack.expert_ids.shape[1:]} of {pack.experts} experts, expected {shape} of {expected.spec.experts}")
    versions = np.repeat([s.version for s in pack.segments], [s.end - s.start for s in pack.segments])
    if len(versions) == len(expected.versions) and not np.array_equal(versions, expected.versions):
        row = int(np.flatnonzero(versions != expected.versions)[0])
        found.append(f"versions: row {row} was computed by version {int(versions[row])}, the stream says {int(expected.versions[row])}")
    if expected.engine_class and any(s.engine_class != expected.engine_class for s in pack.segments):
        found.append("engine class: some rows come from another kind of engine")
    return found


def check_trace(trace: Trace, router: RouterSpec | None) -> list[str]:
    """Return what is wrong with a stream's routes by their own facts, without a model; empty if nothing is.

    Args:
        trace: With routes.
        router: The trainer's, or ``None`` where nobody knows it.

    Raises:
        ValueError: The stream has no routes.
    """
    routes = trace.routes
    if routes is None:
        raise ValueError("the stream has no routes")
    origin = routes.origin
    found = []
    if origin is not None and origin.ids != ids_digest(routes.expert_ids, routes.valid):
        found.append("ids: the routes aren't those that the engine made; rows or experts were changed on the way")
    if origin is not None and origin.tokens != token_digest(trace.token_ids[: len(routes)]):
        found.append("tokens: the routes belong to another stream")
    if router is not None and len(routes):
        found += _check_router(trace, routes, router)
    return list(dict.fromkeys(found))


def _check_router(trace: Trace, routes: Routes, router: RouterSpec) -> list[str]:
    """As a pack of the whole stream; what the engine says nothing about counts as right."""
    origin, versions = routes.origin, trace_versions(trace)[1:]
    spans = origin.versions if origin is not None else ((0, len(routes), 0),)
    try:
        pack = RoutePack(
            start=0,
            experts=router.experts,
            expert_ids=routes.expert_ids,
            valid=routes.valid,
            router=origin.router if origin is not None else router.digest(),
            tokens=origin.tokens if origin is not None else token_digest(trace.token_ids[: len(routes)]),
            segments=tuple(RouteSegment(start=start, end=end, version=version) for start, end, version in spans),
        )
    except ValueError as error:
        return [f"record: {error}"]
    expected = versions if origin is not None else np.zeros(len(routes), np.int64)
    return check_pack(pack, Expected(spec=router, token_ids=trace.token_ids, versions=expected))


def check_overlap(expert_ids: np.ndarray, natural_ids: np.ndarray, experts: int) -> list[str]:
    """Return a finding where routes of older weights have so little in common with the live choice that chance explains them better.

    Args:
        expert_ids: ``[rows, layers, top_k]`` of one stream, recorded.
        natural_ids: The same of the live router.
        experts: Experts of a layer; chance shares ``top_k / experts``.
    """
    if len(expert_ids) < MIN_OVERLAP_ROWS:
        return []
    shared = float((expert_ids[..., None] == natural_ids[..., None, :]).any(-1).mean())
    chance = expert_ids.shape[-1] / experts
    bound = chance + MIN_OVERLAP * (1 - chance)
    return (
        [f"overlap: {shared:.2f} of the experts are live ones, below {bound:.2f}: closer to chance than to drift"] if shared < bound else []
    )


def check_live(
    expert_ids: np.ndarray, valid: np.ndarray, logits: np.ndarray, *, max_regret: float, max_invalid_frac: float = 0.0
) -> list[str]:
    """Return what the live router finds wrong with routes that the same weights made.

    Args:
        expert_ids: ``[rows, layers, top_k]``.
        valid: ``bool [rows]``.
        logits: ``float32 [rows, layers, E]`` of a pass along these routes, so that an earlier layer's error doesn't spread.
        max_regret: Largest honest gap between the live K-th expert and the worst recorded one, in logits; 0 in exact mode.
        max_invalid_frac: Share of rows that may lack a record.
    """
    found = []
    missing = int((~valid).sum())
    if missing > max_invalid_frac * len(valid):
        found.append(f"missing: {missing} of {len(valid)} rows have no routes")
    if not valid.any():
        return found
    regret = route_regret(logits[valid], expert_ids[valid].astype(np.int64))
    bad = regret > max_regret
    if bad.any():
        row, layer = (int(index) for index in np.argwhere(bad)[0])
        place = f"first at row {int(np.flatnonzero(valid)[row])}, layer {layer}"
        found.append(
            f"regret: {int(bad.sum())} token-layer pairs lie up to {float(regret.max()):.3g} logits below the live choice, {place}"
        )
    return found


def check_ratio(replayed: np.ndarray, natural: np.ndarray, generator: np.ndarray) -> list[str]:
    """Return a warning where replay makes the mismatch worse instead of better; log-probabilities ``[N]`` of the same tokens."""

    def k3(trainer: np.ndarray) -> float:
        difference = trainer.astype(np.float64) - generator
        return float((np.expm1(difference) - difference).mean())

    with_replay, without = k3(replayed), k3(natural)
    floor = 1e-9  # below it both are rounding
    return [f"k3: {with_replay:.3g} with replay, {without:.3g} without"] if with_replay > max(2 * without, floor) else []
