"""Calls that people wrote: doctests, the package's own tests and call sites, as far as their arguments are literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from strop.tasks.values import JSON, UnencodableError, encode_value

_PROMPT = re.compile(r"^\s*>>> ?(.*(?:\n\s*\.\.\. ?.*)*)", re.MULTILINE)
MAX_CALLS = 60

HarvestedCall = tuple[list[JSON], dict[str, JSON]]


def harvest_calls(sources: Iterable[str], names: Iterable[str]) -> dict[str, list[HarvestedCall]]:
    """Collect calls of ``names`` with literal arguments.

    Args:
        sources: Module texts (doctests in their docstrings count) and texts of documents with ``>>>`` examples.
        names: Plain function names.

    Returns:
        For each name, encoded ``(args, kwargs)`` without repetition, at most 60.
    """
    found: dict[str, dict[str, HarvestedCall]] = {name: {} for name in names}
    if not found:
        return {}
    mentions = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(found)))})\(")
    for source in sources:
        texts = [re.sub(r"\n\s*\.\.\. ?", "\n", match[1]) for match in _PROMPT.finditer(source)]
        for text in [source, *texts]:
            if not mentions.search(text):
                continue
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    _collect(node, found)
    return {name: list(calls.values())[:MAX_CALLS] for name, calls in found.items()}


def _collect(node: ast.Call, found: dict[str, dict[str, HarvestedCall]]) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name not in found or not (node.args or node.keywords):
        return
    try:
        args = [encode_value(_literal(argument)) for argument in node.args]
        kwargs = {keyword.arg: encode_value(_literal(keyword.value)) for keyword in node.keywords if keyword.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError, UnencodableError):
        return
    if len(kwargs) == len(node.keywords):
        found[name].setdefault(ast.dump(node), (args, kwargs))


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(node)
