"""The compact chat format: eight special tokens, one action per turn, arguments by position.

    <|bos|><|system|>TEXT<|end|><|user|>TEXT<|end|><|call|>NAME<|arg|>A1<|arg|>A2<|end|><|tool|>OBSERVATION<|end|><|call|>...

An action begins after ``<|call|>``; its stop token is ``<|end|>``. Text is encoded apart from the special tokens and with them
disabled, so that no file content, test output or argument can forge one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

PAD, BOS, END, SYSTEM, USER, CALL, ARG, TOOL = range(8)
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|call|>", "<|arg|>", "<|tool|>")
"""Special tokens in the order of their ids; a tokenizer of this format must give exactly these ids."""

SYSTEM_PROMPT = "Tools: list, search PATTERN, read FILE START [COUNT], edit FILE OLD LINE NEW, test, undo, submit"

Segment = str | int
"""A piece of a prompt: ordinary text, or the id of a special token."""


def content_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a copy of ``tokenizer`` for which every added token is ordinary text.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` or a fast tokenizer of transformers; it isn't changed.

    Returns:
        A tokenizer that never adds a beginning-of-stream token and reads ``"<|end|>"`` as seven characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(backend.to_str())
    for token in state.get("added_tokens", []):
        token["special"] = True
    state["truncation"] = None
    state["padding"] = None
    plain = Tokenizer.from_str(json.dumps(state))
    plain.encode_special_tokens = True
    return plain


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[int]:
    """Return the ids of ``segments``; each text is encoded on its own.

    Example: ``encode_segments(tok, [CALL, "read", ARG, "3", END])`` is ``[5, *ids("read"), 6, *ids("3"), 2]``.

    Args:
        tokenizer: From ``content_tokenizer``.
        segments: Text and ids of special tokens.

    Raises:
        ValueError: If ``tokenizer`` would turn text into special tokens.
    """
    if not tokenizer.encode_special_tokens:
        raise ValueError("encode_segments needs a tokenizer from content_tokenizer(): this one lets text forge special tokens")
    ids: list[int] = []
    for segment in segments:
        if isinstance(segment, int):
            ids.append(segment)
        elif segment:
            ids.extend(tokenizer.encode(segment, add_special_tokens=False).ids)
    return ids


def action_segments(name: str, args: Sequence[str]) -> list[Segment]:
    """Return the segments that the agent samples for a call: after ``<|call|>``, up to and with ``<|end|>``."""
    segments: list[Segment] = [name]
    for arg in args:
        segments += [ARG, arg]
    return [*segments, END]


def action_text(name: str, args: Sequence[str]) -> str:
    """Return an action as one readable line, for example ``"read<|arg|>3<|arg|>214"``. For people and logs, never for encoding."""
    return SPECIAL_TOKENS[ARG].join([name, *args])


def start_segments(instruction: str, *, system_prompt: str | None) -> list[Segment]:
    """Return the segments from the beginning of the stream to where the first action begins.

    Args:
        instruction: What the agent is told first.
        system_prompt: Its text, or ``None`` for a stream without a system turn.
    """
    system: list[Segment] = [] if system_prompt is None else [SYSTEM, system_prompt, END]
    return [BOS, *system, USER, instruction, END, CALL]


def observation_segments(text: str) -> list[Segment]:
    """Return the segments between an action's ``<|end|>`` and the next action."""
    return [TOOL, text, END, CALL]


def split_action(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, list[str]] | None:
    """Read an action back by splitting at the id of ``<|arg|>``.

    Args:
        tokenizer: Any tokenizer of the format.
        token_ids: What the agent sampled, the stop token included.

    Returns:
        ``(name, arguments)``, or ``None`` if the action has no ``<|end|>``, another special token inside, or no name.
    """
    ids = [int(token) for token in token_ids]
    if not ids or ids[-1] != END:
        return None
    parts: list[list[int]] = [[]]
    for token in ids[:-1]:
        if token == ARG:
            parts.append([])
        elif token < len(SPECIAL_TOKENS):
            return None
        else:
            parts[-1].append(token)
    texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
    return (texts[0], texts[1:]) if texts[0] else None


CHAT_TEMPLATE = (
    "{%- macro usage(tools) -%}Tools: "
    "{%- for tool in tools -%}{%- set f = tool.function if tool.function is defined else tool -%}"
    "{{ ', ' if not loop.first else ' ' }}{{ f.name }}"
    "{%- for p in f.parameters.properties -%}"
    "{{ ' ' + (p | upper if p in f.parameters.required else '[' + p | upper + ']') }}"
    "{%- endfor -%}{%- endfor -%}{%- endmacro -%}"
    "{{- '<|bos|>' -}}"
    "{%- set ns = namespace(messages=messages, system='', has_system=false) -%}"
    "{%- if messages and messages[0].role == 'system' -%}"
    "{%- set ns.system = messages[0].content -%}{%- set ns.has_system = true -%}{%- set ns.messages = messages[1:] -%}{%- endif -%}"
    "{%- if tools -%}"
    "{%- set line = usage(tools) -%}"
    "{%- if not ns.has_system -%}{%- set ns.system = line -%}"
    "{%- elif line not in ns.system -%}{%- set ns.system = ns.system + '\\n' + line -%}{%- endif -%}"
    "{%- set ns.has_system = true -%}{%- endif -%}"
    "{%- if ns.has_system -%}{{ '<|system|>' + ns.system + '<|end|>' }}{%- endif -%}"
    "{%- for m in ns.messages -%}"
    "{%- if m.role == 'user' -%}{{ '<|user|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' -%}{{ '<|tool|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls -%}"
    "{%- for c in m.tool_calls -%}{%- set f = c.function if c.function is defined else c -%}"
    "{{ '<|call|>' + f.name }}"
    "{%- if f.arguments is string -%}{{ raise_exception('tool call arguments must be an object, not a JSON string') }}{%- endif -%}"
    "{%- set order = namespace(names=[]) -%}"
    "{%- for tool in tools or [] -%}{%- set g = tool.function if tool.function is defined else tool -%}"
    "{%- if g.name == f.name -%}{%- set order.names = g.parameters.properties.keys() | list -%}{%- endif -%}{%- endfor -%}"
    "{%- for p in order.names -%}{%- if p in f.arguments -%}{{ '<|arg|>' + f.arguments[p] | string }}{%- endif -%}{%- endfor -%}"
    "{%- for p, v in f.arguments.items() -%}{%- if p not in order.names -%}{{ '<|arg|>' + v | string }}{%- endif -%}{%- endfor -%}"
    "{{ '<|end|>' }}{%- endfor -%}"
    "{%- elif m.role == 'assistant' -%}{{ '<|call|>' + m.content + '<|end|>' }}"
    "{%- else -%}{{ raise_exception('unknown role ' + m.role) }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|call|>' }}{%- endif -%}"
)
"""The format as a Jinja chat template, for ``tokenizer.chat_template`` of a checkpoint: transformers and vLLM render the same ids.

With ``tools`` the system turn ends with one usage line per tool list, so ``tools`` alone gives ``SYSTEM_PROMPT``.
"""
