"""Replay modes of the trainer, their checks, their price, and the anchor, on a small real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_toys import make_sample
from test_trainer import SHAPE, copies, model, on_policy, unchanged

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.episode import Trace
from strop.core.errors import CheckpointError, ConfigError, NumericsError
from strop.core.metrics import validate
from strop.core.route_pack import RoutePack, RouteSegment, token_digest
from strop.core.routes import RouterSpec, Routes
from strop.core.sample import Batch, Sample
from strop.model.routing.families import router_spec
from strop.rl.anchor import FOLDER, RouteAnchor, RouteRecord, distil, load_anchor, load_record, save_record
from strop.rl.pack import pack
from strop.rl.replay import PassLedger, choose_mode, plausible_routes, route_margins, route_regret
from strop.rl.supervised import SupervisedTrainer
from strop.rl.trainer import PolicyTrainer


def trainer(
    net: Any, mode: str, *, numerics: dict[str, Any] | None = None, routes: dict[str, Any] | None = None, **rl: Any
) -> PolicyTrainer:
    config = RlConfig.model_validate({"learning_rate": 1e-2, "warmup_steps": 0, **rl})
    settings = NumericsConfig.model_validate({"mode": "off", "replay_routes": mode, **(numerics or {})})
    return PolicyTrainer(net, config, settings, routes=RoutesConfig.model_validate(routes or {}))


def turned(net: Any) -> None:
    """Change the routers, so that live routes differ from recorded ones."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in net.parameters.items():
            if name.endswith("gate.weight"):
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.15)


def with_routes(sample: Sample, ids: np.ndarray, valid: np.ndarray | None = None, *, advantage: float = 1.0) -> Sample:
    old = sample.trace
    routes = Routes(expert_ids=ids.astype(np.uint8), valid=np.ones(len(ids), np.bool_) if valid is None else valid)
    trace = Trace(token_ids=old.token_ids, loss_mask=old.loss_mask, logprobs=old.logprobs, versions=old.versions, routes=routes)
    return make_sample(trace, advantage, sample=sample.key.sample)


def with_first_record(batch: Batch, change: Callable[[Routes], Routes]) -> Batch:
    """The batch with another record of routes in its first sample."""
    first, *rest = batch.samples
    assert first.trace.routes is not None
    routes = change(first.trace.routes)
    return Batch(step=0, samples=(with_routes(first, routes.expert_ids, routes.valid), *rest), normaliser=40.0)


# ------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("mode", ["off", "verify", "r2", "r3", "fragile-only", "plausible", "auto"])
@pytest.mark.parametrize("updates", [1, 2])
def test_on_policy_every_mode_trains_exactly(mode: str, updates: int) -> None:
    net = model()
    update = trainer(net, mode, numerics={"mode": "exact"}, updates_per_batch=updates).step(on_policy(net))
    assert update.metrics["numerics/is_exact"] == 1.0
    assert validate(update.metrics).keys() == update.metrics.keys()
    if updates == 1:
        assert update.metrics["routes/suppressed_frac"] == 0.0


def test_modes_suppress_from_nothing_to_everything() -> None:
    net = model()
    batch = on_policy(net)
    turned(net)

    def suppressed(mode: str, **routes: Any) -> float:
        fresh = model()
        with torch.no_grad():
            for name, parameter in fresh.parameters.items():
                parameter.copy_(net.parameters[name])
        return trainer(fresh, mode, routes=routes).step(batch).metrics["routes/suppressed_frac"]

    everything = suppressed("r3")
    assert everything > 0.1
    assert suppressed("verify") == suppressed("off") == 0.0
    assert suppressed("plausible", plausible_gap=0.0) < 0.25 * everything  # later layers move with what earlier ones gave up
    assert suppressed("plausible", plausible_gap=1e6) == everything
    assert 0 < suppressed("plausible", plausible_gap=0.1) < everything
    assert suppressed("fragile-only", fragile_margin=0.0) < 0.1 * everything
    assert suppressed("fragile-only", fragile_margin=1e6) == everything
    assert suppressed("r3", dropout=0.999) < everything


