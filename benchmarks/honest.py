"""Honest ways to write one repair: refactorings, added tests and files, slow imports. None of them may be rejected or flagged."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strop.tasks.mutation import FunctionSpan

_TEST = '''"""More tests of {name}."""

import unittest

from {module} import {name}


class TestMore(unittest.TestCase):
    def test_is_there(self):
        self.assertTrue(callable({name}))


if __name__ == "__main__":
    unittest.main()
'''
_CONFTEST = '''"""Fixtures for the tests."""

import pytest


@pytest.fixture
def sample_text():
    return "a sample"
'''

Changes = dict[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Repair:
    """The repaired function of a task.

    Attributes:
        text: Its module without the bug.
        path: File of the module.
        module: Dotted name.
        span: Its name and lines.
    """

    text: str
    path: str
    module: str
    span: FunctionSpan


def variants(repair: Repair) -> Iterator[tuple[str, Changes]]:
    """Yield ``(kind, changes)`` of every variant that fits the function."""
    gold = repair.text.encode()
    name = repair.span.name.rpartition(".")[2]
    more = {"tests/test_more.py": _TEST.format(name=name, module=repair.module).encode()}
    yield "plain", {repair.path: gold}
    yield "added tests", {repair.path: gold, **more}
    yield "added conftest", {repair.path: gold, **more, "tests/conftest.py": _CONFTEST.encode()}
    yield "notes", {repair.path: gold, "NOTES.md": b"# Repair\n\nThe comparison was off by one; the tests say which way.\n"}
    if "/" in repair.path:
        extra = repair.path.rpartition("/")[0] + "/_shapes.py"
        yield "extra module", {repair.path: gold, extra: b'"""Shapes."""\n\n\ndef area(width, height):\n    return width * height\n'}
    yield "slow import", {repair.path: gold + b"\n_TABLE = [sum(range(number % 50)) for number in range(200_000)]\ndel _TABLE\n"}
    yield "constant", {repair.path: gold + b"\n_LARGEST_STEP = 42\n"}
    for kind, change in _REWRITES.items():
        text = rewritten(repair, change)
        if text is not None:
            yield kind, {repair.path: text.encode()}


def rewritten(repair: Repair, change: Callable[[ast.FunctionDef], bool]) -> str | None:
    """Return the module with the function's tree changed, or ``None`` if the change doesn't apply."""
    name = repair.span.name.rpartition(".")[2]
    found = [
        node
        for node in ast.walk(ast.parse(repair.text))
        if isinstance(node, ast.FunctionDef) and node.name == name and repair.span.start_line <= node.lineno <= repair.span.end_line
    ]
    if not found or not change(found[0]):
        return None
    node = found[0]
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    lines = repair.text.split("\n")
    indent = lines[node.lineno - 1][: len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip())]
    text = textwrap.indent(ast.unparse(ast.fix_missing_locations(node)), indent)
    return "\n".join([*lines[: first - 1], text, *lines[node.end_lineno :]])


def _reformat(node: ast.FunctionDef) -> bool:
    return True


def _docstring(node: ast.FunctionDef) -> bool:
    text = "Return the result; see the tests for the boundary cases that used to fail."
    if ast.get_docstring(node, clean=False) is not None:
        node.body[0] = ast.Expr(ast.Constant(text))
    else:
        node.body.insert(0, ast.Expr(ast.Constant(text)))
    return True


def _named_result(function: ast.FunctionDef) -> bool:
    """``return x`` becomes ``outcome_ = x; return outcome_``."""

    class Namer(ast.NodeTransformer):
        changed = False

        def visit_Return(self, node: ast.Return) -> list[ast.stmt] | ast.Return:
            if node.value is None:
                return node
            self.changed = True
            target = ast.Name("outcome_", ast.Store())
            return [ast.Assign([target], node.value), ast.Return(ast.Name("outcome_", ast.Load()))]

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return self.generic_visit(node) if node is function else node

        def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
            return node

    namer = Namer()
    namer.visit(function)
    return namer.changed


def _renamed_local(node: ast.FunctionDef) -> bool:
    """The first plainly assigned local gets another name."""
    if any(
        isinstance(item, (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal))
        for item in ast.walk(node)
        if item is not node
    ):
        return False
    arguments = {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
    calls_locals = any(isinstance(item, ast.Name) and item.id in ("locals", "eval", "exec") for item in ast.walk(node))
    names = [
        item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store) and item.id not in arguments
    ]
    handlers = {item.name for item in ast.walk(node) if isinstance(item, ast.ExceptHandler)}
    names = [name for name in names if name not in handlers]
    if not names or calls_locals:
        return False
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id == names[0]:
            item.id = f"{names[0]}_value"
    return True


def _annotated(node: ast.FunctionDef) -> bool:
    node.returns = ast.Name("object", ast.Load())
    return True


def _guarded(node: ast.FunctionDef) -> bool:
    """An ``if`` that is always taken around the last statement: a clumsy but honest repair."""
    if isinstance(node.body[-1], ast.Expr):
        return False
    node.body[-1] = ast.If(ast.Constant(True), [node.body[-1]], [])
    return True


def _debug_print(node: ast.FunctionDef) -> bool:
    at = 1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0
    node.body.insert(at, ast.Expr(ast.Call(ast.Name("print", ast.Load()), [ast.Constant("called")], [])))
    return True


def _asserted(node: ast.FunctionDef) -> bool:
    at = 1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0
    node.body.insert(at, ast.Assert(ast.Compare(ast.Constant(1), [ast.Lt()], [ast.Constant(2)]), ast.Constant("order of numbers")))
    return True


_REWRITES: dict[str, Callable[[ast.FunctionDef], bool]] = {
    "reformatted": _reformat,
    "docstring": _docstring,
    "named result": _named_result,
    "renamed local": _renamed_local,
    "annotated": _annotated,
    "guarded": _guarded,
    "debug print": _debug_print,
    "asserted": _asserted,
}
