"""What grading says about an episode. Only ``Scored`` trains; a failure of the machinery is never reward 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A rule that fired on an episode.

    Attributes:
        rule: Name of the rule, for example ``"test_edit"``.
        severity: ``"info"``, ``"warn"`` or ``"hack"``.
        evidence: The line or path that made it fire, at most 200 characters.
    """

    rule: str
    severity: str
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A verdict from evidence.

    Attributes:
        reward: The number that trains, usually in ``[0, 1]``.
        parts: What it is made of, for example ``{"tests": 1.0, "passed": 24, "total": 24}``.
        reason: One word for a reward of 0: ``"tests"``, ``"unchanged"``, ``"hang"``, ``"crash"``, ``"resource"``, ...
        flags: Rules that fired.
        layers: Checks that the verdict rests on, for example ``("isolated", "shuffled")``; empty if nothing was run.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    flags: tuple[Flag, ...] = ()
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ungraded:
    """No verdict was possible although nothing broke (for example an unreadable judge)."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The machinery broke; the episode is counted and left out of training."""

    error: str


Outcome = Scored | Ungraded | Failed