def test_r2_holds_the_routes_of_the_first_weights_over_all_updates() -> None:
    net = model()
    batch = on_policy(net)
    metrics = trainer(net, "r2", updates_per_batch=3, learning_rate=0.1).step(batch).metrics
    live = model()
    free = trainer(live, "off", updates_per_batch=3, learning_rate=0.1).step(on_policy(live)).metrics
    assert metrics["routes/suppressed_frac"] > 0
    assert free["routes/suppressed_frac"] == 0
    assert metrics["routes/tax_nats"] >= 0


def test_the_price_is_reported() -> None:
    net = model()
    batch = on_policy(net)
    turned(net)
    metrics = trainer(net, "r3", routes={"tax_frac": 1.0}).step(batch).metrics
    assert metrics["routes/tax_nats"] > 0
    assert metrics["routes/suppressed_age0_frac"] > 0
    assert np.mean([metrics[f"routes/suppressed_layer{layer}_frac"] for layer in range(2)]) == pytest.approx(
        metrics["routes/suppressed_frac"]
    )
    assert 0 < metrics["routes/router_entropy_nats"] <= np.log(4) + 1e-6
    assert metrics["routes/regret_max"] >= metrics["routes/regret_p99"] > 0


def test_an_expert_that_replay_keeps_from_working_is_starved() -> None:
    net = model()
    batch = on_policy(net)
    samples = []
    for sample in batch.samples:
        assert sample.trace.routes is not None
        ids = np.broadcast_to(np.array([0, 1]), sample.trace.routes.expert_ids.shape)
        samples.append(with_routes(sample, ids))
    metrics = trainer(net, "r3").step(Batch(step=0, samples=tuple(samples), normaliser=40.0)).metrics
    assert metrics["routes/starved_experts"] == 4.0  # experts 2 and 3 of both layers
    assert metrics["routes/dead_experts"] == 4.0


def test_churn_and_lock_in_are_measured_on_the_same_tokens() -> None:
    net = model()
    subject = trainer(net, "off", learning_rate=1e-6)
    records = [subject.step(on_policy(net, version=step)).metrics for step in range(11)]
    assert "routes/churn_frac" not in records[0]
    assert records[1]["routes/churn_frac"] == 0.0
    assert (records[8]["routes/locked_frac"], records[10]["routes/locked_frac"]) == (1.0, 1.0)
    assert records[7]["routes/locked_frac"] == 0.0
    turned(net)
    moved = subject.step(on_policy(net, version=11)).metrics
    assert moved["routes/churn_frac"] > 0.1
    assert moved["routes/moved_frac"] == moved["routes/churn_frac"]


def test_state_continues_the_probe() -> None:
    net = model()
    subject = trainer(net, "auto")
    subject.step(on_policy(net))
    state = subject.state()
    again = trainer(model(), "auto")
    again.load_state(state)
    one = subject.step(on_policy(net, version=1)).metrics
    two = again.step(on_policy(again.model, version=1)).metrics
    assert one["routes/churn_frac"] == two["routes/churn_frac"]


# ------------------------------------------------------------------------------------------------ auto


@pytest.mark.parametrize(
    ("rl", "numerics", "mode"),
    [
        ({}, {}, "verify"),
        ({"updates_per_batch": 2}, {}, "r2"),
        ({"updates_per_batch": 4}, {}, "r3"),
        ({"max_staleness": 1}, {}, "r3"),
        ({}, {"mode": "tolerant", "rollout_precision": "bf16"}, "r3"),
    ],
)
def test_auto_follows_the_evidence_and_says_why(rl: dict[str, Any], numerics: dict[str, Any], mode: str) -> None:
    choice = choose_mode(NumericsConfig.model_validate({"replay_routes": "auto", **numerics}), RlConfig.model_validate(rl))
    assert choice.mode == mode
    assert choice.reason
    named = choose_mode(NumericsConfig.model_validate({"replay_routes": "plausible", **numerics}), RlConfig.model_validate(rl))
    assert named.mode == "plausible"


def test_auto_goes_over_to_r3_when_the_mismatch_is_large_and_stays() -> None:
    subject = trainer(model(), "auto")
    replay = subject.routes.replay
    replay.learn(9e-4)
    assert replay.mode == "verify"
    replay.learn(2e-3)
    assert replay.mode == "r3"
    assert "0.002" in replay.choice.reason
    replay.learn(0.0)
    again = trainer(model(), "auto")
    again.load_state(subject.state())
    assert again.routes.replay.mode == "r3"


# ------------------------------------------------------------------------------------------------ checks


