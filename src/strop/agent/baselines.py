"""Policies that know nothing: what any trained policy must beat at the same budget of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from strop.core.random import generator


class CandidateEdit(Protocol):
    """Anything with the arguments of an ``edit`` call, such as an edit of the mutation catalogue."""

    @property
    def line(self) -> int:
        """Number of the line, from 1."""
        ...

    @property
    def old(self) -> str:
        """Text that is replaced."""
        ...

    @property
    def new(self) -> str:
        """Its replacement."""
        ...


def is_green(observation: str) -> bool:
    """Whether a ``test`` observation reports success: its last line begins with ``OK``."""
    return observation.rstrip().rsplit("\n", 1)[-1].startswith("OK")


class NoChange:
    """Submits at once."""

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        """Return ``submit``, whatever was observed."""
        return "submit", []


class RandomEdits:
    """Tries candidate edits in random order without repeats: edit, test, then submit if green, else undo and go on.

    It never gives up before its candidates are used up, so the turn limit is its budget: the last edit may stay untested.

    Args:
        file: Path of the file, or its number in the listing, as text.
        candidates: Edits of the suspected function as it is now.
        seed: With ``key``, fixes the order.
        key: Names the episode.
        weights: One for each candidate, not negative; equal by default. The order is that of successive draws without
            replacement with these weights.
    """

    def __init__(
        self,
        file: str,
        candidates: Sequence[CandidateEdit],
        *,
        seed: int,
        key: object = "",
        weights: Sequence[float] | None = None,
    ) -> None:
        self._file = file
        self._queue = draw_order(candidates, seed=seed, key=key, weights=weights)
        self._last = "undo"

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        """Return ``test`` after an accepted edit, ``undo`` after a red test, ``submit`` after a green one or at the end, else an edit."""
        name, values = self._next(observation or "")
        self._last = name
        return name, values

    def _next(self, observation: str) -> tuple[str, list[str]]:
        if self._last == "edit" and not observation.startswith("error: "):
            return "test", []
        if self._last == "test":
            if is_green(observation):
                return "submit", []
            return "undo", []
        if not self._queue:
            return "submit", []
        edit = self._queue.pop(0)
        return "edit", [self._file, edit.old, str(edit.line), edit.new]


def draw_order(
    candidates: Sequence[CandidateEdit], *, seed: int, key: object = "", weights: Sequence[float] | None = None
) -> list[CandidateEdit]:
    """Return ``candidates`` in the order of weighted draws without replacement; those of weight 0 are left out.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006): sort by exponential / weight.

    Raises:
        ValueError: A weight is negative, or their number is wrong.
    """
    w = np.ones(len(candidates)) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (len(candidates),) or np.any(w < 0):
        raise ValueError(f"weights must be {len(candidates)} numbers >= 0, got {w.tolist()}")
    times = generator("random-edits", seed, key).exponential(size=len(candidates))
    with np.errstate(divide="ignore", over="ignore"):
        times = times / w
    return [candidates[i] for i in np.argsort(times, kind="stable") if w[i] > 0]
