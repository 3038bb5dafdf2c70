"""The trajectory format ATIF (v1.0 to v1.8), read strictly: a Harbor task may ship one as what the agent did before.

Source: the PyPI package harbor 0.26.0, ``harbor/models/trajectories``; ``make test-harbor`` holds these tables against its own schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.importers.schema import Field, Nested, Table, boolean, either, integer, list_of, map_of, number, plain, shown, text, wrong

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
MAX_DEPTH = 8
"""Sub-agents of sub-agents, at most."""
_AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_AUDIO = ("audio/wav", "audio/mpeg", "audio/mp4", "audio/aac", "audio/ogg", "audio/flac", "audio/webm", "audio/aiff")
_AUDIO_ALIASES = {
    **dict.fromkeys(("audio/mp3", "audio/mpga", "audio/x-mpeg"), "audio/mpeg"),
    **dict.fromkeys(("audio/x-wav", "audio/wave", "audio/vnd.wave"), "audio/wav"),
    **dict.fromkeys(("audio/x-m4a", "audio/m4a"), "audio/mp4"),
    "audio/x-aac": "audio/aac",
    "audio/x-flac": "audio/flac",
    "audio/x-aiff": "audio/aiff",
}


def _optional(check: Any) -> Field:
    return Field(check=check, nullable=True)


def _needed(check: Any) -> Field:
    return Field(check=check, required=True)


_EXTRA = {"extra": _optional(map_of(plain))}
_COUNT = integer(minimum=0)


def _media_type(value: Any, where: str) -> str:
    name = value.strip().lower() if isinstance(value, str) else value
    return text(choices=(*_IMAGES, *_AUDIO))(_AUDIO_ALIASES.get(name, name), where)


def _part(found: Mapping[str, Any], where: str) -> None:
    kind, source = found["type"], found.get("source")
    if (kind == "text") != (found.get("text") is not None) or (kind == "text") == (source is not None):
        raise TaskError(f"{where}: a part of type {kind!r} needs {'text and no source' if kind == 'text' else 'a source and no text'}")
    if source is None:
        return
    if not source["media_type"].startswith(kind):
        raise TaskError(f"{where}: a part of type {kind!r} has the media type {source['media_type']!r}")
    if kind == "image" and "duration_sec" in source:
        raise TaskError(f"{where}.source: unknown key 'duration_sec' of an image")


def _timestamp(value: Any, where: str) -> str:
    try:
        datetime.datetime.fromisoformat(text()(value, where).replace("Z", "+00:00"))
    except ValueError:
        raise wrong(where, value, "an ISO 8601 time") from None
    return value


def _step(found: Mapping[str, Any], where: str) -> None:
    given = [key for key in _AGENT_ONLY if found.get(key) is not None]
    if given and found["source"] != "agent":
        raise TaskError(f"{where}: {given[0]!r} belongs to steps of the agent, this one's source is {found['source']!r}")
    if found.get("llm_call_count") == 0 and found["source"] == "agent":
        for key in ("metrics", "reasoning_content"):
            if found.get(key) is not None:
                raise TaskError(f"{where}: {key!r} can't be there when llm_call_count is 0")
    calls = {call["tool_call_id"] for call in found.get("tool_calls") or []}
    for result in (found.get("observation") or {}).get("results", []):
        if result.get("source_call_id") is not None and result["source_call_id"] not in calls:
            raise TaskError(f"{where}: source_call_id {shown(result['source_call_id'])} names no tool call of the step")


def _reference(found: Mapping[str, Any], where: str) -> None:
    if found.get("trajectory_id") is None and found.get("trajectory_path") is None:
        raise TaskError(f"{where} needs the key 'trajectory_id' or 'trajectory_path'")


def _trajectory(found: Mapping[str, Any], where: str) -> None:
    for number_, step in enumerate(found["steps"], 1):
        if step["step_id"] != number_:
            raise wrong(f"{where}.steps[{number_ - 1}].step_id", step["step_id"], f"{number_}: steps are numbered from 1")
    names = [below.get("trajectory_id") for below in found.get("subagent_trajectories") or []]
    if None in names or len(set(names)) != len(names):
        raise TaskError(f"{where}.subagent_trajectories: every one needs a trajectory_id of its own")


def _below(value: Any, where: str) -> list[dict[str, Any]]:
    if where.count(".subagent_trajectories") > MAX_DEPTH:
        raise TaskError(f"{where}: sub-agents are nested more than {MAX_DEPTH} deep")
    return list_of(TRAJECTORY.read)(value, where)


SOURCE = Table(
    name="a media source",
    fields={"media_type": _needed(_media_type), "path": _needed(text()), "duration_sec": _optional(number(minimum=0))},
)
PART = Table(
    name="a content part",
    fields={
        "type": _needed(text(choices=("text", "image", "audio"))),
        "text": _optional(text()),
        "source": _optional(Nested(SOURCE)),
    },
    verify=_part,
)
_CONTENT = either(text(), Nested(PART, is_list=True), expected="text or a list of content parts")
REFERENCE = Table(
    name="a reference to a sub-agent",
    fields={key: _optional(text()) for key in ("trajectory_id", "session_id", "trajectory_path")} | _EXTRA,
    verify=_reference,
)
RESULT = Table(
    name="an observation result",
    fields={
        "source_call_id": _optional(text()),
        "content": _optional(_CONTENT),
        "subagent_trajectory_ref": _optional(Nested(REFERENCE, is_list=True)),
        **_EXTRA,
    },
)
TOOL_CALL = Table(
    name="a tool call",
    fields={"tool_call_id": _needed(text()), "function_name": _needed(text()), "arguments": _needed(map_of(plain)), **_EXTRA},
)
METRICS = Table(
    name="metrics of a step",
    fields={
        **{key: _optional(integer()) for key in ("prompt_tokens", "completion_tokens", "cached_tokens")},
        "cost_usd": _optional(number()),
        "prompt_token_ids": _optional(list_of(integer())),
        "completion_token_ids": _optional(list_of(integer())),
        "logprobs": _optional(list_of(number())),
        **_EXTRA,
    },
)
STEP = Table(
    name="a step",
    fields={
        "step_id": _needed(integer(minimum=1)),
        "timestamp": _optional(_timestamp),
        "source": _needed(text(choices=("system", "user", "agent"))),
        "model_name": _optional(text()),
        "reasoning_effort": _optional(either(text(), number(), expected="text or a number")),
        "message": _needed(_CONTENT),
        "reasoning_content": _optional(text()),
        "tool_calls": _optional(Nested(TOOL_CALL, is_list=True)),
        "observation": _optional(Nested(Table(name="an observation", fields={"results": _needed(Nested(RESULT, is_list=True))}))),
        "metrics": _optional(Nested(METRICS)),
        "is_copied_context": _optional(boolean),
        "llm_call_count": _optional(_COUNT),
        **_EXTRA,
    },
    verify=_step,
)
FINAL_METRICS = Table(
    name="final metrics",
    fields={
        **{key: _optional(integer()) for key in ("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens")},
        "total_cost_usd": _optional(number()),
        "total_steps": _optional(_COUNT),
        **_EXTRA,
    },
)
AGENT = Table(
    name="the agent of a trajectory",
    fields={
        "name": _needed(text()),
        "version": _needed(text()),
        "model_name": _optional(text()),
        "tool_definitions": _optional(list_of(map_of(plain))),
        **_EXTRA,
    },
)
TRAJECTORY = Table(
    name="an ATIF trajectory",
    fields={
        "schema_version": Field(check=text(choices=VERSIONS), default=VERSIONS[-1]),
        "session_id": _optional(text()),
        "trajectory_id": _optional(text()),
        "agent": _needed(Nested(AGENT)),
        "steps": _needed(Nested(STEP, is_list=True)),
        "notes": _optional(text()),
        "final_metrics": _optional(Nested(FINAL_METRICS)),
        "continued_trajectory_ref": _optional(text()),
        "subagent_trajectories": _optional(_below),
        **_EXTRA,
    },
    verify=_trajectory,
)


def read_trajectory(data: Any, where: str) -> dict[str, Any]:
    """Return an ATIF trajectory as it was given, checked.

    Args:
        data: JSON data.
        where: What messages call it.

    Raises:
        TaskError: It breaks a rule of the format; unknown keys are named.
    """
    found = TRAJECTORY.read(data, where)
    if not found["steps"]:
        raise TaskError(f"{where}.steps is empty, expected at least one step")
    return found
