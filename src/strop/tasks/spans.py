"""Where the functions of a module are, and a digest that is the same for near-duplicates."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FunctionSpan:
    """Lines of a function.

    Attributes:
        name: Qualified name within the module: ``"cardinalize"`` or ``"Table.get_cell"``.
        start_line: 1-based line of ``def`` (decorators are before it).
        end_line: Last line.
    """

    name: str
    start_line: int
    end_line: int


def find_functions(source: str) -> list[FunctionSpan]:
    """Return module-level functions and methods (of nested classes too) in source order; text that doesn't parse has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return list(_functions(tree.body, ""))


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[FunctionSpan]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield FunctionSpan(prefix + node.name, node.lineno, node.end_lineno or node.lineno)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def normalised_digest(source: str, span: FunctionSpan) -> str:
    """Return a digest of a function's shape.

    Names are numbered in order of first use, constants count by type, the docstring, annotations and decorators don't count; attribute and
    keyword names do, so that two functions with one shape but different calls differ.

    Raises:
        SyntaxError: If the span doesn't parse.
    """
    text = "\n".join(source.split("\n")[span.start_line - 1 : span.end_line])
    node = ast.parse(f"if 1:\n{text}" if text[:1] in (" ", "\t") else text).body[0]
    if isinstance(node, ast.If):
        node = node.body[0]
    names: dict[str, int] = {}
    parts: list[str] = []
    _shape(node, names, parts)
    return hashlib.blake2b(" ".join(parts).encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


_IGNORED = frozenset({"annotation", "returns", "decorator_list", "type_comment", "ctx", "kind", "type_params"})
_NAME_FIELDS = frozenset({"id", "arg", "name", "asname"})


def _shape(node: ast.AST, names: dict[str, int], parts: list[str]) -> None:
    parts.append(type(node).__name__)
    if isinstance(node, ast.Constant):
        parts.append(type(node.value).__name__)
        return
    for field in node._fields:
        if field in _IGNORED:
            continue
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            _shape(value, names, parts)
        elif isinstance(value, list):
            if field == "body" and isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]
            parts.append("[")
            for item in value:
                if isinstance(item, ast.AST):
                    _shape(item, names, parts)
                else:
                    parts.append(str(item))
            parts.append("]")
        elif field in _NAME_FIELDS and isinstance(value, str) and not isinstance(node, ast.keyword):
            parts.append(f"n{names.setdefault(value, len(names))}")
        elif value is not None:
            parts.append(str(value))
