"""Where the functions of a module are, and a digest that is the same for near-duplicates."""

from __future__ import annotations

import ast
import functools
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
        return list(function_nodes(source))
    except (SyntaxError, ValueError, RecursionError):
        return []


@functools.lru_cache(maxsize=4)
def function_nodes(source: str) -> dict[FunctionSpan, ast.FunctionDef]:
    """Return what ``find_functions`` finds with the syntax trees, which must not be changed.

    Raises:
        SyntaxError: The text doesn't parse (also ``ValueError`` and ``RecursionError``).
    """
    return dict(_functions(ast.parse(source).body, ""))


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[FunctionSpan, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield FunctionSpan(prefix + node.name, node.lineno, node.end_lineno or node.lineno), node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def normalised_digest(source: str, span: FunctionSpan) -> str:
    """Return a digest of a function's shape.

    Names are numbered in order of first use, constants count by type, the docstring, annotations and decorators don't count; attribute and
    keyword names do, so that two functions with one shape but different calls differ.

    Raises:
        SyntaxError: If the source doesn't parse.
        KeyError: If the span isn't one from ``find_functions``.
    """
    node = function_nodes(source)[span]
    names: dict[str, int] = {}
    parts: list[str] = []
    _shape(node, names, parts)
    return hashlib.blake2b(" ".join(parts).encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()


_IGNORED = frozenset({"annotation", "returns", "decorator_list", "type_comment", "ctx", "kind", "type_params"})
_NAME_FIELDS = frozenset({"id", "arg", "name", "asname"})


_FIELDS: dict[type, tuple[str, ...]] = {}


def _shape(node: ast.AST, names: dict[str, int], parts: list[str]) -> None:
    kind = type(node)
    parts.append(kind.__name__)
    if kind is ast.Constant:
        parts.append(type(node.value).__name__)  # type: ignore[attr-defined]
        return
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _FIELDS[kind] = tuple(field for field in kind._fields if field not in _IGNORED)
    for field in fields:
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            _shape(value, names, parts)
        elif isinstance(value, list):
            if field == "body" and kind is ast.FunctionDef and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
                value = value[1:]
            parts.append("[")
            for item in value:
                if isinstance(item, ast.AST):
                    _shape(item, names, parts)
                else:
                    parts.append(str(item))
            parts.append("]")
        elif value is not None:
            is_name = field in _NAME_FIELDS and isinstance(value, str) and kind is not ast.keyword
            parts.append(f"n{names.setdefault(value, len(names))}" if is_name else str(value))
