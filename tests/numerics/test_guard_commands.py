"""The commands over a run directory: certify, localise, calibrate, price; clean runs pass, planted faults are named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.core.config import RunConfig
from strop.core.errors import CheckpointError, NumericsError
from strop.engine.embedded import EmbeddedEngine
from strop.model.checkpoint import save_checkpoint
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.inference import InferenceModel
from strop.model.training import TrainModel
from strop.numerics.canary import canary_streams
from strop.numerics.precision import Emulation, Precision
from strop.numerics.price import fresh_decoder
from strop.rl.trainer import PolicyTrainer
from strop.runtime import guard
from strop.runtime.certify import FLOORS, certify_policy, explain
from strop.store import RunDir

SHAPE = DecoderConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2, expert_size=24
)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    model = Decoder(SHAPE)
    model.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return {name: value.detach() for name, value in model.state_dict().items()}


def trainer(config: RunConfig) -> PolicyTrainer:
    mode = "exact" if config.numerics.mode == "exact" else "tolerant"
    return PolicyTrainer(TrainModel(SHAPE, weights(), mode=mode, threads=1), config.rl, config.numerics)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> RunDir:
    """A run of one committed step; ``request.param`` is the mode."""
    save_checkpoint(tmp_path / "base", SHAPE, weights(1))
    mode = getattr(request, "param", "exact")
    config = RunConfig.model_validate(
        {"model": {"base": str(tmp_path / "base"), "threads": 1}, "numerics": {"mode": mode}, "engine": {"max_sessions": 4}}
    )
    with RunDir.create(tmp_path / "run", config) as opened:
        subject = trainer(config)
        opened.store.log(0, {"numerics/tokens": 5.0, "numerics/is_exact": 1.0})
        opened.store.save_state("rl-0", subject.state(), {}, rolling=True)
        opened.store.commit_step(0, checkpoint="rl-0", weights_digest="d")
    return RunDir.open(tmp_path / "run")


async def certified(run: RunDir, fault: str = "") -> Any:
    subject = trainer(run.config)
    engine = EmbeddedEngine(run.config.engine, InferenceModel(SHAPE, weights(), threads=1), seed=0)
    sent = subject.weights()
    try:
        if fault:
            sent = dict(sent)
            name = "model.layers.1.mlp.experts.down_proj"
            sent[name] = sent[name].clone()
            sent[name].view(-1).view(torch.int32)[5] += 1  # one unit in the last place of one element of one tensor
        await engine.swap(sent, 1)
        if fault == "explain":
            return str(await explain(NumericsError("they differ"), subject, engine))
        if fault == "memory":
            engine.loaded_digest = ""
            await engine.swap(subject.weights(), 1)
            engine._model.load(weights(3))  # what the engine computes with changes behind its back
            return str(await explain(NumericsError("they differ"), subject, engine))
        return await certify_policy(run, subject, engine, "certificates/rl-00000.json", threads=1)
    finally:
        await engine.close()


@pytest.mark.parametrize("run", ["exact", "tolerant"], indirect=True)
def test_certify_writes_once_and_then_compares(run: RunDir) -> None:
    assert guard.certify_run(run) == ["certificates/rl-00000.json: written"]
    lines = guard.certify_run(run)
    assert "verified" in lines[0]
    assert "have the recorded bits" in lines[1]


def test_certify_finds_a_canary_of_another_machine(run: RunDir) -> None:
    guard.certify_run(run)
    path = run.path / "certificates/rl-00000.json"
    record = json.loads(path.read_text())
    canary = record["body"]["canary"]
    canary["logprobs"][3] = (float.fromhex(canary["logprobs"][3]) + 1e-6).hex()
    record["digest"] = guard_signature(record["body"])
    path.write_text(json.dumps(record))
    with pytest.raises(NumericsError, match="same equivalence class, but canaries differ by up to"):
        guard.certify_run(run)
    record["body"]["fingerprint"]["facts"]["kernels"] = "others"
    record["digest"] = guard_signature(record["body"])
    path.write_text(json.dumps(record))
    assert "another equivalence class (kernels:" in guard.certify_run(run)[1]


def guard_signature(body: Any) -> str:
    from strop.numerics.manifest import signature

    return signature(body)


def test_a_clean_engine_is_certified_and_one_unit_in_the_last_place_is_not(run: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"weights sent have the digest .*stale or misexported"):
        asyncio.run(certified(run, "stale"))
    assert not (run.path / "certificates").exists()
    assert asyncio.run(certified(run))["canary largest difference"] == 0


def test_a_stopped_step_is_explained(run: RunDir) -> None:
    assert "they differ. Culprit: the engine holds other weights" in asyncio.run(certified(run, "explain"))
    assert "equal weights, but engine and trainer compute canaries" in asyncio.run(certified(run, "memory"))


def test_localise_is_silent_on_a_clean_run_and_names_a_fault(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no layer is odd" in guard.localise_run(run, 0)[0]
    with pytest.raises(CheckpointError, match="rank 2 left no trace"):
        guard.localise_run(run, 2)
    streams = canary_streams(SHAPE.vocab_size)[:4]
    suspect = fresh_decoder(SHAPE, weights())
    guard.dump_rank(run.path, 1, suspect, streams)
    assert guard.localise_run(run, 1) == ["rank 1: every operation agrees on the inputs that it had"]
    Emulation(suspect, Precision.of("fp32", overrides=["experts=bf16"]), layers=[1])
    guard.dump_rank(run.path, 2, suspect, streams)
    assert guard.localise_run(run, 2)[0].startswith("rank 2: layers.1.mlp.experts is off by")


def test_localise_names_the_layer_of_odd_kernels(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's kernels compute with another router in the last layer than the state says."""
    trusted = guard.fresh_decoder

    def odd(config: DecoderConfig, given: Any) -> Decoder:
        decoder = trusted(config, given)
        decoder.model.layers[1].mlp.gate.weight.mul_(1.001)  # type: ignore[union-attr,operator]
        return decoder

    monkeypatch.setattr(guard, "fresh_decoder", odd)
    assert "first odd layer 1" in guard.localise_run(run, 0)[0]


