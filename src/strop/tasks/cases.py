"""Which of a function's calls become visible tests, which stay hidden, and the test file that a person would have written."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from strop.tasks.values import JSON, canonical, imports_of, to_source
from strop.tasks.verifier import Case

NUM_VISIBLE = 8
NUM_HIDDEN = 24
MIN_HIDDEN = 16
MAX_VISIBLE_ERRORS = 2
TYPICAL_CHARS = 40
"""Arguments and result of a test as a person would write it."""


def case_of(found: dict[str, Any]) -> Case:
    """Return the case of an explored call."""
    return Case(args=tuple(found["args"]), kwargs=found["kwargs"], expected=found.get("expected"), raises=found.get("raises"))


def choose_cases(found: Sequence[dict[str, Any]], kills: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Choose visible and hidden cases.

    Both sets are filled greedily: a case is worth the edits that it detects, each half as much for every chosen case that detects it too,
    divided by how often its result was seen already; calls that people wrote come before invented ones, and cases of a readable length
    before very short and very long ones.

    Args:
        found: Explored calls.
        kills: For each candidate edit, the indices of the calls that detect it.

    Returns:
        Indices of at most 8 visible and at most 24 hidden calls, in the order chosen, without overlap.
    """
    detects: list[set[int]] = [set() for _ in found]
    for edit, cases in enumerate(kills):
        for case in cases:
            detects[case].add(edit)
    visible = _fill(found, detects, range(len(found)), NUM_VISIBLE, MAX_VISIBLE_ERRORS)
    rest = [index for index in range(len(found)) if index not in set(visible)]
    return visible, _fill(found, detects, rest, NUM_HIDDEN, NUM_HIDDEN // 4)


def _fill(found: Sequence[dict[str, Any]], detects: list[set[int]], among: Sequence[int], count: int, max_errors: int) -> list[int]:
    left = list(among)
    chosen: list[int] = []
    weight: dict[int, float] = dict.fromkeys(set().union(*(detects[index] for index in left)) if left else (), 1.0)
    results: dict[str, int] = {}
    errors = 0
    size = {index: abs(len(canonical([found[index]["args"], found[index].get("expected")])) - TYPICAL_CHARS) for index in left}
    result = {index: found[index].get("raises") or canonical(found[index].get("expected")) for index in left}

    def worth(index: int) -> tuple[float, int, int]:
        gain = sum(weight[edit] for edit in detects[index]) + (0.5 if found[index]["harvested"] else 0.0)
        return gain / (1 + results.get(result[index], 0)), -size[index], -index

    while left and len(chosen) < count:
        allowed = [index for index in left if errors < max_errors or "raises" not in found[index]]
        if not allowed:
            break
        best = max(allowed, key=worth)
        left.remove(best)
        chosen.append(best)
        for edit in detects[best]:
            weight[edit] /= 2
        results[result[best]] = results.get(result[best], 0) + 1
        errors += "raises" in found[best]
    return chosen


def has_nan(encoded: JSON) -> bool:
    """Whether a value holds a NaN, which no unit test can compare with ``assertEqual``."""
    if isinstance(encoded, list):
        return any(map(has_nan, encoded))
    if isinstance(encoded, dict):
        return encoded == {"float": "nan"} or any(map(has_nan, encoded.values()))
    return False


def visible_test_path(module: str) -> str:
    """Return where the visible tests lie: ``"boltons.strutils"`` -> ``"tests/test_strutils.py"``."""
    return f"tests/test_{module.rpartition('.')[2].strip('_')}.py"


def render_tests(module: str, name: str, cases: Sequence[Case], *, drain: bool) -> str:
    """Return the visible test file of a function.

    Args:
        module: Dotted module.
        name: Function in it.
        cases: Visible cases, one method for each.
        drain: The function returns an iterator, so tests compare ``list(...)``.
    """
    imports = set().union(*(imports_of([*case.args, *case.kwargs.values(), case.expected]) for case in cases))
    title = "".join(part.capitalize() for part in re.split(r"_+", name) if part)
    lines = [*sorted(line for line in imports if line.startswith("import")), "import unittest"]
    lines += [
        *sorted(line for line in imports if line.startswith("from")),
        "",
        f"from {module} import {name}",
        "",
        "",
        f"class Test{title}(unittest.TestCase):",
    ]
    for number, case in enumerate(cases, 1):
        arguments = [*map(to_source, case.args), *(f"{key}={to_source(value)}" for key, value in case.kwargs.items())]
        call = f"{name}({', '.join(arguments)})"
        call = f"list({call})" if drain else call
        lines.append(f"    def test_{number}(self):")
        if case.raises is not None:
            lines += [f"        with self.assertRaises({case.raises}):", f"            {call}"]
        else:
            expected = to_source(case.expected)
            line = f"        self.assertEqual({call}, {expected})"
            if len(line) > 110:
                lines += [f"        result = {call}", f"        self.assertEqual(result, {expected})"]
            else:
                lines.append(line)
        lines.append("")
    lines += ["", 'if __name__ == "__main__":', "    unittest.main()", ""]
    text = "\n".join(lines)
    ast.parse(text)
    return text
