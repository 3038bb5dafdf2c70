"""Mutations of a module through libcst: the families of ``families.py``, each as replacements of byte ranges.

``find_mutations`` lists every place that a family applies to; nothing else of the file changes, so comments, quotes and layout stay as
they are. A listed mutation isn't promised to parse or to be noticed: ``splice.is_real_change`` and the gate decide that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

from strop.core.errors import TaskError
from strop.tasks.makers.families import BINARY, COMPARE, DUAL
from strop.tasks.makers.splice import Mutation, Splice


def find_mutations(path: str, source: bytes) -> list[Mutation]:
    """Return every mutation of a module's functions and classes, in the order of the text.

    Args:
        path: Its path, for the result.
        source: Its text.

    Raises:
        TaskError: It isn't Python that libcst can parse.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        spans = wrapper.resolve(ByteSpanPositionProvider)
    except (cst.ParserSyntaxError, SyntaxError, RecursionError, ValueError) as error:
        raise TaskError(f"{path} can't be parsed: {type(error).__name__}") from None
    finder = _Finder(path, source, spans)
    wrapper.module.visit(finder)
    unique = {mutation.splices: mutation for mutation in finder.found if any(source[s.start : s.end] != s.new for s in mutation.splices)}
    return sorted(unique.values(), key=lambda mutation: (mutation.splices[0].start, mutation.family, mutation.splices))


@dataclass(frozen=True, slots=True)
class _Scope:
    name: str
    first_line: int
    last_line: int
    is_class: bool


