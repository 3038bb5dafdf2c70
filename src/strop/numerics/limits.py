"""The guard over the steps: every figure of ``compare_logprobs`` against a warn and a stop limit, and a watch for bias that k3 can't see.

Pure numpy. The trainer calls it before the optimizer step, so that a stopped run has its weights untouched.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.core.config import NumericsConfig
from strop.core.errors import NumericsError

LOG = logging.getLogger("strop.numerics")

WINDOW_STEPS = 10
"""Steps over which the advantage-signed skew is summed."""
MIN_TOKENS = 64
"""Below so many tokens a correlation or an effective sample size says nothing."""
SKEW = "advantage_skew"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One watched figure.

    Attributes:
        name: ``numerics/<name>`` of the metric, ``warn_<name>`` and ``stop_<name>`` of the configuration.
        is_floor: The figure must lie above its limit instead of below.
        meaning: What a breach looks like to a person.
        source: Where the defaults come from.
    """

    name: str
    is_floor: bool = False
    meaning: str
    source: str

    def is_broken(self, value: float, limit: float) -> bool:
        """Whether ``value`` lies on the wrong side; NaN does."""
        return not (value >= limit if self.is_floor else value <= limit)


LIMITS = (
    Limit(name="token_mult_error", meaning="token probabilities are off by a factor", source="NeMo-RL: investigate above 1.05, CI to 1.1"),
    Limit(name="k3_nats", meaning="rollout and trainer are different policies", source="NeMo-RL: below 1e-3; prime-rl merges to 0.015"),
    Limit(name="k1_nats", meaning="the trainer finds its own samples likelier or less likely", source="verl, slime: |KL| above 0.1"),
    Limit(name="logprob_diff_mean_nats", meaning="the typical token disagrees", source="default of slime's tests"),
    Limit(
        name="ratio_above_2_frac",
        meaning="many tokens have a ratio outside [1/2, 2]",
        source="F(2) of arXiv 2510.11370; the limit is our own",
    ),
    Limit(
        name="ess_frac", is_floor=True, meaning="few tokens carry the importance weights", source="verl: effective sample size below 0.3"
    ),
    Limit(
        name="correlation", is_floor=True, meaning="log-probabilities hardly correlate", source="MiniMax-M1: 0.997 repaired, 0.987 broken"
    ),
    Limit(
        name="clip_frac",
        meaning="the difference alone clips tokens",
        source="45 % before a published collapse; the limit is our own",
    ),
    Limit(
        name="route_mismatch_frac", meaning="routers choose other experts", source="R3: 10 % of the routers differed in runs that collapsed"
    ),
)

STATISTICAL = frozenset({"ess_frac", "correlation", "ratio_above_2_frac", "clip_frac"})


@dataclass(frozen=True, slots=True)
class SkewSums:
    """What one step says about the skew.

    Attributes:
        total: Sum over streams of ``s``, ``s`` being the stream's sum of ``A (exp(d) - 1)``.
        squares: Sum of ``s`` squared.
        scale: Sum over tokens of ``|A|``.
    """

    total: float
    squares: float
    scale: float


def skew_sums(generator: np.ndarray, trainer: np.ndarray, advantage: np.ndarray, streams: np.ndarray) -> SkewSums:
    """Return the sums of the advantage-signed skew of one step.

    ``E[A (p_trainer / p_rollout - 1)]`` over tokens of the rollout is what the trainer's copy of the policy would earn more than the
    rollout's, to first order: a mismatch that isn't a mere noise but takes sides. k3 is its square and can't see the side.

    Args:
        generator: ``float32 [N]``.
        trainer: ``float32 [N]``.
        advantage: ``float32 [N]``.
        streams: ``int [N]`` number of the token stream; tokens of one stream share their advantage and aren't independent.
    """
    ratio = np.expm1(trainer.astype(np.float64) - generator.astype(np.float64))
    each = np.bincount(streams, weights=advantage.astype(np.float64) * ratio) if len(streams) else np.zeros(0)
    return SkewSums(float(each.sum()), float(np.square(each).sum()), float(np.abs(advantage.astype(np.float64)).sum()))


