"""Renderers: the only place that knows a chat format. ``renderer_for`` picks one for a checkpoint.

Both are token-exact: a stream is ``render_start``, then sampled tokens and ``render_observation`` in turn; nothing is encoded again. Text
that comes from files, commands or users is encoded with special tokens disabled, so that it can't forge a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer

from strop.agent import compact
from strop.agent.hermes import HermesRenderer
from strop.agent.toolspec import name_arguments, order_arguments, usage_line
from strop.core.errors import CheckpointError
from strop.core.task import Task
from strop.ports import Renderer

CONFIG_FILE = "tokenizer_config.json"
FORMAT_KEY = "strop_chat_format"
FORMATS = ("compact", "hermes")

__all__ = ["ActionRenderer", "CompactRenderer", "HermesRenderer", "renderer_for"]


@runtime_checkable
class ActionRenderer(Renderer, Protocol):
    """A renderer that can also write what it reads: scripted engines, supervised data and readers of episodes need it."""

    def render_action(self, name: str, arguments: Mapping[str, str]) -> list[int]:
        """Tokens that the agent samples for a call, the stop token included."""
        ...

    def read_observation(self, token_ids: Sequence[int]) -> str:
        """Text of the observation that ``render_observation`` made (possibly after an unsampled stop token)."""
        ...

    def render_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Tokens of an OpenAI-style conversation up to where the next action begins."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """All tokens as text, special ones spelled out."""
        ...


class CompactRenderer:
    """The compact format of ``strop.agent.compact``.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` or a fast tokenizer of transformers with the format's special tokens as ids 0 to 7.

    Raises:
        CheckpointError: The tokenizer has other special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Tokenizer = compact.content_tokenizer(tokenizer)
        for token_id, token in enumerate(compact.SPECIAL_TOKENS):
            found = self._tokenizer.token_to_id(token)
            if found != token_id:
                raise CheckpointError(f"tokenizer gives {token!r} the id {found}, the compact chat format needs {token_id}")

    @property
    def stop_ids(self) -> Sequence[int]:
        """The one token that ends an action."""
        return (compact.END,)

    def render_start(self, task: Task, *, system_prompt: bool) -> list[int]:
        """Tokens up to where the first action begins; the system prompt is one line that names the task's tools."""
        system = usage_line(task.tools) if system_prompt else None
        return self._encode(compact.start_segments(task.instruction, system_prompt=system))

    def render_observation(self, text: str) -> list[int]:
        """Tokens after an action's stop token up to where the next action begins."""
        return self._encode(compact.observation_segments(text))

    def render_action(self, name: str, arguments: Mapping[str, str]) -> list[int]:
        """Tokens that the agent samples for a call, arguments in the order of the tool's parameters, the stop token included."""
        return self._encode(compact.action_segments(name, order_arguments(name, arguments)))

    def parse(self, token_ids: Sequence[int]) -> tuple[str, dict[str, str], str]:
        """Return ``(call, arguments, text)``; ``call`` is ``""`` without stop token or name, or with a special token inside."""
        action = compact.split_action(self._tokenizer, token_ids)
        if action is None:
            return "", {}, self.decode(token_ids)
        name, values = action
        return name, name_arguments(name, values), compact.action_text(name, values)

    def read_observation(self, token_ids: Sequence[int]) -> str:
        """Text of the observation that ``render_observation`` made.

        Raises:
            ValueError: The tokens hold no observation.
        """
        ids = list(token_ids)
        start = ids.index(compact.TOOL) + 1
        return self.decode(ids[start : ids.index(compact.END, start)])

    def render_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Tokens of a conversation up to where the next action begins; contents can't form special tokens.

        Raises:
            ValueError: A message has an unknown role.
        """
        return self._encode(_message_segments(messages, tools))

    def decode(self, token_ids: Sequence[int]) -> str:
        """All tokens as text, special ones spelled out."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False)

    def _encode(self, segments: Sequence[compact.Segment]) -> list[int]:
        return compact.encode_segments(self._tokenizer, segments)


def _message_segments(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[compact.Segment]:
    """The same as ``compact.CHAT_TEMPLATE``, with texts kept apart from special tokens."""
    functions = [tool.get("function", tool) for tool in tools or []]
    rest = list(messages)
    system = str(rest.pop(0)["content"]) if rest and rest[0]["role"] == "system" else None
    if functions:
        line = "Tools: " + ", ".join(_schema_usage(function) for function in functions)
        system = line if system is None else system if line in system else f"{system}\n{line}"
    segments: list[compact.Segment] = [compact.BOS]
    if system is not None:
        segments += [compact.SYSTEM, system, compact.END]
    order = {function["name"]: list(function["parameters"]["properties"]) for function in functions}
    for message in rest:
        role, content = message["role"], message.get("content")
        if role in ("user", "tool"):
            segments += [compact.USER if role == "user" else compact.TOOL, str(content), compact.END]
        elif role == "assistant" and message.get("tool_calls"):
            for call in message["tool_calls"]:
                function = call.get("function", call)
                arguments = function["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                known = [name for name in order.get(function["name"], []) if name in arguments]
                values = [arguments[name] for name in [*known, *(name for name in arguments if name not in known)]]
                segments += [compact.CALL, *compact.action_segments(function["name"], [str(value) for value in values])]
        elif role == "assistant":
            segments += [compact.CALL, str(content), compact.END]
        else:
            raise ValueError(f"unknown role {role!r}; expected system (first), user, assistant or tool")
    return [*segments, compact.CALL]


def _schema_usage(function: Mapping[str, Any]) -> str:
    parameters = function["parameters"]
    required = parameters.get("required", [])
    return " ".join([function["name"], *(p.upper() if p in required else f"[{p.upper()}]" for p in parameters["properties"])])


def renderer_for(checkpoint_dir: str | Path) -> ActionRenderer:
    """Return the renderer of a checkpoint directory.

    ``"strop_chat_format"`` in ``tokenizer_config.json`` names the format (``"compact"`` or ``"hermes"``). Without it, a tokenizer that
    has the compact format's special tokens gets the compact renderer, and any other with a chat template the Hermes one.

    Raises:
        CheckpointError: No tokenizer, no chat template, or an unknown format.
    """
    folder = Path(checkpoint_dir)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; expected a fast tokenizer as saved by save_pretrained")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise CheckpointError(f"{file} can't be read: {error}") from error
    config = _read_config(folder / CONFIG_FILE)
    has_compact = all(tokenizer.token_to_id(token) == i for i, token in enumerate(compact.SPECIAL_TOKENS))
    name = config.get(FORMAT_KEY, "compact" if has_compact else "hermes")
    if name == "compact":
        return CompactRenderer(tokenizer)
    if name != "hermes":
        raise CheckpointError(f"{folder / CONFIG_FILE}: {FORMAT_KEY} is {name!r}, expected one of {', '.join(FORMATS)}")
    from transformers import PreTrainedTokenizerFast  # slow import, only large models need it

    return HermesRenderer(PreTrainedTokenizerFast.from_pretrained(str(folder)))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} isn't JSON: {error}") from error