def test_calibrate_keeps_floors_with_the_class(run: RunDir) -> None:
    floors = guard.calibrate_run(run)
    assert floors["own_class"]["logprob_max_nats"] == 0
    assert 0 < floors["engine"]["logprob_max_nats"] < 1e-4
    assert json.loads((run.path / FLOORS).read_text()) == floors
    (run.path / FLOORS).write_text("{}")
    from strop.runtime.certify import read_floors

    with pytest.raises(CheckpointError, match="calibrate again"):
        read_floors(run.path)


def test_price_of_a_checkpoint(run: RunDir) -> None:
    prices = guard.price_model(Path(run.config.model.base), "bf16", ["router=bf16", "moments=bf16"])
    assert prices[0].k3_nats > 0
    assert prices[1].update_error > 0


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "empty", RunConfig()) as opened, pytest.raises(CheckpointError, match="no committed step"):
        guard.certify_run(opened)


@pytest.mark.parametrize("run", ["tolerant"], indirect=True)
def test_calibrated_limits_hold_for_this_class_and_this_precision_only(run: RunDir) -> None:
    from strop.runtime.certify import canary_limits, run_fingerprint

    guard.calibrate_run(run)
    assert canary_limits(run.path, run_fingerprint(run.config, 1), run.config).logprob_max_nats < 1e-3  # type: ignore[union-attr]
    low = run.config.model_copy(update={"numerics": run.config.numerics.model_copy(update={"precision": ["router=bf16"]})})
    for config, threads in ((run.config, 7), (low, 1)):
        here = run_fingerprint(config, threads)
        assert here.digest != run_fingerprint(run.config, 1).digest
        assert canary_limits(run.path, here, config).logprob_max_nats == config.numerics.max_abs_diff  # type: ignore[union-attr]
