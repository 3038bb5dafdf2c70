"""A task: something to do in a workspace, with a verifier that the agent never sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one episode may use.

    Attributes:
        max_turns: Agent turns, each at most one tool call.
        max_tokens: Tokens of the whole stream (prompt, actions and observations).
        max_new_tokens: Sampled tokens of one turn.
        wall_s: Seconds from the first token to the last.
        exec_s: Seconds of one command in the sandbox.
    """

    max_turns: int = 16
    max_tokens: int = 1536
    max_new_tokens: int = 48
    wall_s: float = 120.0
    exec_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task.

    Example::

        Task(task_id="boltons-24.0:strutils.cardinalize#3f2a", instruction="The tests fail: ...",
             workspace="boltons-24.0#3f2a", tools=("list", "search", "read", "edit", "test", "undo", "submit"),
             limits=Limits(), verifier="boltons-24.0#3f2a", split="train",
             provenance={"source": "boltons 24.0", "licence": "BSD-3-Clause", "kind": "comparison",
                         "cluster": "boltons/strutils.py:cardinalize"})

    Attributes:
        task_id: Unique and stable across machines.
        instruction: What the agent is told first.
        workspace: Locator of the starting files, resolved by the pool that made the task.
        tools: Names of the tools that the agent may call.
        limits: What an episode may use.
        verifier: Locator of the hidden verifier; never shown to the agent.
        provenance: Where it comes from. ``cluster`` groups tasks that aren't independent (intervals use it).
        split: ``"train"``, ``"heldout"`` or ``"hard"``.
    """

    task_id: str
    instruction: str
    workspace: str
    tools: tuple[str, ...]
    verifier: str
    split: str
    limits: Limits = field(default_factory=Limits)
    provenance: Mapping[str, str] = field(default_factory=dict)
