"""The guard over the steps: silent on clean noise, and each planted drift stops with the figure that is meant for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strop.core.config import NumericsConfig
from strop.core.errors import NumericsError
from strop.numerics.compare import compare_logprobs
from strop.numerics.limits import LIMITS, DriftGuard, SkewSums, skew_sums

EPISODES, LENGTH = 64, 30


class Step:
    """One step of made-up tokens: advantages by episode, differences as planted."""

    def __init__(self, seed: int, noise: float = 0.0, bias: float = 0.0) -> None:
        draw = np.random.default_rng(seed)
        self.streams = np.repeat(np.arange(EPISODES), LENGTH)
        sides = np.where(draw.random(EPISODES) < 0.5, 1.0, -1.0)
        self.advantage = (sides[self.streams] * 0.5).astype(np.float32)
        self.generator = -draw.exponential(1.0, EPISODES * LENGTH).astype(np.float32)
        # E[exp(d)] = 1, as for a true ratio of probabilities.
        d = draw.normal(0, noise, len(self.generator)) - noise**2 / 2 + bias * sides[self.streams]
        self.trainer = (self.generator + d).astype(np.float32)

    def check(self, guard: DriftGuard) -> dict[str, float]:
        metrics = compare_logprobs(self.generator, self.trainer, self.advantage)
        found = guard.check(metrics, skew_sums(self.generator, self.trainer, self.advantage, self.streams), worst="token 7 of episode x")
        return metrics | found


def guard(**changes: Any) -> DriftGuard:
    return DriftGuard(NumericsConfig.model_validate({"mode": "tolerant", **changes}))


def test_equal_numbers_are_silent() -> None:
    subject = guard(mode="exact")
    for seed in range(12):
        assert Step(seed).check(subject)["numerics/warnings"] == 0
    assert subject.skew() == (0.0, 0.0)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.02])
def test_clean_noise_is_silent_over_hundreds_of_steps(noise: float, caplog: pytest.LogCaptureFixture) -> None:
    """fp32 rollouts lie near 1e-6, 16-bit ones of a small MoE near 0.02."""
    subject = guard()
    for seed in range(400):
        assert Step(seed, noise).check(subject)["numerics/warnings"] == 0
    assert not caplog.records


@pytest.mark.parametrize("bias", [0.003, -0.003])
def test_bias_along_the_advantage_stops_within_ten_steps_while_k3_is_flat(bias: float) -> None:
    """VeXact's blind spot: the bias has mean zero and adds a fiftieth to k3."""
    noise = 0.02
    subject, flat = guard(), [Step(100 + seed, noise).check(guard())["numerics/k3_nats"] for seed in range(10)]
    steps = [Step(seed, noise, bias) for seed in range(10)]
    side = "rewarded" if bias > 0 else "punished"
    with pytest.raises(NumericsError, match=rf"favours tokens that were {side}.*k3 can't see this"):
        [step.check(subject) for step in steps]
    k3 = [compare_logprobs(step.generator, step.trainer, step.advantage)["numerics/k3_nats"] for step in steps]
    assert max(k3) < 1.2 * max(flat)


def test_a_bias_too_small_to_matter_is_left_alone() -> None:
    subject = guard()
    for seed in range(20):
        found = Step(seed, 1e-7, 3e-6).check(subject)
        assert found["numerics/warnings"] == 0
    assert abs(found["numerics/advantage_skew_z"]) > 6  # seen, but below numerics.stop_advantage_skew


def drifted(seed: int, name: str) -> dict[str, float]:
    """Metrics in which one figure alone is beyond its stop limit."""
    step = Step(seed)
    metrics = compare_logprobs(step.generator, step.trainer, step.advantage) | {"numerics/route_mismatch_frac": 0.0}
    limit = next(limit for limit in LIMITS if limit.name == name)
    bound = getattr(NumericsConfig(), f"stop_{name}")
    return metrics | {f"numerics/{name}": bound - 1e-3 if limit.is_floor else bound * 1.01}


@pytest.mark.parametrize("name", [limit.name for limit in LIMITS])
def test_each_figure_stops_at_its_own_limit(name: str) -> None:
    with pytest.raises(NumericsError, match=rf"numerics/{name} is .*token 3.*numerics\.stop_{name} = .*no weight was changed"):
        guard().check(drifted(0, name), SkewSums(0, 0, 1), worst="token 3")
    assert guard(mode="off").check(drifted(0, name), SkewSums(0, 0, 1))["numerics/warnings"] == 0


@pytest.mark.parametrize("name", [limit.name for limit in LIMITS])
def test_each_figure_warns_before_it_stops(name: str, caplog: pytest.LogCaptureFixture) -> None:
    limit = next(limit for limit in LIMITS if limit.name == name)
    config = NumericsConfig()
    warn, stop = getattr(config, f"warn_{name}"), getattr(config, f"stop_{name}")
    assert limit.is_broken(stop, warn)
    metrics = drifted(0, name) | {f"numerics/{name}": (warn + stop) / 2}
    assert guard().check(metrics, SkewSums(0, 0, 1), hint="layer 2")["numerics/warnings"] == 1
    assert f"numerics/{name}" in caplog.text
    assert "layer 2" in caplog.text


def test_nan_breaks_every_limit() -> None:
    with pytest.raises(NumericsError, match="k3_nats is nan"):
        guard().check({"numerics/tokens": 100.0, "numerics/k3_nats": float("nan")}, SkewSums(0, 0, 1))


def test_window_survives_a_restart() -> None:
    one, two = guard(), guard()
    for seed in range(7):
        Step(seed, 0.03).check(one)
    two.load_state(one.state())
    assert Step(9, 0.03).check(one) == Step(9, 0.03).check(two)
