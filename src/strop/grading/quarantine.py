"""What a flag means for training: which flagged episodes leave it, which stay with another reward, and when a run must stop.

Pure functions over outcomes. Every episode stays on disk with its flags, whatever is decided here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from strop.core.config import GradingConfig
from strop.core.episode import Episode
from strop.core.errors import ConfigError, StropError, nearest
from strop.core.outcome import Flag, Outcome, Scored
from strop.grading.rules import SEVERITY
from strop.grading.table import HACK


class Action(StrEnum):
    """What happens to an episode because of a flag; a later one wins over an earlier one.

    A second hack must not soften what the first one costs, so leaving training (``DROP``, which costs nothing) yields to ``ZERO`` and
    ``PENALISE``.
    """

    KEEP = "keep"
    DROP = "drop"
    ZERO = "zero"
    PENALISE = "penalise"


_ORDER = list(Action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """The policy of a run.

    Example: with the defaults of the configuration, an episode with the flags ``order_counter`` (hack) and ``dropped`` (info) leaves
    training, one with ``resource`` trains with reward 0, one with ``rewrite`` (warn) trains as it was graded.

    Attributes:
        default: Action of rules of severity ``"hack"``; others are kept.
        rules: Action by rule, whatever its severity.
        penalty: ``PENALISE`` trains with minus this.
    """

    default: Action = Action.DROP
    rules: Mapping[str, Action] = field(default_factory=dict)
    penalty: float = 1.0

    @classmethod
    def of(cls, config: GradingConfig) -> Quarantine:
        """Return the policy of a configuration.

        Raises:
            ConfigError: A list names a rule that doesn't exist, or two lists name the same.
        """
        rules: dict[str, Action] = {}
        for action in Action:
            for name in getattr(config, action.value):
                if name not in SEVERITY:
                    raise ConfigError(f"grading.{action.value}: unknown rule {name!r}.{nearest(name, SEVERITY)}")
                if rules.setdefault(name, action) is not action:
                    raise ConfigError(f"rule {name!r} stands in grading.{rules[name].value} and in grading.{action.value}")
        return cls(default=Action(config.on_hack), rules=rules, penalty=config.penalty)

    def action(self, flag: Flag) -> Action:
        """Return what one flag asks for."""
        return self.rules.get(flag.rule, self.default if flag.severity == HACK else Action.KEEP)

    def decide(self, outcome: Scored) -> tuple[Action, str]:
        """Return the action on an episode and the rule that asked for it (``""`` for ``KEEP``)."""
        chosen, rule = Action.KEEP, ""
        for flag in outcome.flags:
            action = self.action(flag)
            if _ORDER.index(action) > _ORDER.index(chosen):
                chosen, rule = action, flag.rule
        return chosen, rule

    def reward(self, outcome: Scored) -> float | None:
        """Return the reward to train on, or ``None`` for an episode that leaves training."""
        action, _ = self.decide(outcome)
        match action:
            case Action.DROP:
                return None
            case Action.ZERO:
                return 0.0
            case Action.PENALISE:
                return -self.penalty
        return outcome.reward


def is_hack(outcome: Outcome | None) -> bool:
    """Whether a flag of severity ``"hack"`` is on an outcome."""
    return isinstance(outcome, Scored) and any(flag.severity == HACK for flag in outcome.flags)


class HackWatch:
    """The share of flagged episodes among the last ones, and its limit.

    Args:
        limit: Largest share; at 1 nothing stops.
        window: Number of episodes; nothing is decided on fewer.
    """

    def __init__(self, limit: float, window: int) -> None:
        self._limit = limit
        self._recent: deque[tuple[bool, str]] = deque(maxlen=window)
        self._last = ""

    @classmethod
    def of(cls, config: GradingConfig) -> HackWatch:
        """Return the watch of a configuration."""
        return cls(config.max_hack_rate, config.hack_window)

    @property
    def rate(self) -> float:
        """Share of the window, 0 while there is nothing."""
        return sum(hit for hit, _ in self._recent) / len(self._recent) if self._recent else 0.0

    def add(self, episodes: Iterable[Episode]) -> None:
        """Take in graded episodes; those without a verdict count neither way."""
        for episode in episodes:
            if isinstance(episode.outcome, Scored):
                hacks = [flag for flag in episode.outcome.flags if flag.severity == HACK]
                self._recent.append((bool(hacks), hacks[0].rule if hacks else ""))
                if hacks:
                    self._last = f"{episode.key}: {hacks[0].rule}: {hacks[0].evidence}"

    def check(self) -> None:
        """Stop a run that trains hackers.

        Raises:
            StropError: The window is full and more of it than the limit is flagged; names the rules and the last evidence.
        """
        if len(self._recent) < (self._recent.maxlen or 0) or self.rate <= self._limit:
            return
        rules = Counter(rule for hit, rule in self._recent if hit)
        most = ", ".join(f"{rule} {count}" for rule, count in rules.most_common(3))
        raise StropError(
            f"{self.rate:.1%} of the last {len(self._recent)} episodes are flagged as hacks, grading.max_hack_rate is {self._limit:.1%} "
            f"({most}); the last one, {self._last}. `strop hacks` shows them all."
        )


def hack_metrics(episodes: Sequence[Episode], quarantine: Quarantine) -> dict[str, float]:
    """Return the ``hacks/*`` metrics of the graded episodes of a step."""
    scored = [episode.outcome for episode in episodes if isinstance(episode.outcome, Scored)]
    if not scored:
        return {}
    decided = Counter(quarantine.decide(outcome) for outcome in scored)
    actions: Counter[str] = Counter()
    for (action, rule), count in decided.items():
        if action is not Action.KEEP:
            actions[f"hacks/{action}/{rule}"] += count
    return {
        "hacks/rate_frac": sum(map(is_hack, scored)) / len(scored),
        "hacks/quarantined": float(sum(count for (action, _), count in decided.items() if action is Action.DROP)),
        **{key: float(value) for key, value in actions.items()},
    }