def test_missing_rows_are_refused_or_counted() -> None:
    net = model()
    before = copies(net)
    bad = with_first_record(on_policy(net), lambda routes: replace(routes, valid=np.arange(len(routes)) != 2))
    with pytest.raises(NumericsError, match=r"1 of \d+ rows .*max_fallback_frac allows 0"):
        trainer(net, "r3").step(bad)
    assert unchanged(before, net)
    metrics = trainer(net, "r3", numerics={"mode": "exact"}, routes={"max_fallback_frac": 0.1}).step(bad).metrics
    assert metrics["routes/fallback_rows"] == 1.0
    assert metrics["numerics/is_exact"] == 1.0


def test_routes_that_these_weights_never_made_are_refused() -> None:
    net = model()
    before = copies(net)
    bad = with_first_record(on_policy(net), lambda routes: replace(routes, expert_ids=np.roll(routes.expert_ids, 1, axis=0)))
    with pytest.raises(NumericsError, match=r"routes|rollout and trainer disagree"):
        trainer(net, "r3", numerics={"mode": "tolerant", "max_abs_diff": 100.0}, routes={"max_regret": 0.05}).step(bad)
    assert unchanged(before, net)


def test_a_pass_uses_every_sample_once() -> None:
    ledger = PassLedger([0, 1, 2])
    ledger.take([2, 0])
    with pytest.raises(NumericsError, match="sample 0 were used twice"):
        ledger.take([0])
    with pytest.raises(NumericsError, match="isn't part of"):
        ledger.take([7])
    with pytest.raises(NumericsError, match="never used, first sample 1"):
        ledger.close()
    ledger.take([1])
    ledger.close()


def test_a_micro_batch_that_is_packed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    before = copies(net)
    subject = trainer(net, "r3")
    monkeypatch.setattr(subject.routes, "ledger", lambda micros: PassLedger(range(5)))
    with pytest.raises(NumericsError, match="used in a pass"):
        subject.step(on_policy(net))
    assert unchanged(before, net)


# ------------------------------------------------------------------------------------------------ pure parts


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 3))
def test_plausible_routes_lie_between_record_and_live_choice(seed: int, gap: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, 2, 6)).astype(np.float32)
    record = np.sort(rng.random((5, 2, 6)).argsort(-1)[..., :3], -1)
    live = np.sort((-logits).argsort(-1)[..., :3], -1)
    ids, given_up = plausible_routes(record, logits, gap)
    assert (np.diff(ids, axis=-1) > 0).all()
    for row in np.ndindex(5, 2):
        chosen, recorded = set(ids[row].tolist()), set(record[row].tolist())
        assert len(recorded - chosen) == given_up[row]
        assert chosen <= recorded | set(live[row].tolist())
    assert np.array_equal(plausible_routes(record, logits, 0.0)[0], live)
    assert np.array_equal(plausible_routes(record, logits, 1e9)[0], record)
    assert (route_regret(logits, ids) <= gap + 1e-6).all()


def test_margin_and_regret_of_a_small_case() -> None:
    logits = np.array([[[3.0, 1.0, 2.5, 0.0]]], np.float32)
    assert route_margins(logits, 2)[0, 0] == 1.5
    assert route_margins(logits, 4)[0, 0] == np.inf
    assert route_regret(logits, np.array([[[0, 2]]]))[0, 0] == 0.0
    assert route_regret(logits, np.array([[[1, 2]]]))[0, 0] == 1.5


# ------------------------------------------------------------------------------------------------ anchor

SPEC = router_spec(SHAPE)


def record_of(net: Any, batch: Batch) -> RouteRecord:
    packs, streams = [], []
    for sample in batch.samples:
        (micro,) = pack([sample], 1000)
        ids = micro.token_ids
        with torch.no_grad():
            from strop.rl.scoring import score

            forward = score(net, micro, temperature=1.0, device=torch.device("cpu")).forward
        routes = forward.natural_ids.numpy()
        streams.append((ids, routes))
        packs.append(
            RoutePack(
                start=0,
                experts=4,
                expert_ids=routes.astype(np.uint8),
                valid=np.ones(len(routes), np.bool_),
                router=SPEC.digest(),
                tokens=token_digest(ids),
                segments=(RouteSegment(start=0, end=len(routes), version=0),),
            )
        )
    return RouteRecord(SPEC, distil(streams, spec=SPEC, vocab=24), tuple(packs), {"run": "toy"})


