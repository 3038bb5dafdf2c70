"""Deadlines, and what runs on the model between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.core.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Longest waits, in seconds. Reaching one is an ``EngineError`` that says what was waited for."""

    open_s: float = 600.0
    generate_s: float = 600.0
    step_s: float = 300.0
    job_s: float = 600.0
    close_s: float = 60.0


class Stuck(EngineError):
    """The model is still busy after its deadline; it can't be used again."""


@dataclass(slots=True, eq=False)
class Job:
    """Something that needs the model between two steps.

    Attributes:
        run: The work, called where steps are computed.
        future: Gets its result.
        what: For messages.
        drain: Wait until no started request runs.
        done: Called on the event loop right after the work.
        is_running: Whether the work has begun; its caller's deadline can't take it back then.
    """

    run: Callable[[], Any]
    future: asyncio.Future[Any]
    what: str
    drain: bool
    done: Callable[[], None] | None = None
    is_running: bool = False
