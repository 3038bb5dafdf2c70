"""RL with a rollout in emulated low precision: refused in exact mode, watched in tolerant mode, swapped and rounded anew every step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_toys import REAL_SHAPE, ToyWorld, toy_config
from test_real_model import ParityGrader

from strop.core.config import SENSITIVE_OPS, RunConfig
from strop.core.errors import ConfigError, NumericsError
from strop.engine.low_precision import LowPrecisionModel
from strop.model.decoder import Decoder
from strop.model.training import TrainModel
from strop.rl.loop import run_rl
from strop.rl.trainer import PolicyTrainer
from strop.runtime.build import torch_engine
from strop.store import RunDir

WIDE: dict[str, Any] = {
    "mode": "tolerant",
    "max_abs_diff": 99.0,
    "stop_token_mult_error": 99.0,
    "stop_correlation": -1.0,
    "stop_ess_frac": 0.0,
}
WIDE |= {f"stop_{name}": 1.0 for name in ("route_mismatch_frac", "clip_frac", "ratio_above_2_frac")}
WIDE |= {f"stop_{name}": 99.0 for name in ("k1_nats", "k3_nats", "logprob_diff_mean_nats", "advantage_skew_z")}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    decoder = Decoder(REAL_SHAPE)
    decoder.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return {name: value.detach() for name, value in decoder.state_dict().items()}


def run(tmp_path: Path, config: RunConfig) -> list[dict[str, Any]]:
    toy = ToyWorld(config, tmp_path)
    toy.engine = torch_engine(config, REAL_SHAPE, weights(), 0)
    toy.trainer = PolicyTrainer(TrainModel(REAL_SHAPE, weights(), mode="tolerant"), config.rl, config.numerics)
    toy.grader = ParityGrader()

    async def phase(store: Any) -> None:
        try:
            await run_rl(config, **toy.ports(), store=store)
        finally:
            await toy.engine.close()

    with RunDir.create(tmp_path / "run", config) as opened:
        asyncio.run(phase(opened.store))
        return [record for record in opened.store.metrics(phase="rl") if record.get("numerics/tokens")]


@pytest.mark.parametrize(("kind", "scale"), [("bf16", "token"), ("int8", "token"), ("mxfp8", "tensor"), ("nvfp4", "token")])
def test_the_drift_is_seen_every_step(tmp_path: Path, kind: str, scale: str) -> None:
    metrics = run(tmp_path, toy_config(rl={"learning_rate": 0.003}, numerics=WIDE | {"rollout_precision": kind, "rollout_scale": scale}))
    assert len(metrics) >= 2  # a step without a signal compares nothing
    assert all(record["numerics/k3_nats"] > 1e-7 and record["numerics/is_exact"] == 0 for record in metrics)
    # Weights are rounded anew after every swap: a rollout that kept old ones would drift away step by step.
    assert metrics[-1]["numerics/k3_nats"] < 30 * metrics[0]["numerics/k3_nats"]


def test_the_default_limits_stop_four_bits_at_once(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"allows 0\.05"):
        run(tmp_path, toy_config(numerics={"mode": "tolerant", "rollout_precision": "nvfp4"}))


def test_an_override_alone_makes_a_rollout_low(tmp_path: Path) -> None:
    metrics = run(tmp_path, toy_config(rl={"learning_rate": 0.003}, numerics=WIDE | {"precision": ["experts=fp16"]}))
    assert 0 < metrics[0]["numerics/logprob_diff_max_nats"] < 0.05


def test_exact_mode_refuses_it() -> None:
    config = toy_config(numerics={"mode": "exact", "rollout_precision": "bf16"})
    with pytest.raises(ConfigError, match=r"numerics\.rollout_precision = 'bf16'.*can't be exact"):
        torch_engine(config, REAL_SHAPE, weights(), 0)


@pytest.mark.parametrize("keep", [(), SENSITIVE_OPS])
def test_new_weights_are_rounded_and_the_given_ones_left_alone(keep: tuple[str, ...]) -> None:
    from strop.numerics.precision import Precision

    first, second = weights(0), weights(1)
    kept = {name: value.clone() for name, value in second.items()}
    model = LowPrecisionModel(REAL_SHAPE, first, Precision.of("bf16", keep=keep))
    model.load(second)
    held = dict(model._decoder.named_parameters())
    for name, value in held.items():
        is_kept = keep and ("norm" in name or name.endswith("mlp.gate.weight"))
        assert torch.equal(value, second[name] if is_kept else second[name].bfloat16().float()), name
        assert torch.equal(second[name], kept[name])
