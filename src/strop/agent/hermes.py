"""The renderer of large models: the checkpoint's own chat template, calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A chat template renders whole conversations, an episode needs the piece that each turn adds. The piece is found by rendering a conversation
with place holders and cutting; it is checked that the template adds the same piece at every depth (some templates rewrite history).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from strop.agent.compact import content_tokenizer
from strop.agent.toolspec import TOOL_NAMES, tool_specs
from strop.core.errors import CheckpointError
from strop.core.task import Task

SYSTEM_TEXT = (
    "You work on the files of one project with the given tools. Make exactly one tool call in each turn. Call submit when you are done."
)

# Nothing that a tokenizer, a template filter or a trim would change.
_MARK = "strop0placeholder0{}0"
_MARKED = re.compile(r"strop0placeholder0\d+0")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class HermesRenderer:
    """Renders through ``tokenizer.apply_chat_template`` and parses Hermes tool calls (Qwen, Hermes and many fine-tunes).

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template that knows tools.

    Raises:
        CheckpointError: There is no chat template, or it isn't prefix-stable: the text it adds after an action depends on how many turns
            came before, or it changes earlier turns. Such a template can't be token-exact.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError("the tokenizer has no chat template; a large model needs one that knows tools")
        self._tokenizer = tokenizer
        self._plain: Tokenizer = content_tokenizer(tokenizer)
        backend = tokenizer.backend_tokenizer
        self._added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        alternatives = "|".join(re.escape(text) for text in sorted(self._added, key=len, reverse=True))
        self._added_pattern = re.compile(f"({alternatives})") if alternatives else None
        self._stop_id, self._before, self._after = self._observation_frame()
        eos = tokenizer.eos_token_id
        self._stop_ids = (self._stop_id,) if eos in (None, self._stop_id) else (self._stop_id, int(eos))

    @property
    def stop_ids(self) -> Sequence[int]:
        """The token that ends an action in the template, then the tokenizer's end-of-text token if that is another one."""
        return self._stop_ids

    def render_start(self, task: Task, *, system_prompt: bool) -> list[int]:
        """Tokens up to where the first action begins. Without the system prompt the tools aren't named either.

        Raises:
            CheckpointError: The chat template can't render it.
        """
        messages = [{"role": "user", "content": task.instruction}]
        if not system_prompt:
            return self.render_messages(messages)
        tools = [spec.json_schema() for spec in tool_specs(task.tools)]
        return self.render_messages([{"role": "system", "content": SYSTEM_TEXT}, *messages], tools)

    def render_observation(self, text: str) -> list[int]:
        """Tokens after an action's stop token up to where the next action begins."""
        return self._encode([(self._before, False), (text, True), (self._after, False)])

    def render_action(self, name: str, arguments: Mapping[str, str]) -> list[int]:
        """Tokens that the agent samples for a call, the stop token included."""
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return [*self._encode([("<tool_call>\n", False), (call, True), ("\n</tool_call>", False)]), self._stop_id]

    def parse(self, token_ids: Sequence[int]) -> tuple[str, dict[str, str], str]:
        """Return ``(call, arguments, text)``; ``call`` is ``""`` unless the action is complete and holds one readable call."""
        ids = [int(token) for token in token_ids]
        is_complete = bool(ids) and ids[-1] in self._stop_ids
        text = self.decode(ids[:-1] if is_complete else ids)
        call = _parse_call(text) if is_complete else None
        return ("", {}, text) if call is None else (*call, text)

    def read_observation(self, token_ids: Sequence[int]) -> str:
        """Text of the observation that ``render_observation`` made.

        Raises:
            ValueError: The tokens hold no observation.
        """
        text = self.decode(token_ids)
        start = text.index(self._before) + len(self._before)
        return text[start : text.rindex(self._after)]

    def render_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Tokens of a conversation up to where the next action begins; contents can't form special tokens.

        Raises:
            CheckpointError: The chat template can't render it.
        """
        contents: list[str] = []
        marked: list[dict[str, Any]] = []
        for message in messages:
            message = dict(message)
            if isinstance(message.get("content"), str) and message["content"]:
                contents.append(message["content"])
                message["content"] = _MARK.format(len(contents) - 1)
            marked.append(message)
        text = self._render(marked, tools)
        parts: list[tuple[str, bool]] = []
        at = 0
        for match in _MARKED.finditer(text):
            parts += [(text[at : match.start()], False), (contents[int(match.group()[len("strop0placeholder0") : -1])], True)]
            at = match.end()
        return self._encode([*parts, (text[at:], False)])

    def decode(self, token_ids: Sequence[int]) -> str:
        """All tokens as text, special ones spelled out."""
        return self._plain.decode([int(token) for token in token_ids], skip_special_tokens=False)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, generate: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=generate, tokenize=False
            )
        except Exception as error:  # a template is a program of the checkpoint's; it may raise anything
            raise CheckpointError(f"the chat template can't render a conversation with tools: {type(error).__name__}: {error}") from error

    def _encode(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode text as one string in which only the template's own parts may hold added tokens.

        Equal to encoding the joined text whenever contents hold no spelled-out added token: the tokenizer cuts at added tokens first and
        encodes what lies between them, template and content together.
        """
        ids: list[int] = []
        run: list[str] = []

        def flush() -> None:
            ids.extend(self._plain.encode("".join(run), add_special_tokens=False).ids)
            run.clear()

        for text, is_content in parts:
            pieces = [text] if is_content or self._added_pattern is None else self._added_pattern.split(text)
            for number, piece in enumerate(pieces):
                if number % 2:
                    flush()
                    ids.append(self._added[piece])
                else:
                    run.append(piece)
        flush()
        return ids

    def _observation_frame(self) -> tuple[int, str, str]:
        """Return the stop token of an action and the texts before and after an observation's content."""
        tools = [spec.json_schema() for spec in tool_specs(TOOL_NAMES)]
        user, *marks = (_MARK.format(i) for i in range(5))
        turns = [{"role": "assistant" if i % 2 == 0 else "tool", "content": mark} for i, mark in enumerate(marks)]
        start = [{"role": "user", "content": user}]
        texts = [self._render(start + turns[:n], tools) for n in (0, 2, 4)]
        frames = [_frame(texts[1], marks[0], marks[1], ""), _frame(texts[2], marks[2], marks[3], "")]
        first_in_history = _frame(texts[2], marks[0], marks[1], marks[2])
        is_stable = texts[1].startswith(texts[0]) and frames[0] == frames[1] and None not in (*frames, first_in_history)
        if not is_stable or frames[0] is None or first_in_history is None or not first_in_history[1].startswith(frames[0][1]):
            raise CheckpointError(
                "the chat template isn't prefix-stable: what it adds after a tool call depends on the turns before or after; "
                "use a template that keeps earlier turns as they were"
            )
        before, after = frames[0]
        match = self._added_pattern.match(before) if self._added_pattern else None
        if match is None:
            raise CheckpointError(f"the chat template ends an action with {before[:20]!r}, expected a special token")
        return self._added[match.group()], before[match.end() :], after


def _frame(text: str, action: str, observation: str, following: str) -> tuple[str, str] | None:
    """Return what stands between an action and its observation, and between the observation and the next action (or the end)."""
    if text.count(action) != 1 or text.count(observation) != 1:
        return None
    before = text[text.index(action) + len(action) : text.index(observation)]
    end = text.index(following) if following else len(text)
    return before, text[text.index(observation) + len(observation) : end]


def _parse_call(text: str) -> tuple[str, dict[str, str]] | None:
    """Return the one call of an action, or ``None`` if there is none, more than one, or it can't be read."""
    calls = _CALL.findall(text)
    if len(calls) != 1 or text.count("<tool_call>") != 1:
        return None
    try:
        call = json.loads(calls[0])
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return _clean(call["name"]), {_clean(key): _clean(value) for key, value in values.items()}


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can make and nothing can store."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
