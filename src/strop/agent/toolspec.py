"""The table of tools: names, parameters and their meaning, in one place for every chat format and model size.

A renderer turns the table into a JSON schema (large models) or a usage line (compact format); ``check_arguments`` holds a call
against it and answers a wrong one with a sentence that says what was expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.core.errors import TaskError, nearest

MAX_ECHO_CHARS = 60


class ToolError(Exception):
    """A wrong call, explained to the agent; never an error of the machinery."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool.

    Attributes:
        name: Lower case; the usage line shows it in capitals.
        type: ``"string"`` or ``"integer"`` (digits, at least ``minimum``).
        doc: One line.
        required: Optional parameters come last.
        minimum: Smallest integer allowed.
    """

    name: str
    type: str
    doc: str
    required: bool = True
    minimum: int = 1


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool.

    Attributes:
        name: What the agent calls.
        doc: One or two sentences.
        parameters: In the order of the positional format.
    """

    name: str
    doc: str
    parameters: tuple[Parameter, ...] = ()

    @property
    def usage(self) -> str:
        """For example ``"read FILE START [COUNT]"``."""
        return " ".join([self.name, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in self.parameters)])

    def json_schema(self) -> dict[str, Any]:
        """Return the tool as an OpenAI function definition."""
        properties = {p.name: {"type": p.type, "description": p.doc} for p in self.parameters}
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": {"name": self.name, "description": self.doc, "parameters": parameters}}


_FILE = Parameter("file", "string", "A path from the listing, or its number in the listing.")

TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec("list", "List the files, each with its number."),
    ToolSpec(
        "search",
        "Find a fixed text in all text files. Answers with number, path, line number and line of the first matches.",
        (Parameter("pattern", "string", "The exact text to find; not a regular expression."),),
    ),
    ToolSpec(
        "read",
        "Show numbered lines of a file, from two lines above START, or exactly COUNT lines from START.",
        (
            _FILE,
            Parameter("start", "integer", "Number of the line to look at, from 1."),
            Parameter("count", "integer", "How many lines to show, at most 60.", required=False),
        ),
    ),
    ToolSpec(
        "edit",
        "Replace a text in a line of a file: its first occurrence there, or in the nearest line that has it.",
        (
            _FILE,
            Parameter("old", "string", "The exact text to replace; may go on over following lines."),
            Parameter("line", "integer", "Number of the line in which OLD begins; a few lines off is put right."),
            Parameter("new", "string", "What to put there; empty deletes OLD."),
        ),
    ),
    ToolSpec("test", "Run the visible tests and show their output."),
    ToolSpec("undo", "Take back the last edit that is not yet undone."),
    ToolSpec("submit", "Finish: hand in the files as they are."),
)

_BY_NAME = {spec.name: spec for spec in TOOLS}
TOOL_NAMES = tuple(_BY_NAME)


def tool_specs(names: Sequence[str]) -> list[ToolSpec]:
    """Return the specs of ``names`` in the order of the table.

    Raises:
        TaskError: A name that isn't in the table.
    """
    for name in names:
        if name not in _BY_NAME:
            raise TaskError(f"task allows the tool {name!r}, which does not exist.{nearest(name, _BY_NAME)}")
    return [spec for spec in TOOLS if spec.name in names]


def usage_line(names: Sequence[str]) -> str:
    """Return the system prompt of the compact format, for example ``"Tools: list, search PATTERN, submit"``."""
    return "Tools: " + ", ".join(spec.usage for spec in tool_specs(names))


def name_arguments(call: str, values: Sequence[str]) -> dict[str, str]:
    """Give positional values their parameter names.

    Values that the tool has no parameter for (or all values of an unknown tool) are kept under their position:
    ``name_arguments("undo", ["x"]) == {"1": "x"}``; ``check_arguments`` then explains the mistake.
    """
    spec = _BY_NAME.get(call)
    known = [p.name for p in spec.parameters] if spec else []
    return {known[i] if i < len(known) else str(i + 1): value for i, value in enumerate(values)}


def order_arguments(call: str, arguments: Mapping[str, str]) -> list[str]:
    """Inverse of ``name_arguments``: values in the order of the table, then what the table doesn't know."""
    spec = _BY_NAME.get(call)
    known = [p.name for p in spec.parameters if p.name in arguments] if spec else []
    return [arguments[name] for name in known] + [value for name, value in arguments.items() if name not in known]


def echo(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """Return ``text`` quoted for an error message, cut to ``limit`` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def check_arguments(call: str, arguments: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str | int]:
    """Hold a call against the table.

    Args:
        call: Tool name as the agent wrote it.
        arguments: By parameter name.
        allowed: Tools of the task.

    Returns:
        Arguments with integers converted and text free of lone surrogates; optional ones may be missing.

    Raises:
        ToolError: Unknown tool, wrong count or names, or a number that isn't one.
    """
    spec = _BY_NAME.get(call)
    if spec is None or call not in allowed:
        close = difflib.get_close_matches(call[:MAX_ECHO_CHARS], list(allowed), n=1, cutoff=0.6)
        hint = f"Did you mean {close[0]}?" if close else f"Tools: {', '.join(allowed)}"
        raise ToolError(f"no tool {echo(call)}. {hint}")
    names = {p.name for p in spec.parameters}
    missing = [p.name for p in spec.parameters if p.required and p.name not in arguments]
    if missing or not names.issuperset(arguments):
        count = len(arguments)
        raise ToolError(f"{call} got {count} argument{'' if count == 1 else 's'}. Usage: {spec.usage}")
    checked: dict[str, str | int] = {}
    for p in spec.parameters:
        if p.name not in arguments:
            continue
        value = arguments[p.name]
        if p.type == "integer":
            checked[p.name] = _integer(p, value)
        else:
            # A lone surrogate (possible in JSON arguments) can be neither written to a file nor shown to a tokenizer.
            checked[p.name] = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return checked


def _integer(parameter: Parameter, value: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) < parameter.minimum:
        raise ToolError(f"{parameter.name.upper()} must be a number from {parameter.minimum}, not {echo(value)}")
    return int(text)
