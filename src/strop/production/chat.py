"""Between OpenAI messages and token streams, in both directions, without re-encoding what the model said.

``ChatCodec`` remembers the exact tokens behind every answer it gave. When a client sends a conversation back with a tool result, the
stream is continued from those tokens, just as an episode continues it; a conversation it doesn't know is rendered from its text.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.agent.render import ActionRenderer
from strop.agent.toolspec import order_arguments
from strop.core.errors import StropError
from strop.production.protocol import ApiError

REMEMBERED_ANSWERS = 4096


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer.

    Attributes:
        message: OpenAI message, with ``role``.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``.
    """

    message: dict[str, Any]
    finish_reason: str


class ChatCodec:
    """Renders conversations and reads answers.

    Args:
        renderer: Chat format of the checkpoint.
        capacity: Answers whose tokens are remembered.
    """

    def __init__(self, renderer: ActionRenderer, capacity: int = REMEMBERED_ANSWERS) -> None:
        self._renderer = renderer
        self._capacity = capacity
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return [int(token) for token in self._renderer.stop_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, special ones spelled out."""
        return self._renderer.decode(token_ids)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation up to where the answer begins.

        Args:
            messages: From ``normalise_messages``.
            tools: From ``normalise_tools``.

        Raises:
            ApiError: The chat format can't carry the conversation.
        """
        if len(messages) > 1 and messages[-1]["role"] == "tool":
            known = self._known.get(_digest(messages[:-1], tools))
            if known is not None:
                return known.tolist() + self._renderer.render_observation(messages[-1]["content"])
        try:
            return self._renderer.render_messages(list(messages), list(tools) or None)
        except (StropError, ValueError, KeyError, TypeError) as error:
            raise ApiError(f"the chat format can't carry these messages: {error}", param="messages", code="invalid_value") from error

    def answer(
        self, token_ids: Sequence[int], finish_reason: str, tools: Sequence[Mapping[str, Any]], *, text: str | None = None
    ) -> Answer:
        """Read sampled tokens.

        Args:
            token_ids: What was sampled, the stop token included.
            finish_reason: ``"stop"`` or ``"length"``.
            tools: Tools that may be called; empty for an answer in text.
            text: Text to answer with instead of all tokens (cut at a stop text); such an answer is never a call.
        """
        if text is None and tools and finish_reason == "stop":
            name, arguments, whole = self._renderer.parse(token_ids)
            schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
            if name in schema:
                values = json.dumps(_typed_arguments(name, arguments, schema[name]), ensure_ascii=False)
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": values}}
                before = whole.split("<tool_call>")[0].strip() if "<tool_call>" in whole else ""
                return Answer({"role": "assistant", "content": before or None, "tool_calls": [call]}, "tool_calls")
        return Answer({"role": "assistant", "content": self.text(token_ids) if text is None else text}, finish_reason)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of an answer without its stop token."""
        ids = list(token_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self._renderer.stop_ids else ids)

    def remember(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], answer: Answer, stream: Sequence[int]
    ) -> None:
        """Keep the exact tokens of a conversation that ends with ``answer``; the stop token is added if the answer was cut off."""
        ids = [int(token) for token in stream]
        if ids[-1] not in self._renderer.stop_ids:
            ids.append(self.stop_ids[0])
        message: dict[str, Any] = {"role": "assistant", "content": answer.message["content"] or ""}
        if "tool_calls" in answer.message:
            calls = [call["function"] for call in answer.message["tool_calls"]]
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": json.loads(call["arguments"])}} for call in calls
            ]
        digest = _digest([*messages, message], tools)
        self._known[digest] = np.array(ids, np.int32)
        self._known.move_to_end(digest)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


def _digest(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps([list(messages), list(tools)], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _typed_arguments(name: str, arguments: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Give arguments the names and types of the request's own schema; a number stays text where its spelling would be lost."""
    properties = schema["properties"]
    if not set(arguments) <= set(properties):
        names = list(properties)
        values = order_arguments(name, arguments)
        arguments = {names[i] if i < len(names) else str(i + 1): value for i, value in enumerate(values)}
    typed: dict[str, Any] = {}
    for key, value in arguments.items():
        wanted = properties.get(key)
        is_integer = isinstance(wanted, dict) and wanted.get("type") == "integer"
        typed[key] = int(value) if is_integer and value.isdecimal() and str(int(value)) == value else value
    return typed
