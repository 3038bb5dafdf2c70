"""Made-up output of failing tests, in the shape and with the truncation of the real one; nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.agent.output import truncate

FRAME_SHARE = 0.45
"""Share of failures that end in an exception inside the function, as in about half of the tasks."""
BUG_FRAME_SHARE = 0.6
"""Share of those whose last frame is the line with the bug: measured on the training tasks, 67 %."""
RESULT_SHARE = 0.1
"""Share of failed comparisons that show a variable instead of the call."""
RULE, DASH = "=" * 70, "-" * 70
_LITERALS = (
    *("0", "1", "-1", "2", "3", "12", "2.5", "0.1", "''", "'a'", "'ab'", "'a b'", "'abc'", "'0xff'", "Fraction(1, 3)"),
    *("[]", "[1]", "[1, 2, 3]", "['a', 'b']", "{}", "{'a': 1}", "None", "True", "False", "(1, 2)", "b'x'", "len"),
)
_EXCEPTIONS = (
    "TypeError: unsupported operand type(s) for {op}: '{a}' and '{b}'",
    "TypeError: '{op}' not supported between instances of '{a}' and '{b}'",
    "TypeError: '{a}' object is not {able}",
    'TypeError: can only concatenate {a} (not "{b}") to {a}',
    "AttributeError: '{a}' object has no attribute '{word}'",
    "IndexError: {a} index out of range",
    "KeyError: {value}",
    "ValueError: not enough values to unpack (expected 2, got 1)",
    "ValueError: {value} is not valid",
    "ZeroDivisionError: division by zero",
    "UnboundLocalError: cannot access local variable '{word}' where it is not associated with a value",
    "RecursionError: maximum recursion depth exceeded",
    "StopIteration",
)
_TYPES = ("int", "str", "list", "tuple", "dict", "NoneType", "float", "bool", "set", "generator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """The function under test.

    Attributes:
        name: As it is called.
        path: Its module, workspace-relative.
        frames: Number and text of each of its lines.
        bug: Index of the line with the bug in ``frames``.
    """

    name: str
    path: str
    frames: tuple[tuple[int, str], ...]
    bug: int


def failing_tests(rng: np.random.Generator, suspect: Suspect) -> str:
    """Return what the agent sees of a test run in which some of eight tests of ``suspect`` fail."""
    stem = suspect.path.rsplit("/", 1)[-1].removesuffix(".py")
    owner = f"Test{suspect.name.strip('_').title().replace('_', '')}"
    failed = np.sort(rng.permutation(8)[: int(rng.integers(1, 9))] + 1).tolist()
    has_frames = rng.random() < FRAME_SHARE
    spot = suspect.bug if rng.random() < BUG_FRAME_SHARE else int(rng.integers(0, len(suspect.frames)))
    exception = _exception(rng) if has_frames else ""
    text = ""
    for case in failed:
        line = int(rng.integers(6, 12)) + 3 * case
        call = f"{suspect.name}({', '.join(_literal(rng) for _ in range(int(rng.integers(1, 4))))})"
        text += f"{RULE}\n{'ERROR' if has_frames else 'FAIL'}: test_{case} (test_{stem}.{owner}.test_{case})\n{DASH}\n"
        text += f'Traceback (most recent call last):\n  File "/workspace/tests/test_{stem}.py", line {line}, in test_{case}\n'
        if has_frames:
            number, code = suspect.frames[spot]
            head = f"    result = {call}\n" if rng.random() < RESULT_SHARE else f"    self.assertEqual({call}, {_literal(rng)})\n"
            text += f'{head}  File "/workspace/{suspect.path}", line {number}, in {suspect.name}\n    {code.strip()}\n{exception}\n\n'
        else:
            shown = "result" if rng.random() < RESULT_SHARE else call
            wanted = _literal(rng)
            text += f"    self.assertEqual({shown}, {wanted})\nAssertionError: {_literal(rng)} != {wanted}\n\n"
    kind = "errors" if has_frames else "failures"
    return truncate(f"{text}{DASH}\nRan 8 tests\n\nFAILED ({kind}={len(failed)})")


def _literal(rng: np.random.Generator) -> str:
    return _LITERALS[int(rng.integers(0, len(_LITERALS)))]


def _exception(rng: np.random.Generator) -> str:
    a, b = (_TYPES[int(i)] for i in rng.integers(0, len(_TYPES), size=2))
    return _EXCEPTIONS[int(rng.integers(0, len(_EXCEPTIONS)))].format(
        a=a,
        b=b,
        op=("+", "-", "*", "<", ">", "%", "+=")[int(rng.integers(0, 7))],
        able=("iterable", "callable", "subscriptable")[int(rng.integers(0, 3))],
        word=("append", "items", "name", "value", "start", "result")[int(rng.integers(0, 6))],
        value=_literal(rng),
    )
