"""The reward that an episode trains on: its verdict, what its flags ask for, and the price of careless calls."""

from __future__ import annotations

from dataclasses import dataclass

from strop.core.config import GradingConfig
from strop.core.episode import Episode
from strop.core.outcome import Scored
from strop.grading.quarantine import Quarantine


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReward:
    """The reward policy of a run. Only training sees it; the verdict on disk stays as it is.

    Example: with ``refused_call_cost = .05`` a repair after two refused calls trains with ``.9``, a miss after none with ``0``.

    Attributes:
        quarantine: What flags do.
        refused_call_cost: Taken off for every call that a tool refused or that could not be parsed.
    """

    quarantine: Quarantine
    refused_call_cost: float = 0.0

    @classmethod
    def of(cls, config: GradingConfig) -> TrainingReward:
        """Return the policy of a configuration.

        Raises:
            ConfigError: See ``Quarantine.of``.
        """
        return cls(quarantine=Quarantine.of(config), refused_call_cost=config.refused_call_cost)

    def __call__(self, episode: Episode) -> float | None:
        """Return the reward of an episode with a verdict, or ``None`` if it leaves training."""
        assert isinstance(episode.outcome, Scored), f"{episode.key} has no verdict"
        reward = self.quarantine.reward(episode.outcome)
        return None if reward is None else reward - self.refused_call_cost * refused_calls(episode)


def refused_calls(episode: Episode) -> int:
    """Return how many calls of an episode were malformed or refused by a tool."""
    return sum(turn.status != "ok" for turn in episode.turns)