class _Finder(cst.CSTVisitor):
    """Walks a module and notes what each family could do."""

    def __init__(self, path: str, source: bytes, spans: object) -> None:
        super().__init__()
        self._path = path
        self._source = source
        self._spans: dict[cst.CSTNode, CodeSpan] = spans  # type: ignore[assignment]
        self._starts = [0, *(at + 1 for at, byte in enumerate(source) if byte == 10)]
        self._scopes: list[_Scope] = []
        self.found: list[Mutation] = []

    # ------------------------------------------------------------------------------------------------ places

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def _text(self, node: cst.CSTNode) -> bytes:
        start, end = self._span(node)
        return self._source[start:end]

    def _line(self, offset: int) -> int:
        return bisect.bisect_right(self._starts, offset)

    def _line_start(self, offset: int) -> int:
        return self._starts[self._line(offset) - 1]

    def _next_line(self, offset: int) -> int:
        line = self._line(offset)
        return self._starts[line] if line < len(self._starts) else len(self._source)

    def _note(self, family: str, *splices: Splice) -> None:
        if self._scopes:
            scope = self._scopes[-1]
            name = ".".join(item.name for item in self._scopes)
            line = self._line(splices[0].start)
            self.found.append(Mutation(family, self._path, name, scope.first_line, scope.last_line, line, tuple(sorted(splices))))

    def _replace(self, family: str, node: cst.CSTNode, new: str | bytes) -> None:
        self._note(family, Splice(*self._span(node), new.encode() if isinstance(new, str) else new))

    def _swap(self, family: str, first: cst.CSTNode, second: cst.CSTNode) -> None:
        a, b = self._span(first), self._span(second)
        if a[1] <= b[0]:
            self._note(family, Splice(*a, self._source[b[0] : b[1]]), Splice(*b, self._source[a[0] : a[1]]))

    # ------------------------------------------------------------------------------------------------ scopes

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._open(node, is_class=False)
        self._decorators(node.decorators)
        self._statements(node.body)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._open(node, is_class=True)
        self._bases(node)
        self._methods(node.body)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._scopes.pop()

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._scopes.pop()

    def _open(self, node: cst.FunctionDef | cst.ClassDef, *, is_class: bool) -> None:
        start, end = self._region(node)
        self._scopes.append(_Scope(node.name.value, self._line(start), self._line(max(start, end - 1)), is_class))

    def _region(self, node: cst.CSTNode) -> tuple[int, int]:
        """Whole lines of a statement, decorators included."""
        start, end = self._span(node)
        for decorator in getattr(node, "decorators", ()):
            start = min(start, self._span(decorator)[0])
        return self._line_start(start), self._next_line(max(start, end - 1))

    # ------------------------------------------------------------------------------------------------ expressions

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        self._operator(node.operator)
        if (
            not node.left.lpar
            and not node.right.lpar
            and isinstance(
                node.operator, (cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power, cst.Add, cst.LeftShift, cst.RightShift)
            )
        ):
            self._swap("operand_swap", node.left, node.right)
        if isinstance(node.left, cst.BinaryOperation):
            self._replace("chain_break", node, self._text(node.left) if not node.left.lpar else b"(" + self._text(node.left) + b")")

    def visit_BooleanOperation(self, node: cst.BooleanOperation) -> None:
        self._operator(node.operator)
        for side in (node.left, node.right):
            if not side.lpar:
                self._replace("chain_break", node, self._text(side))

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._operator(node.operator)

    def _operator(self, operator: cst.CSTNode) -> None:
        new = BINARY.get(type(operator))  # type: ignore[call-overload]
        if new is not None:
            self._replace("operator", operator, new)

    def visit_Comparison(self, node: cst.Comparison) -> None:
        for target in node.comparisons:
            for new in COMPARE.get(type(target.operator), ()):  # type: ignore[call-overload]
                self._replace("comparison", target.operator, new)
        last = node.comparisons[-1]
        if len(node.comparisons) == 1 and not node.left.lpar and not last.comparator.lpar:
            self._swap("operand_swap", node.left, last.comparator)
        if len(node.comparisons) > 1:
            start, end = self._span(node)[0], self._span(node.comparisons[-2].comparator)[1]
            if not node.comparisons[-2].comparator.lpar:
                self._note("chain_break", Splice(*self._span(node), self._source[start:end]))

    def visit_UnaryOperation(self, node: cst.UnaryOperation) -> None:
        if isinstance(node.operator, (cst.Not, cst.Minus)):
            inner = node.expression
            text = self._text(inner)
            family = "condition" if isinstance(node.operator, cst.Not) else "operator"
            self._replace(family, node, b"(" + text + b")" if inner.lpar else text)

    def visit_Integer(self, node: cst.Integer) -> None:
        try:
            value = int(node.value, 0)
        except ValueError:
            return
        if node.value.isdecimal():
            for new in (value + 1, value - 1) if value else (1,):
                self._replace("constant", node, str(new))

    def visit_Float(self, node: cst.Float) -> None:
        self._replace("constant", node, f"({node.value} + 1)")

    def visit_Name(self, node: cst.Name) -> None:
        if node.value in ("True", "False"):
            self._replace("constant", node, "False" if node.value == "True" else "True")

    def visit_IfExp(self, node: cst.IfExp) -> None:
        self._invert(node.test)

    def _invert(self, test: cst.BaseExpression) -> None:
        if not (isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not)):
            text = self._text(test)
            simple = isinstance(test, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)) or test.lpar
            self._replace("condition", test, b"not " + text if simple and not test.lpar else b"not (" + text + b")")

    def visit_Call(self, node: cst.Call) -> None:
        plain = [arg for arg in node.args if not arg.star and arg.keyword is None]
        for first, second in pairwise(plain):
            self._swap("argument_swap", first.value, second.value)
        for before, arg in pairwise(node.args):
            if arg.keyword is not None and not before.value.rpar and not arg.value.rpar:
                self._note("argument_remove", Splice(self._span(before.value)[1], self._span(arg.value)[1], b""))
        name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        if isinstance(name, cst.Name) and name.value in DUAL:
            self._replace("call_swap", name, DUAL[name.value])

    # ------------------------------------------------------------------------------------------------ statements

    def visit_If(self, node: cst.If) -> None:
        self._invert(node.test)
        self._statements(node.body)
        rest = node.orelse
        if rest is not None:
            start, end = (
                self._span(rest)[0],
                self._span(rest.orelse)[0] if isinstance(rest, cst.If) and rest.orelse else self._region(rest)[1],
            )
            self._note("branch_remove", Splice(self._line_start(start), self._line_start(end) if end < len(self._source) else end, b""))

    def visit_Else(self, node: cst.Else) -> None:
        self._statements(node.body)

    def visit_For(self, node: cst.For) -> None:
        self._statements(node.body)

    def visit_While(self, node: cst.While) -> None:
        self._invert(node.test)
        self._statements(node.body)

    def visit_With(self, node: cst.With) -> None:
        self._statements(node.body)

    def visit_Try(self, node: cst.Try) -> None:
        self._statements(node.body)

    def visit_ExceptHandler(self, node: cst.ExceptHandler) -> None:
        self._statements(node.body)

    def _statements(self, body: cst.BaseSuite) -> None:
        if not isinstance(body, cst.IndentedBlock):
            return
        rows = list(body.body)
        is_only = len(rows) == 1
        for number, row in enumerate(rows):
            family = self._removal(row, is_first=number == 0)
            if family:
                self._remove(family, row, is_only=is_only)
            if isinstance(row, (cst.With, cst.Try)):
                self._unwrap(row)
            if number and _is_plain(row) and _is_plain(rows[number - 1]) and not _is_docstring(rows[number - 1]):
                self._swap("statement_swap", rows[number - 1], row)

    def _removal(self, row: cst.BaseStatement, *, is_first: bool) -> str:
        """Family that takes a statement away, ``""`` for none."""
        if isinstance(row, cst.SimpleStatementLine):
            if len(row.body) != 1 or (is_first and _is_docstring(row)):
                return ""
            small = row.body[0]
            if isinstance(small, (cst.Assign, cst.AugAssign)) or (isinstance(small, cst.AnnAssign) and small.value is not None):
                return "assignment_remove"
            if isinstance(small, (cst.Break, cst.Continue)):
                self._replace("loop_remove", small, "continue" if isinstance(small, cst.Break) else "break")
                return ""
            is_call = isinstance(small, cst.Expr) and isinstance(small.value, (cst.Call, cst.Await, cst.Yield))
            return "statement_remove" if is_call or isinstance(small, (cst.Raise, cst.Assert, cst.Return, cst.Del)) else ""
        if isinstance(row, cst.If):
            return "branch_remove" if row.orelse is None else ""
        return "loop_remove" if isinstance(row, (cst.For, cst.While)) else ""

    def _remove(self, family: str, row: cst.BaseStatement, *, is_only: bool) -> None:
        start, end = self._region(row)
        if is_only:
            self._note(family, Splice(*self._span(row), b"pass"))
        elif not self._source[start : self._span(row)[0]].strip():
            self._note(family, Splice(start, end, b""))

    def _unwrap(self, row: cst.With | cst.Try) -> None:
        """Take a ``with`` or ``try`` away and let its body stay."""
        if not isinstance(row.body, cst.IndentedBlock) or not row.body.body:
            return
        start, end = self._region(row)
        first, last = row.body.body[0], row.body.body[-1]
        body_start, body_end = self._comments_above(self._region(first)[0], start), self._region(last)[1]
        text = self._source[body_start:body_end]
        own = self._span(row)[0] - self._line_start(self._span(row)[0])
        extra = self._span(first)[0] - self._line_start(self._span(first)[0]) - own
        lines = text.splitlines(keepends=True)
        indent = self._source[body_start : body_start + own + extra]
        if extra <= 0 or b'"""' in text or b"'''" in text or not all(line.startswith(indent) or not line.strip() for line in lines):
            return
        self._note(
            "wrapper_remove", Splice(start, end, b"".join(line[:own] + line[own + extra :] if line.strip() else line for line in lines))
        )

    def _comments_above(self, offset: int, limit: int) -> int:
        """Start of the comment lines right above a line, not going up to the line of ``limit``."""
        line = self._line(offset)
        while line - 1 > self._line(limit) and self._source[self._starts[line - 2] : self._starts[line - 1]].lstrip().startswith(b"#"):
            line -= 1
        return self._starts[line - 1]

    def _decorators(self, decorators: Sequence[cst.Decorator]) -> None:
        for decorator in decorators:
            start, end = self._span(decorator)
            self._note("wrapper_remove", Splice(self._line_start(start), self._next_line(max(start, end - 1)), b""))

    # ------------------------------------------------------------------------------------------------ classes

    def _bases(self, node: cst.ClassDef) -> None:
        if not node.bases or any(arg.star for arg in node.bases):
            return
        if len(node.bases) > 1:
            for first, second in pairwise(node.bases):
                self._note("base_remove", Splice(self._span(first.value)[0], self._span(second.value)[0], b""))
        elif not node.keywords and not node.bases[0].value.rpar:
            close = self._source.find(b")", self._span(node.bases[0].value)[1])
            self._note("base_remove", Splice(self._span(node.name)[1], close + 1, b""))

    def _methods(self, body: cst.BaseSuite) -> None:
        methods = list(_methods_of(body))
        for method in methods:
            if len(body.body) > 1:
                start, end = self._region(method)
                self._note("method_remove", Splice(start, end, b""))
        for first, second in pairwise(methods):
            a, b = self._region(first), self._region(second)
            if first.name.value == second.name.value:  # otherwise the order of methods means nothing
                self._note("method_swap", Splice(*a, self._source[b[0] : b[1]]), Splice(*b, self._source[a[0] : a[1]]))


def _methods_of(body: cst.BaseSuite) -> Iterator[cst.FunctionDef]:
    for row in body.body:
        if isinstance(row, cst.FunctionDef):
            yield row


def _is_plain(row: cst.BaseStatement) -> bool:
    return (
        isinstance(row, cst.SimpleStatementLine) and len(row.body) == 1 and not isinstance(row.body[0], (cst.Return, cst.Raise, cst.Pass))
    )


def _is_docstring(row: cst.BaseStatement) -> bool:
    return (
        isinstance(row, cst.SimpleStatementLine)
        and isinstance(row.body[0], cst.Expr)
        and isinstance(row.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )
