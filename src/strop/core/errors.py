"""The error tree. One root, one branch per boundary.

    StropError
    |- ConfigError      the user's configuration or command line (exit code 2)
    |- TaskError        a task, its workspace or its pool
    |- SandboxError     the machine that runs agent code, never the agent's own failure
    |- EngineError      token generation
    |- GradingError     the verdict machinery, never a wrong solution
    |- JudgeError       a judge that can't be reached or read
    |- WeightsError     weight export, transport and import
    |- CheckpointError  files of a run or a model on disk
    |- NumericsError    numbers that disagree or are not finite; stops before the optimizer step

Each error carries ``retryable`` and the ids involved, so that a supervisor can decide without reading text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StropError(Exception):
    """Root of every error that strop raises on purpose.

    Args:
        message: One sentence: what is wrong, the value, what was expected, what to do.
        retryable: Whether the same call may succeed when repeated unchanged.
        ids: The ids involved, for example ``{"task": "boltons.strutils:12", "sample": "3"}``.
    """

    exit_code = 1

    def __init__(self, message: str, *, retryable: bool = False, ids: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.ids = dict(ids or {})


class ConfigError(StropError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class TaskError(StropError):
    """A task, its workspace or its pool is unusable."""


class SandboxError(StropError):
    """The sandbox itself failed; a command that failed inside it is a result, not an error."""


class EngineError(StropError):
    """Token generation failed."""


class GradingError(StropError):
    """The verdict machinery failed; the episode becomes ``Failed``, never reward 0."""


class JudgeError(StropError):
    """A judge couldn't be reached or its answer couldn't be read."""


class WeightsError(StropError):
    """Weights couldn't be exported, moved or loaded unchanged."""


class CheckpointError(StropError):
    """A file of a run or of a model is missing, damaged or of another version."""


class NumericsError(StropError):
    """Numbers disagree or are not finite. Raised before the optimizer step."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known spelling.

    Args:
        name: What the user wrote.
        known: The names that exist.

    Returns:
        ``" Did you mean 'x'?"`` or, without a close match, the sorted list of known names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""


def first_known(errors: ExceptionGroup) -> StropError:
    """Return the first error of ours in what a task group raised; without one the group is raised again.

    Not ``except*``: on early Python 3.11 what is raised inside one comes out wrapped in a group.
    """
    known, _ = errors.split(StropError)
    while isinstance(known, ExceptionGroup):
        known = known.exceptions[0]
    if known is None:
        raise errors
    return known
