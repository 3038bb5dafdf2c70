"""What the procedural families are, and what replaces what in them.

Source of the families: SWE-smith (2504.21798), appendix on procedural modification; dual calls and decorators are additions.
"""

from __future__ import annotations

import libcst as cst

FAMILIES: dict[str, str] = {
    "operator": "An arithmetic, bit or boolean operator becomes another one.",
    "comparison": "A comparison becomes another one.",
    "constant": "A number moves by one, or a truth value turns over.",
    "condition": "The condition of an if, a while or a conditional expression is inverted.",
    "operand_swap": "The operands of an operator change places.",
    "chain_break": "A chain of operators loses its last operand.",
    "argument_swap": "Two neighbouring arguments of a call change places.",
    "argument_remove": "A keyword argument of a call goes away.",
    "call_swap": "A call becomes that of its opposite (min and max, any and all, startswith and endswith).",
    "assignment_remove": "An assignment goes away.",
    "statement_remove": "A call, raise, assert or return statement goes away.",
    "statement_swap": "Two neighbouring statements change places.",
    "branch_remove": "An if without else, an else or an elif goes away.",
    "loop_remove": "A for or while loop goes away, or break becomes continue.",
    "wrapper_remove": "A with or try goes away and its body stays, or a decorator goes away.",
    "base_remove": "A class loses a base class.",
    "method_remove": "A class loses a method.",
    "method_swap": "Two neighbouring methods of a class change places.",
}

BINARY = {
    cst.Add: "-",
    cst.Subtract: "+",
    cst.Multiply: "/",
    cst.Divide: "*",
    cst.FloorDivide: "*",
    cst.Modulo: "//",
    cst.Power: "*",
    cst.BitAnd: "|",
    cst.BitOr: "&",
    cst.BitXor: "|",
    cst.LeftShift: ">>",
    cst.RightShift: "<<",
    cst.And: "or",
    cst.Or: "and",
    cst.AddAssign: "-=",
    cst.SubtractAssign: "+=",
    cst.MultiplyAssign: "+=",
    cst.DivideAssign: "*=",
    cst.BitOrAssign: "&=",
    cst.BitAndAssign: "|=",
}
"""Operators and what they become."""
COMPARE = {
    cst.LessThan: ("<=", ">"),
    cst.LessThanEqual: ("<", ">="),
    cst.GreaterThan: (">=", "<"),
    cst.GreaterThanEqual: (">", "<="),
    cst.Equal: ("!=",),
    cst.NotEqual: ("==",),
    cst.In: ("not in",),
    cst.NotIn: ("in",),
    cst.Is: ("is not",),
    cst.IsNot: ("is",),
}
"""Comparisons and what they become."""
PAIRS = (
    *(("min", "max"), ("any", "all"), ("startswith", "endswith"), ("lower", "upper"), ("lstrip", "rstrip"), ("find", "rfind")),
    *(("index", "rindex"), ("split", "rsplit"), ("partition", "rpartition"), ("append", "extend"), ("add", "discard"), ("keys", "values")),
    *(("ljust", "rjust"), ("union", "intersection"), ("removeprefix", "removesuffix"), ("floor", "ceil"), ("issubset", "issuperset")),
)
DUAL = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
"""Names of calls and their opposites."""