def test_a_record_survives_disk_and_refuses_damage(tmp_path: Path) -> None:
    net = model()
    record = record_of(net, on_policy(net))
    save_record(tmp_path / FOLDER, record)
    back = load_record(tmp_path / FOLDER)
    assert (back.spec, len(back.packs), back.facts) == (SPEC, 6, {"run": "toy"})
    assert np.array_equal(back.counts, record.counts)
    assert record.counts.sum() == sum(pack.expert_ids.size for pack in record.packs)
    for name in ("packs.bin", "classes.safetensors", "record.json"):
        path = tmp_path / FOLDER / name
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        with pytest.raises(CheckpointError):
            load_record(tmp_path / FOLDER)
        path.unlink()
        with pytest.raises(CheckpointError, match="strop routes record"):
            load_record(tmp_path / FOLDER)
        path.write_bytes(good)


def test_an_anchor_of_another_router_is_refused(tmp_path: Path) -> None:
    net = model()
    save_record(tmp_path / FOLDER, record_of(net, on_policy(net)))
    config = RoutesConfig.model_validate({"anchor": str(tmp_path), "anchor_phases": ["rl"]})
    assert load_anchor(config, SPEC, "midtrain", torch.device("cpu")) is None
    assert load_anchor(config, SPEC, "rl", torch.device("cpu")) is not None
    stranger = RouterSpec(layers=(0, 1), experts=4, top_k=2, scoring="sigmoid")
    with pytest.raises(ConfigError, match="anchor"):
        load_anchor(config, stranger, "rl", torch.device("cpu"))


def test_the_pull_brings_routers_to_the_record_and_fades_out() -> None:
    net = model()
    batch = on_policy(net)
    record = record_of(net, batch)
    turned(net)

    def agreement(weight: float) -> tuple[float, float]:
        fresh = model()
        with torch.no_grad():
            for name, parameter in fresh.parameters.items():
                parameter.copy_(net.parameters[name])
        schedule = RoutesConfig.model_validate({"anchor_weight": weight, "anchor_steps": 40})
        anchor = RouteAnchor(record, schedule, fresh.device)
        subject = SupervisedTrainer(fresh, lambda step: 3e-3, anchor=anchor)
        records = [subject.step(Batch(step=step, samples=batch.samples, normaliser=40.0)).metrics for step in range(30)]
        assert records[0]["routes/anchor_weight"] == weight
        assert records[20]["routes/anchor_weight"] == pytest.approx(weight / 2)
        (micro,) = pack(batch.samples, 10000)
        from strop.rl.scoring import score

        with torch.no_grad():
            found = anchor.pull(micro, score(fresh, micro, temperature=1.0, device=fresh.device).forward)
        return found.agreement, float(found.nats)

    (pulled, near), (free, far) = agreement(3.0), agreement(1e-9)
    assert pulled > free + 0.05
    assert near < far


def test_hard_steps_replay_known_streams_alone() -> None:
    net = model()
    batch = on_policy(net)
    record = record_of(net, Batch(step=0, samples=batch.samples[:3], normaliser=1.0))
    turned(net)
    anchor = RouteAnchor(record, RoutesConfig.model_validate({"anchor_hard_steps": 1}), net.device)
    subject = SupervisedTrainer(net, lambda step: 1e-4, anchor=anchor)
    first = subject.step(batch).metrics["routes/anchor_replayed_frac"]
    assert 0 < first < 1
    assert subject.step(Batch(step=1, samples=batch.samples, normaliser=40.0)).metrics["routes/anchor_replayed_frac"] == 0.0


def test_an_anchor_pulls_in_rl_too() -> None:
    net = model()
    batch = on_policy(net)
    anchor = RouteAnchor(record_of(net, batch), RoutesConfig.model_validate({"anchor_steps": 1}), net.device)
    subject = PolicyTrainer(net, RlConfig.model_validate({"warmup_steps": 0}), NumericsConfig.model_validate({}), anchor=anchor)
    metrics = subject.step(batch).metrics
    assert metrics["routes/anchor_nats"] > 0
    assert metrics["routes/anchor_agree_frac"] > 0.3
    assert "routes/anchor_nats" not in subject.step(on_policy(net, version=1)).metrics
