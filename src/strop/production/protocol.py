"""The OpenAI wire format: requests that are checked by hand where the answer must name the wrong parameter, and error bodies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from strop.core.errors import nearest

MAX_STOPS = 4
MAX_CHOICES = 128
"""Answers of one request, over all its prompts."""


class ApiError(Exception):
    """An error answer.

    Args:
        message: What is wrong and what was expected.
        status: HTTP status.
        param: The parameter at fault, or ``None``.
        code: OpenAI's machine-readable code, or ``None``.
        kind: OpenAI's error type.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    model: str
    """Name of the served model."""
    temperature: float = Field(1.0, ge=0, le=2)
    """0 is greedy; what lies between 0 and 0.01 is taken as 0.01."""
    seed: int | None = None
    """Same seed and same prompt give the same answer."""
    stop: str | list[str] | None = None
    """At most four texts that end the answer; they are not part of it."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Number of answers."""
    stream: bool = False
    """Send server-sent events."""
    stream_options: dict[str, Any] | None = None
    """``{"include_usage": true}`` adds a last event with the usage."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MAX_STOPS or not all(texts):
            raise ValueError(f"expected at most {MAX_STOPS} texts, none of them empty")
        return value

    @property
    def sampling_temperature(self) -> float:
        """What the engine samples at."""
        return max(self.temperature, 0.01) if self.temperature else 0.0

    @property
    def stops(self) -> list[str]:
        """Stop texts as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The conversation."""
    tools: list[dict[str, Any]] | None = None
    """Function tools."""
    tool_choice: Literal["auto", "none"] | None = None
    """``none`` answers in text."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens to sample; by default whatever the context leaves."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of ``max_tokens``."""
    logprobs: bool = False
    """Return the log-probability of each token of the answer."""


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """Text or token ids, one or several."""
    max_tokens: int = Field(16, ge=1)
    """Most tokens to sample."""
    logprobs: Literal[0] | None = None
    """0 returns the log-probability of each token of the answer."""


# Accepted and without effect, because this value (or any, for None) changes nothing here.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": None,
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": None,
    "store": None,
    "suffix": ("",),
    "top_logprobs": (0,),
    "top_p": (1,),
    "user": None,
}


def read_request(kind: type[ChatRequest] | type[CompletionRequest], raw: bytes) -> Any:
    """Parse a request body.

    Raises:
        ApiError: Not JSON, an unsupported parameter, or a wrong value; names it.
    """
    try:
        data = json.loads(raw)
        json.dumps(data, ensure_ascii=False).encode()  # half of a surrogate pair is no text that anything after this could encode
    except UnicodeEncodeError:
        raise ApiError("the body has half of a surrogate pair, which is not Unicode text") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    known = kind.model_fields
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif value is not None and not _is_neutral(name, value):
            hint = "" if name in _NEUTRAL else nearest(name, known)
            raise ApiError(f"unsupported parameter {name!r} = {json.dumps(value)[:80]}.{hint}", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors()[0]
        # pydantic appends the branch of a union to the location; the client knows only the parameter
        location = str(first["loc"][0]) if first["loc"] else None
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(f"parameter {location!r}: {first['msg']}", param=location, code=code) from None


def _is_neutral(name: str, value: Any) -> bool:
    if name not in _NEUTRAL:
        return False
    allowed = _NEUTRAL[name]
    return allowed is None or value in allowed


def normalise_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return function tools with every optional part filled in.

    Raises:
        ApiError: A tool that isn't a function tool, or a parameter of it that has no schema; names the field.
    """
    filled = []
    for index, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"tools[{index}] must be a function tool with a name", param="tools", code="invalid_value")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise ApiError(f"tools[{index}].function.parameters must be a JSON schema of an object", param="tools", code="invalid_value")
        for name, schema in parameters.get("properties", {}).items():
            if not isinstance(schema, (dict, bool)):  # JSON Schema has true (anything) and false (nothing)
                where = f"tools[{index}].function.parameters.properties.{name}"
                raise ApiError(f"{where} must be a JSON schema, got {type(schema).__name__}", param="tools", code="invalid_value")
        parameters = {"type": "object", **parameters, "properties": parameters.get("properties", {})}
        filled.append({"type": "function", "function": {"description": "", **function, "parameters": parameters}})
    return filled


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with plain text contents and parsed arguments, free of fields that don't reach the model.

    Raises:
        ApiError: A message that the chat formats can't carry; names it by index.
    """
    return [_normalise_message(f"messages[{index}]", index, message) for index, message in enumerate(messages)]


def _normalise_message(where: str, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    def wrong(what: str) -> ApiError:
        return ApiError(f"{where}{what}", param="messages", code="invalid_value")

    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise wrong(f".role is {role!r}, expected system, user, assistant or tool")
    if role == "system" and index > 0:
        raise wrong(" is a system message, only the first message may be one")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if any(not isinstance(text, str) for text in texts):
            raise wrong(".content has a part that is not text; only text is supported")
        content = "".join(str(text) for text in texts)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise wrong(f".tool_calls must be a list, got {type(calls).__name__}")
    if role == "assistant" and calls:
        return {
            "role": role,
            "content": content or "",
            "tool_calls": [_normalise_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)],
        }
    if not isinstance(content, str):
        raise wrong(f".content must be text, got {type(content).__name__}")
    return {"role": role, "content": content}


def _normalise_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where} must have a function with a name", param="messages", code="invalid_value")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{where}.function.arguments is not JSON: {error}", param="messages", code="invalid_value") from None
    if not isinstance(parsed, dict):
        raise ApiError(f"{where}.function.arguments must be a JSON object", param="messages", code="invalid_value")
    return {"type": "function", "function": {"name": function["name"], "arguments": parsed}}
