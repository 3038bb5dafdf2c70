"""The mutation catalogue: which replacements of a token range are offered in a function.

Every relation is symmetric and every condition looks only at context that the edit itself leaves alone, so the catalogue is closed under
inversion: whatever turns A into B in the catalogue of A, the catalogue of B holds the way back. ``strop.tasks.mutation`` turns the ranges
into edits.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from strop.tasks.lexer import KEYWORDS, VALUE_KEYWORDS, Token

TOKEN_KINDS = (
    "comparison",
    "identity",
    "arithmetic",
    "augmented",
    "boolean",
    "negation",
    "constant",
    "call",
    "slice",
    "control",
    "return_value",
)
IDENTIFIER_KINDS = ("variable", "argument_swap")
"""Kinds whose repair types or reorders identifiers."""
DEFAULT_KINDS = (*TOKEN_KINDS, *IDENTIFIER_KINDS)


@dataclass(slots=True)
class Range:
    """Columns ``[start, end)`` of 0-based ``line`` become ``new``; both ends are token boundaries."""

    kind: str
    line: int
    start: int
    end: int
    new: str


def _symmetric(groups: Iterable[Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """All pairs within each group, both ways."""
    table: dict[str, list[str]] = {}
    for group in groups:
        members = list(group)
        for one in members:
            others = table.setdefault(one, [])
            others.extend(other for other in members if other != one and other not in others)
    return {name: tuple(others) for name, others in table.items()}


def _words(text: str) -> list[list[str]]:
    return [group.split() for group in text.split("|")]


COMPARISON = _symmetric(_words("< <= > >=|== !=|== <=|== >=|!= <|!= >"))
ARITHMETIC = _symmetric([["+", "-"], ["*", "/", "//", "%"], ["+", "*"], ["*", "**"], ["-", "//"], ["&", "|", "^"], ["<<", ">>"]])
AUGMENTED = {f"{name}=": tuple(f"{other}=" for other in others) for name, others in ARITHMETIC.items()}
BOOLEAN = {"and": ("or",), "or": ("and",)}
CONTROL = {"break": ("continue",), "continue": ("break",)}
FUNCTIONS = _symmetric(
    _words(
        "min max|any all|sum len|sum max|floor ceil|sin cos|int float|int round|str repr|list tuple|list set|set frozenset|sorted reversed"
        "|sorted list|abs int|ord len|islice takewhile|takewhile dropwhile|bisect_left bisect_right|hasattr getattr|isinstance issubclass"
    )
)
METHODS = _symmetric(
    _words(
        "startswith endswith|strip lstrip rstrip|lower upper|lower title|upper capitalize|find rfind|index rindex|find index|split rsplit"
        "|partition rpartition|ljust rjust center|append extend|append add|keys values items|union intersection difference"
        "|isdigit isalpha|isalnum isalpha|islower isupper|isspace isalnum|removeprefix removesuffix|pop popleft|appendleft append|sub subn"
        "|match search|search fullmatch|group groups|update setdefault|floor ceil|sin cos|min max|start end|add discard|remove append"
        "|bisect_left bisect_right|encode decode|count find|splitlines split|numerator denominator|issubset issuperset|sort reverse"
    )
)
EMPTY_STRINGS = {"''": ("' '",), '""': ('" "',), "' '": ("''",), '" "': ('""',)}
TRUTH = {"True": ("False",), "False": ("True",)}

_INTEGER = re.compile(r"0|[1-9]\d{0,3}")
_LARGEST = 9999
_BEFORE_NOT = frozenset({"if", "elif", "while", "and", "or", "assert", "return"})
_TRUTH_CALLS = frozenset({"isinstance", "issubclass", "any", "all", "bool", "callable", "hasattr", "True", "False"})
_LOGIC = frozenset({"and", "or", "in", "is", "==", "!=", "<", "<=", ">", ">="})
_CLOSERS = frozenset({"]", ")", ",", ":"})
_NEWLINE = Token("newline", "\n", -1, 0, 0)


def token_ranges(tokens: list[Token]) -> Iterator[Range]:
    """Yield the replacements that need no syntax tree.

    Args:
        tokens: All tokens of one function, ``def`` first (decorators left out).

    Yields:
        Ranges of every kind in ``TOKEN_KINDS`` except ``return_value``.
    """
    stack: list[str] = []
    for_depths: list[int] = []
    in_header = True
    count = len(tokens)
    previous = _NEWLINE
    for index, token in enumerate(tokens):
        text = token.text
        following = tokens[index + 1] if index + 1 < count else _NEWLINE
        if in_header:
            if text == ":" and not stack:
                in_header = False
            elif previous.text == "=":
                yield from _constant(token)
        elif token.kind == "op":
            yield from _operator(token, previous)
        elif token.kind == "name":
            if text == "for":
                for_depths.append(len(stack))
            elif text == "in" and for_depths and for_depths[-1] == len(stack):
                for_depths.pop()
            else:
                yield from _word(tokens, index, previous, following)
        elif token.kind in ("number", "string"):
            top = stack[-1] if stack else ""
            if not (top == "subscript" and token.kind == "number" and _is_index(tokens, index)):
                yield from _constant(token)
        if not in_header and stack and stack[-1] in ("subscript", "range"):
            yield from _slice(tokens, index, stack[-1])
        if token.kind == "op":
            _track(stack, token, previous)
        previous = token


def _track(stack: list[str], token: Token, previous: Token) -> None:
    """Keep the stack of open brackets; ``previous`` is the token before."""
    text = token.text
    if text == "[":
        stack.append("subscript" if previous.is_operand_end else "list")
    elif text in ("(", "{"):
        stack.append("range" if text == "(" and previous.text == "range" else text)
    elif text in ("]", ")", "}") and stack:
        stack.pop()


def _swap(kind: str, token: Token, others: Iterable[str]) -> Iterator[Range]:
    for other in others:
        yield Range(kind, token.line, token.start, token.end, other)


def _operator(token: Token, previous: Token) -> Iterator[Range]:
    text = token.text
    if text in COMPARISON:
        yield from _swap("comparison", token, COMPARISON[text])
    elif text in AUGMENTED:
        yield from _swap("augmented", token, AUGMENTED[text])
    elif text in ARITHMETIC and previous.is_operand_end:
        others = ARITHMETIC[text]
        if previous.kind == "string":
            # Text formatting and repetition: the neighbours of % and * would only raise TypeError.
            if text == "%":
                return
            others = tuple(other for other in others if other != "%")
        yield from _swap("arithmetic", token, others)


def _constant(token: Token) -> Iterator[Range]:
    text = token.text
    if token.kind == "number":
        if _INTEGER.fullmatch(text):
            value = int(text)
            near = [str(other) for other in (value - 1, value + 1) if 0 <= other <= _LARGEST]
            yield from _swap("constant", token, near)
    elif token.kind == "string":
        yield from _swap("constant", token, EMPTY_STRINGS.get(text, ()))
    elif text in TRUTH:
        yield from _swap("constant", token, TRUTH[text])


def _word(tokens: list[Token], index: int, previous: Token, following: Token) -> Iterator[Range]:
    token = tokens[index]
    text = token.text
    if text in TRUTH:
        yield from _constant(token)
    elif text in BOOLEAN:
        yield from _swap("boolean", token, BOOLEAN[text])
    elif text in CONTROL:
        yield from _swap("control", token, CONTROL[text])
    elif text == "is":
        if following.text == "not":
            if following.line == token.line:
                yield Range("identity", token.line, token.start, following.end, "is")
        else:
            yield from _swap("identity", token, ("is not",))
    elif text == "in":
        if previous.text != "not":
            yield from _swap("identity", token, ("not in",))
        elif previous.line == token.line:
            yield Range("identity", token.line, previous.start, token.end, "in")
    elif following.text == "(":
        table = METHODS if previous.text == "." else FUNCTIONS
        if text in table and previous.text != "def":
            yield from _swap("call", token, table[text])
    if text in _BEFORE_NOT:
        yield from _negation(tokens, index)


def _negation(tokens: list[Token], index: int) -> Iterator[Range]:
    """Insert or remove ``not`` directly after the keyword at ``index``."""
    if index + 2 >= len(tokens):
        return
    first, second = tokens[index + 1], tokens[index + 2]
    if first.line != tokens[index].line or (first.text == "not" and (second.text == "not" or second.line != first.line)):
        return
    operand = index + 2 if first.text == "not" else index + 1
    if tokens[operand].text in ("lambda", "*", "yield", "not") or tokens[operand].kind == "newline":
        return
    if operand + 1 < len(tokens) and tokens[operand + 1].text == ":=":
        return
    if tokens[index].text == "return" and not _looks_boolean(tokens, operand):
        return
    operand_token = tokens[operand]
    if first.text == "not":
        yield Range("negation", first.line, first.start, operand_token.end, operand_token.text)
    elif operand_token.kind != "string" or "\n" not in operand_token.text:
        yield Range("negation", first.line, first.start, first.end, f"not {first.text}")


def _looks_boolean(tokens: list[Token], operand: int) -> bool:
    """Whether the returned expression starting at ``operand`` has a truth value by its form."""
    if tokens[operand].text in _TRUTH_CALLS:
        return True
    depth = 0
    for token in tokens[operand:]:
        text = token.text
        if text in ("(", "[", "{"):
            depth += 1
        elif text in (")", "]", "}"):
            depth -= 1
        elif not depth:
            if token.kind == "newline" or text in (",", "for", "if"):
                return False
            if text in _LOGIC:
                return True
    return False


def _is_index(tokens: list[Token], index: int) -> bool:
    """Whether the number at ``index`` (perhaps behind a sign) stands alone between the delimiters of a subscript."""
    before = index - 2 if tokens[index - 1].text == "-" else index - 1
    return tokens[before].text in ("[", ":") and index + 1 < len(tokens) and tokens[index + 1].text in ("]", ":")


def _slice(tokens: list[Token], index: int, bracket: str) -> Iterator[Range]:
    """Offer off-by-one bounds and moved slice bounds for the token at ``index``, directly inside ``bracket``."""
    if index + 1 >= len(tokens):
        return
    token, previous, following = tokens[index], tokens[index - 1], tokens[index + 1]
    if bracket == "subscript" and token.kind == "number" and _INTEGER.fullmatch(token.text) and _is_index(tokens, index):
        value = int(token.text)
        yield from _swap("slice", token, [str(other) for other in (value - 1, value + 1) if 0 <= other <= _LARGEST])
        sign = previous if previous.text == "-" else None
        if sign is None:
            yield from _swap("slice", token, [f"-{token.text}"])
            if not value:
                yield from _swap("slice", token, ["-1"])
        elif sign.line == token.line and sign.end == token.start:
            yield Range("slice", token.line, sign.start, token.end, token.text)
            if value == 1:
                yield Range("slice", token.line, sign.start, token.end, "0")
    if bracket == "subscript":
        yield from _moved_bound(tokens, index)
    is_name = token.kind == "name" and token.text not in KEYWORDS
    if not (is_name or token.text == ")"):
        return
    if following.text in _CLOSERS:
        yield from (Range("slice", token.line, token.start, token.end, f"{token.text} {sign} 1") for sign in "+-")
    elif following.text in ("+", "-") and index + 3 < len(tokens):
        one, after = tokens[index + 2], tokens[index + 3]
        is_spaced = one.line == token.line and following.start == token.end + 1 and one.start == following.end + 1
        if is_spaced and one.text == "1" and after.text in _CLOSERS:
            yield Range("slice", token.line, token.start, one.end, token.text)


def _moved_bound(tokens: list[Token], index: int) -> Iterator[Range]:
    """``[x:]`` becomes ``[:x]`` and back, for a single name or number with an optional minus; ``index`` is at its colon."""
    colon = tokens[index]
    if colon.text != ":":
        return
    before, after = tokens[index - 1], tokens[index + 1]
    if after.text == "]" and _is_simple(before):
        first = index - 2 if tokens[index - 2].text == "-" else index - 1
        is_glued = all(tokens[k].line == colon.line and tokens[k].end == tokens[k + 1].start for k in range(first - 1, index))
        if tokens[first - 1].text == "[" and is_glued and tokens[first - 1].line == colon.line:
            bound = "".join(token.text for token in tokens[first:index])
            yield Range("slice", colon.line, tokens[first].start, colon.end, f":{bound}")
    elif before.text == "[":
        last = index + 2 if after.text == "-" else index + 1
        if last + 1 >= len(tokens) or not _is_simple(tokens[last]) or tokens[last + 1].text != "]":
            return
        if all(tokens[k].end == tokens[k + 1].start and tokens[k + 1].line == colon.line for k in range(index - 1, last + 1)):
            bound = "".join(token.text for token in tokens[index + 1 : last + 1])
            yield Range("slice", colon.line, colon.start, tokens[last].end, f"{bound}:")


def _is_simple(token: Token) -> bool:
    return token.kind == "number" or (token.kind == "name" and token.text not in KEYWORDS and token.text not in VALUE_KEYWORDS)


# ------------------------------------------------------------------------------------------------------- with the syntax tree

_SKIPPED_FIELDS = frozenset({"annotation", "returns", "decorator_list", "type_comment", "ctx", "op", "ops", "type_params", "kind", "names"})
_CHILD_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.ClassDef)
_UNMOVABLE = (ast.Starred, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.GeneratorExp)


def tree_ranges(function: ast.FunctionDef, lines: list[str], first_line: int) -> Iterator[Range]:
    """Yield the replacements that need the syntax tree: ``variable``, ``argument_swap``, ``return_value``.

    Args:
        function: The function, parsed from ``lines`` (perhaps behind an extra first line).
        lines: Text of the function, by line.
        first_line: ``lineno`` that the tree gives to ``lines[0]``.
    """
    names: dict[str, None] = {}
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg):
        if argument is not None and argument.arg not in ("self", "cls"):
            names.setdefault(argument.arg)
    loads: list[ast.Name] = []
    for node, is_inner in _walk(function):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                loads.append(node)
            elif not is_inner:
                names.setdefault(node.id)
        elif isinstance(node, ast.Call):
            yield from _neighbours("argument_swap", node.args, lines, first_line)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield from _neighbours("return_value", node.value.elts, lines, first_line)
        elif isinstance(node, ast.IfExp) and not isinstance(node.body, ast.Lambda) and not isinstance(node.orelse, (ast.Lambda, ast.IfExp)):
            yield from _exchange("return_value", node.body, node.orelse, lines, first_line)
    order = list(names)
    if len(order) < 2:
        return
    # Only neighbours in order of first binding: few enough that a search over all edits isn't drowned in names.
    near = {name: dict.fromkeys((order[at - 1], order[(at + 1) % len(order)])) for at, name in enumerate(order)}
    for load in loads:
        others = near.get(load.id)
        if others:
            line = load.lineno - first_line
            start = _column(lines[line], load.col_offset)
            for other in others:
                yield Range("variable", line, start, start + len(load.id), other)


def _walk(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, bool]]:
    """Every node of the body in source order with whether it is inside an inner scope; no annotations, no f-string insides."""
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in reversed(function.body)]
    while stack:
        node, is_inner = stack.pop()
        kind = type(node)
        fields = _CHILD_FIELDS.get(kind)
        if fields is None:
            fields = tuple(name for name in reversed(kind._fields) if name not in _SKIPPED_FIELDS)
            _CHILD_FIELDS[kind] = fields = () if kind in (ast.JoinedStr, ast.Constant) else fields
        yield node, is_inner
        if kind in _SCOPES:
            is_inner = True
        for name in fields:
            value = getattr(node, name)
            if isinstance(value, list):
                stack.extend((item, is_inner) for item in reversed(value) if isinstance(item, ast.AST))
            elif isinstance(value, ast.AST):
                stack.append((value, is_inner))


def _column(line: str, byte_offset: int) -> int:
    return byte_offset if line.isascii() else len(line.encode()[:byte_offset].decode(errors="replace"))


def _neighbours(kind: str, items: list[ast.expr], lines: list[str], first_line: int) -> Iterator[Range]:
    for left, right in itertools.pairwise(items):
        yield from _exchange(kind, left, right, lines, first_line)


def _exchange(kind: str, left: ast.expr, right: ast.expr, lines: list[str], first_line: int) -> Iterator[Range]:
    """Exchange two expressions that lie in one line."""
    if left.lineno != right.end_lineno or isinstance(left, _UNMOVABLE) or isinstance(right, _UNMOVABLE):
        return
    index = left.lineno - first_line
    line = lines[index]
    assert left.end_col_offset is not None
    assert right.end_col_offset is not None
    ends = (left.col_offset, left.end_col_offset, right.col_offset, right.end_col_offset)
    a, b, c, d = (_column(line, offset) for offset in ends)
    if b <= c and line[a:b] != line[c:d]:
        yield Range(kind, index, a, d, line[c:d] + line[b:c] + line[a:b])