class DriftGuard:
    """Holds each step's figures against the limits; the skew over a window of steps.

    The window's statistic is the self-normalised sum ``z = sum s / sqrt(sum s^2)``: where the sides are fair coins,
    ``P(|z| > x) <= 2 exp(-x^2 / 2)`` whatever the sizes, 3e-8 at 6. A size below ``stop_advantage_skew`` of the advantage is left alone.

    Source: self-normalised bound: Efron, "Student's t-test under symmetry conditions" (JASA 1969). Limits: see ``LIMITS``.

    Args:
        config: Section ``numerics``.
    """

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        self.window: deque[SkewSums] = deque(maxlen=WINDOW_STEPS)

    def check(self, metrics: Mapping[str, float], skew: SkewSums, *, worst: str = "", hint: str = "") -> dict[str, float]:
        """Judge one step.

        Args:
            metrics: ``numerics/*`` of the step.
            skew: Its sums.
            worst: Names the token with the largest difference, for the message.
            hint: Names what else is known about the place, for example the layer with the most foreign routes.

        Returns:
            ``numerics/warnings``, ``numerics/advantage_skew_window``, ``numerics/advantage_skew_z``.

        Raises:
            NumericsError: A stop limit is crossed; names the figure, its limit, the source of the limit and the worst token.
        """
        self.window.append(skew)
        z, relative = self.skew()
        found = {"numerics/advantage_skew_window": relative, "numerics/advantage_skew_z": z}
        if self.config.mode == "off":
            return found | {"numerics/warnings": 0.0}
        warnings = []
        for limit, value in self._figures(metrics):
            place = "; ".join(part for part in (f"largest difference at {worst}" if worst else "", hint) if part)
            text = f"numerics/{limit.name} is {value:.4g}: {limit.meaning} ({place or 'no token named'})"
            bound = getattr(self.config, f"stop_{limit.name}")
            if limit.is_broken(value, bound):
                raise NumericsError(f"{text}; numerics.stop_{limit.name} = {bound:g} ({limit.source}); no weight was changed")
            if limit.is_broken(value, getattr(self.config, f"warn_{limit.name}")):
                warnings.append(text)
        warnings += self._check_skew(z, relative)
        for text in warnings:
            LOG.warning("%s", text)
        return found | {"numerics/warnings": float(len(warnings))}

    def skew(self) -> tuple[float, float]:
        """Return ``z`` and the relative size of the skew over the window; zeros where nothing differs."""
        total = math.fsum(step.total for step in self.window)
        squares = math.fsum(step.squares for step in self.window)
        scale = math.fsum(step.scale for step in self.window)
        return (total / math.sqrt(squares) if squares > 0 else 0.0), (total / scale if scale > 0 else 0.0)

    def state(self) -> list[list[float]]:
        """Return the window, so that a resumed run judges as an uninterrupted one."""
        return [[step.total, step.squares, step.scale] for step in self.window]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Inverse of ``state``."""
        self.window = deque((SkewSums(*map(float, step)) for step in state), maxlen=WINDOW_STEPS)

    def _figures(self, metrics: Mapping[str, float]) -> list[tuple[Limit, float]]:
        few = metrics.get("numerics/tokens", 0.0) < MIN_TOKENS
        found = []
        for limit in LIMITS:
            value = metrics.get(f"numerics/{limit.name}")
            if value is not None and not (few and limit.name in STATISTICAL):
                found.append((limit, abs(value) if limit.name == "k1_nats" else value))
        return found

    def _check_skew(self, z: float, relative: float) -> list[str]:
        config = self.config
        sides = "favours tokens that were rewarded" if relative > 0 else "favours tokens that were punished"
        text = (
            f"over the last {len(self.window)} steps the trainer's copy {sides}: advantage-signed skew {relative:.3g} of the advantage, "
            f"z = {z:.1f}; k3 can't see this"
        )
        if abs(z) > config.stop_advantage_skew_z and abs(relative) > config.stop_advantage_skew:
            raise NumericsError(
                f"{text}; limits numerics.stop_advantage_skew_z = {config.stop_advantage_skew_z:g} and numerics.stop_advantage_skew = "
                f"{config.stop_advantage_skew:g} (self-normalised bound, 2 exp(-z^2/2)); no weight was changed"
            )
        is_odd = abs(z) > config.warn_advantage_skew_z and abs(relative) > config.stop_advantage_skew
        return [text] if is_odd else []
