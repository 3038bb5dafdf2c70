"""An episode: what the policy did on a task, token by token.

Tokens in are tokens out: nothing is re-tokenised between turns, so the ids that were sampled are the ids that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from strop.core.outcome import Outcome
from strop.core.routes import Routes

LIMIT_REASONS = ("max_turns", "max_tokens", "wall")
"""The stop reasons that are limits of the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a stream were fed (or sampled) under policy ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One unbroken token stream. A context summary starts a new one.

    Example: a prompt of 3 tokens, an action of 2, an observation of 2, an action of 1 has ``L = 8`` and
    ``loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]``; ``logprobs`` is 0 where the mask is 0; ``routes`` has 7 rows.

    Attributes:
        token_ids: ``int32 [L]``.
        loss_mask: ``bool [L]``, true where the policy sampled the token.
        logprobs: ``float32 [L]``, natural log-probability under the sampler (temperature applied), 0 elsewhere.
        versions: Contiguous spans that cover ``[0, L)``.
        routes: ``L - 1`` rows, or ``None`` when the engine can't return them.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    routes: Routes | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name, dtype in (("token_ids", np.int32), ("loss_mask", np.bool_), ("logprobs", np.float32)):
            array = getattr(self, name)
            if array.shape != (n,) or array.dtype != dtype:
                raise ValueError(f"Trace.{name} must be {np.dtype(dtype)} [{n}], got {array.dtype} {array.shape}")
            array.flags.writeable = False
        if self.routes is not None and len(self.routes) != max(n - 1, 0):
            raise ValueError(f"Trace.routes must have {n - 1} rows for {n} tokens, got {len(self.routes)}")
        at = 0
        for span in self.versions:
            if span.start != at or span.end <= span.start:
                raise ValueError(f"Trace.versions must be contiguous from 0, got {self.versions}")
            at = span.end
        if at != n:
            raise ValueError(f"Trace.versions cover {at} of {n} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One agent turn: sampled tokens, the call they parse to, and what the environment answered.

    Attributes:
        trace: Index of the trace that holds the tokens.
        start: First sampled token of the turn in that trace.
        end: One past the last sampled token.
        call: Tool name, or ``""`` for a malformed call.
        arguments: Parsed arguments.
        text: The action as text.
        observation: The answer as text, after truncation.
        status: ``"ok"``, ``"tool_error"`` (a clear answer to a wrong call) or ``"malformed"``.
        generate_s: Seconds waiting for tokens.
        tool_s: Seconds in the tool.
    """

    trace: int
    start: int
    end: int
    call: str
    arguments: Mapping[str, str]
    text: str
    observation: str
    status: str
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeKey:
    """Names one episode of a run; sampling is keyed by it, so the same key gives the same tokens.

    Attributes:
        phase: For example ``"rl"``, ``"eval.mid"``.
        step: Optimizer step that dispatched it (0 for evaluation).
        task_id: The task.
        sample: Index within the group.
    """

    phase: str
    step: int
    task_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.phase}/{self.step}/{self.task_id}/{self.sample}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A finished episode.

    Attributes:
        key: Its name.
        traces: Token streams in order.
        turns: Agent turns in order.
        stop_reason: ``"submitted"`` (ended by the agent), ``"max_turns"``, ``"max_tokens"``, ``"wall"`` (truncated by a limit), or
            ``"failed"`` (lost to the machinery; neither the agent nor a limit ended it).
        changes: Workspace-relative path to new content (``None``: deleted), everything the agent changed.
        outcome: The verdict, ``None`` before grading.
        costs: Cost book entries, keys from ``strop.core.metrics``: tokens, seconds, bytes.
        stats: Small facts about the episode for tables, for example ``{"edits": 2, "first_edit_right": 1}``.
    """

    key: EpisodeKey
    traces: tuple[Trace, ...]
    turns: tuple[Turn, ...]
    stop_reason: str
    changes: Mapping[str, bytes | None] = field(default_factory=dict)
    outcome: Outcome | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit, not the agent, ended the episode."""
        return self.stop_reason in LIMIT_REASONS
