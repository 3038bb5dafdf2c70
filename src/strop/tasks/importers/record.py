"""A task that came from elsewhere: what its source said, unchanged, and one view of it for whoever runs it.

Every format becomes the same two things: an ``ImportedTask`` (the fields and files of the source, from which it can be written again
unchanged, and the ``Task`` that an agent gets) and a ``Blueprint`` (image, steps, verifier, gold solution: what a runner needs to know).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.core.task import Limits, Task
from strop.tasks.importers.hostile import File

TOOLS = ("list", "search", "read", "edit", "undo", "submit")
"""Tools of an imported task: its tests are hidden, so there is none to run them."""

LIMITS = Limits(max_turns=64, max_tokens=65_536, max_new_tokens=8_192, wall_s=1_800.0, exec_s=60.0)
"""What an episode of an imported task may use, where its source gives no time of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedTask:
    """One task as its source gave it.

    Example::

        ImportedTask(format="swe-bench", name="django__django-11099", fields={"instance_id": "django__django-11099", ...}, files={},
                     task=Task(task_id="swe-bench:django__django-11099", instruction="UsernameValidator allows ...", ...))

    Attributes:
        format: Name of the format, see ``importers.FORMATS``.
        name: The source's own name of it.
        fields: What the source said, every key in its present spelling. Plain data.
        files: Files that came with it, by relative path.
        task: What an agent gets.
    """

    format: str
    name: str
    fields: Mapping[str, Any]
    files: Mapping[str, File]
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """``"public"``, ``"no-network"`` or ``"allowlist"`` with the hosts allowed."""

    mode: str = "public"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An environment to start.

    Attributes:
        image: Ready image, or ``""``: then it is built from ``build``.
        build: Folder of the task with the Dockerfile or Compose file, or ``""``.
        workdir: Working directory, or ``""`` for the image's own.
        os: ``"linux"`` or ``"windows"``.
        network: Of everything in it, unless a phase has its own.
        settings: Everything else of the environment table (resources, variables, healthcheck, MCP servers, ...), as it was read.
    """

    image: str = ""
    build: str = ""
    workdir: str = ""
    os: str = "linux"
    network: Network = field(default_factory=Network)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect:
    """A command that runs after the agent and before its environment is stopped."""

    command: str
    service: str = "main"
    timeout_s: float = 60.0
    user: str | int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierPlan:
    """How a step is verified.

    Attributes:
        is_separate: In an environment of its own, not in the agent's.
        place: That environment; ``None`` in the agent's.
        script: Path of the test script within the task's files, or ``""`` where the image brings its own.
        timeout_s: Seconds.
        env: Variables; ``${VAR}`` is resolved on the host.
        user: Who runs it.
        network: Its own policy, or ``None``.
        collect: Commands that save the agent's state first.
        fail_to_pass: Tests that must pass after and failed before.
        pass_to_pass: Tests that must go on passing.
        expected: Test name to status, where exact equality is asked for.
    """

    is_separate: bool = False
    place: Place | None = None
    script: str = ""
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | int | None = None
    network: Network | None = None
    collect: tuple[Collect, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One instruction with its verifier; most tasks have one step.

    Attributes:
        name: ``""`` for the only step of a single-step task.
        instruction: What the agent is told.
        verifier: How it is checked.
        agent_timeout_s: Seconds of the agent, ``None`` for no limit of the task's own.
        agent_user: Who the agent is.
        agent_network: Policy of the agent's phase, or ``None``.
        min_reward: Below it the remaining steps are dropped: a number for the key ``reward``, or one per key.
        healthcheck: As it was read, or ``None``.
        artifacts: What is copied out: source, destination, exclude, service.
        setup: Script that runs before the agent, within the task's files, or ``""``.
        history: Path of an ATIF trajectory of what happened before, or ``""``.
    """

    name: str = ""
    instruction: str
    verifier: VerifierPlan
    agent_timeout_s: float | None = None
    agent_user: str | int | None = None
    agent_network: Network | None = None
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Mapping[str, Any] | None = None
    artifacts: tuple[Mapping[str, Any], ...] = ()
    setup: str = ""
    history: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gold:
    """The reference solution.

    Attributes:
        kind: ``"patch"`` (a diff to apply), ``"script"`` (a path within the task's files), ``"answer"`` (text), ``"none"``.
        value: The diff, path or text.
        env: Variables of the script.
    """

    kind: str = "none"
    value: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """What a runner needs to know, the same for every format.

    Attributes:
        place: Where the agent works.
        steps: At least one, in order.
        gold: The reference solution.
        reward_strategy: ``"mean"`` or ``"final"`` over the steps.
        base_commit: Commit that the work starts from, or ``""``.
        bug_patch: Diff that creates the bug on top of ``base_commit``, or ``""``.
        test_patch: Diff that brings the tests that grade, or ``""``.
    """

    place: Place
    steps: tuple[StepPlan, ...]
    gold: Gold = field(default_factory=Gold)
    reward_strategy: str = "mean"
    base_commit: str = ""
    bug_patch: str = ""
    test_patch: str = ""

    def needs(self) -> tuple[str, ...]:
        """Return what a sandbox must be able to do for this task, for example ``("image", "compose", "gpu")``; sorted."""
        found = set()
        settings = self.place.settings
        if self.place.image or self.place.build:
            found.add("image")
        services = {item.get("service", "main") for step in self.steps for item in step.artifacts}
        services |= {hook.service for step in self.steps for hook in step.verifier.collect}
        if services - {"main"} or settings.get("compose"):
            found.add("compose")
        if settings.get("gpus"):
            found.add("gpu")
        found |= {key for key in ("tpu", "mcp_servers", "healthcheck") if settings.get(key)}
        if self.place.os != "linux":
            found.add(self.place.os)
        if len(self.steps) > 1:
            found.add("steps")
        if any(step.verifier.is_separate for step in self.steps):
            found.add("separate verifier")
        policies = [self.place.network, *(step.agent_network for step in self.steps), *(step.verifier.network for step in self.steps)]
        found |= {f"network {policy.mode}" for policy in policies if policy is not None}
        return tuple(sorted(found))


def make_task(
    format_name: str,
    name: str,
    instruction: str,
    *,
    split: str,
    limits: Limits = LIMITS,
    tools: Sequence[str] = TOOLS,
    **provenance: str,
) -> Task:
    """Return the ``Task`` of an imported task; ``provenance`` entries that are empty are left out."""
    task_id = f"{format_name}:{name}"
    return Task(
        task_id=task_id,
        instruction=instruction,
        workspace=task_id,
        tools=tuple(tools),
        verifier=task_id,
        split=split,
        limits=limits,
        provenance={"format": format_name, **{key: value for key, value in provenance.items() if value}},
    )


_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


def strip_canary(instruction: str) -> str:
    """Return an instruction without the leading lines that mark benchmark data (and the blank lines after them)."""
    lines = instruction.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])
