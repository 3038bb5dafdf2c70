"""Holds a received RoutePack against what it must belong to, before anything is trained with it.

Every published bug of this kind had fitting shapes. So identity is checked by digest (router, tokens, weights), completeness by spans,
and the rest by the live router: honest routes differ from the live choice at near-ties only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.core.route_pack import RoutePack, token_digest
from strop.core.routes import RouterSpec
from strop.rl.replay import route_regret


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
