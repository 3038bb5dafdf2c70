"""Which of the deciding tests stay hidden, and how they leave the workspace's test files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from strop.core.random import key_of
from strop.tasks.repository.suite import file_of, function_of


def choose_hidden(fail_to_pass: Sequence[str], *, seed: int, key: object) -> set[str]:
    """Return the test functions (without parameters) that the agent won't see: half of those that fail, at least one stays visible.

    Example: of 5 functions 2 are hidden, of 1 none.
    """
    functions = sorted({function_of(test) for test in fail_to_pass}, key=lambda name: key_of("hidden", seed, key, name))
    return set(functions[: len(functions) // 2])


def without_tests(source: bytes, names: Iterable[str]) -> bytes | None:
    """Return a test file without some of its functions.

    Args:
        source: The file.
        names: Dotted names within it: ``"TestA::test_b"`` or ``"test_c"``.

    Returns:
        The text, or ``None`` if a name isn't found or what is left doesn't parse.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    cut: list[tuple[int, int]] = []
    missing = set(names)

    def walk(body: Sequence[ast.stmt], prefix: str) -> int:
        """Cut what is asked for; returns how many statements stay."""
        left = len(body)
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and prefix + node.name in wanted:
                missing.discard(prefix + node.name)
                cut.append(_lines(node))
                left -= 1
            elif isinstance(node, ast.ClassDef):
                if not any(name.startswith(f"{prefix}{node.name}::") for name in wanted):
                    continue
                before = len(cut)
                if not walk(node.body, f"{prefix}{node.name}::"):
                    del cut[before:]
                    cut.append(_lines(node))
                    left -= 1
        return left

    wanted = set(missing)
    walk(tree.body, "")
    if missing:
        return None
    lines = source.split(b"\n")
    gone = {number for first, last in cut for number in range(first, last + 1)}
    text = b"\n".join(line for number, line in enumerate(lines, 1) if number not in gone)
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return text


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[int, int]:
    return min([item.lineno for item in node.decorator_list] + [node.lineno]), node.end_lineno or node.lineno


def hide(files: Mapping[str, bytes], functions: Iterable[str]) -> tuple[dict[str, bytes], set[str]]:
    """Take test functions out of their files.

    Returns:
        New texts of the files that changed, and the functions that are gone; those of a file that can't be cut stay.
    """
    by_file: dict[str, list[str]] = {}
    for function in functions:
        by_file.setdefault(file_of(function), []).append(function)
    texts, gone = {}, set()
    for path, names in sorted(by_file.items()):
        text = without_tests(files.get(path, b""), [name.partition("::")[2] for name in names])
        if text is not None:
            texts[path] = text
            gone.update(names)
    return texts, gone
