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

    Example: with ``refused_call_cost = .4`` a repair of eight calls, two of them refused, trains with ``.9``, a miss without a refused
    call with ``0``.

    Attributes:
        quarantine: What flags do.
        refused_call_cost: Taken off times the share of calls that a tool refused or that could not be parsed. A share, not a number:
            an agent that gives up early makes few calls of either kind and gains nothing by it.
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
        return None if reward is None else reward - self.refused_call_cost * refused_share(episode)


def refused_share(episode: Episode) -> float:
    """Return the share of an episode's calls that were malformed or refused by a tool, 0 for an episode without a call."""
    return sum(turn.status != "ok" for turn in episode.turns) / max(len(episode.turns), 1)
