"""Received packs against what they must belong to: every fault is found, an honest pack passes; records of whole streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer import SHAPE, model, on_policy

from strop.core.route_pack import RouteSegment, token_digest
from strop.model.routing.families import router_spec
from strop.rl.pack import pack as pack_samples
from strop.rl.replay import route_regret
from strop.rl.route_check import Expected, check_live, check_pack
from strop.rl.route_record import record_streams
from strop.rl.route_stats import RouteStats
from strop.rl.scoring import score

SPEC = router_spec(SHAPE)


def honest(number: int = 3):
    net = model()
    sample = on_policy(net).samples[number]
    record = record_streams(net, [sample], spec=SPEC, vocab=24, version=0, facts={"run": "toy"})
    (pack,) = record.packs
    (micro,) = pack_samples([sample], 100)
    tokens = sample.trace.token_ids[: len(pack) + 1]
    return net, micro, pack, Expected(spec=SPEC, token_ids=tokens, versions=np.zeros(len(pack), np.int64)), record


def live(net, micro, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        forward = score(net, micro, temperature=1.0, device=torch.device("cpu"), routes=ids.astype(np.int64)).forward
    return torch.stack(forward.router_logits, 1).numpy()


def test_an_honest_pack_passes_everything() -> None:
    net, micro, pack, expected, record = honest()
    assert check_pack(pack, expected) == []
    assert check_live(pack.expert_ids, pack.valid, live(net, micro, pack.expert_ids), max_regret=0.0) == []
    assert record.facts == {"run": "toy", "rows": len(pack)}
    assert record.counts.sum() == pack.expert_ids.size


FAULTS: dict[str, tuple[Callable[..., object], str]] = {
    "another layer set": (lambda p: replace(p, router=replace(SPEC, layers=(1, 2)).digest()), "router"),
    "another scoring": (lambda p: replace(p, router=replace(SPEC, scoring="sigmoid").digest()), "router"),
    "another stream": (lambda p: replace(p, tokens=token_digest(np.arange(len(p)))), "tokens"),
    "a row less": (lambda p: p.part(0, len(p) - 1, p.tokens), "rows"),
    "a later part": (lambda p: p.part(1, len(p), p.tokens), "rows"),
    "other weights": (lambda p: replace(p, segments=(RouteSegment(start=0, end=len(p), version=7),)), "versions: row 0"),
    "mixed weights": (
        lambda p: replace(p, segments=(RouteSegment(start=0, end=2, version=0), RouteSegment(start=2, end=len(p), version=1))),
        "versions: row 2",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_identity_faults_are_named(name: str) -> None:
    _, _, pack, expected, _ = honest()
    change, what = FAULTS[name]
    found = check_pack(change(pack), expected)  # type: ignore[arg-type]
    assert any(line.startswith(what) for line in found), found


def test_another_engine_class_is_named_where_one_is_expected() -> None:
    _, _, pack, expected, _ = honest()
    assert check_pack(pack, replace(expected, engine_class=b"class--2")) == ["engine class: some rows come from another kind of engine"]


def test_routes_that_the_live_router_would_not_take_are_found_row_by_row() -> None:
    net, micro, pack, _, _ = honest()
    for row in range(len(pack)):
        ids = pack.expert_ids.copy()
        ids[row, 1] = np.setdiff1d(np.arange(4), ids[row, 1])  # the other two experts of four
        found = check_live(ids, pack.valid, live(net, micro, ids), max_regret=1e-4)
        assert len(found) == 1
        assert f"row {row}, layer 1" in found[0]


def test_rows_without_routes_are_counted() -> None:
    net, micro, pack, _, _ = honest()
    valid = pack.valid.copy()
    valid[:2] = False
    logits = live(net, micro, pack.expert_ids)
    assert check_live(pack.expert_ids, valid, logits, max_regret=0.0) == [f"missing: 2 of {len(pack)} rows have no routes"]
    assert check_live(pack.expert_ids, valid, logits, max_regret=0.0, max_invalid_frac=0.5) == []


@settings(deadline=None)
@given(st.data())
def test_figures_of_the_record_are_those_of_every_pair_looked_at_one_by_one(data: st.DataObject) -> None:
    rows, layers, experts, version = 7, 2, 4, 1
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = draw.normal(size=(rows, layers, experts)).astype(np.float32)
    natural = np.sort(np.argsort(-logits, axis=-1)[..., :2], -1)
    recorded = natural.copy()
    for row, layer in data.draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, layers - 1)), max_size=5)):
        recorded[row, layer] = np.sort(draw.permutation(experts)[:2])
    valid, oldest = draw.random(rows) < 0.8, draw.integers(0, 2, rows)
    micro: Any = SimpleNamespace(
        routes=recorded, routes_valid=valid, rows=np.arange(rows), oldest=oldest, row_oldest=oldest, versions=oldest, token_ids=oldest
    )
    forward = SimpleNamespace(
        router_logits=list(torch.from_numpy(logits).unbind(1)), natural_ids=torch.from_numpy(natural), expert_ids=torch.from_numpy(recorded)
    )
    stats = RouteStats(version=version)
    stats.compare(micro, forward)
    stats.train(micro, forward)
    metrics = stats.metrics()
    fresh = valid & (oldest == version)
    differs = (recorded != natural).any(-1)
    if valid.any():
        assert metrics["routes/mismatch_frac"] == pytest.approx(differs[valid].mean())
    if fresh.any():
        regret = route_regret(logits[fresh], recorded[fresh])
        assert metrics["numerics/route_mismatch_frac"] == differs[fresh].mean()
        assert metrics["routes/regret_max"] == regret.max()
        assert metrics["routes/regret_p99"] == np.quantile(regret, 0.99)
