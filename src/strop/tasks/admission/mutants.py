"""Other mutants of a solution: what a suite must notice besides the bug that it is asked about."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping

from strop.core.errors import TaskError
from strop.core.random import key_of
from strop.tasks.makers.draft import Draft
from strop.tasks.makers.procedural import find_mutations
from strop.tasks.makers.splice import Mutation, apply_splices, is_real_change


def gold_mutants(files: Mapping[str, bytes], draft: Draft, *, seed: int, limit: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Yield mutants of a solution within what the draft changed: name, and the files that differ from the solution.

    First mutations by chance, none of them the draft's own; last the function without a body, which is always there.

    Args:
        files: Files of the tree.
        draft: The draft.
        seed: Fixes the choice.
        limit: At most so many, the last included.
    """
    found: list[tuple[str, bytes, Mutation]] = []
    for path, data in sorted(draft.gold.items()):
        if data is None or not path.endswith(".py"):
            continue
        before = draft.base[path] if path in draft.base else files.get(path)
        spans = _spans(draft, path, before or b"", data)
        try:
            mutations = find_mutations(path, data)
        except TaskError:
            continue
        found += [(path, data, m) for m in mutations if any(first <= m.line <= last for first, last in spans) and m not in draft.mutations]
    found.sort(key=lambda row: key_of("gold-mutant", seed, draft.digest, row[2]))
    made = 0
    for path, data, mutation in found:
        if made >= limit - 1:
            break
        mutant = apply_splices(data, mutation.splices)
        if mutant != draft.base.get(path) and is_real_change(data, mutant):
            made += 1
            yield f"{mutation.family} in line {mutation.line} of {path}", {path: mutant}
    for path, data in sorted(draft.gold.items()):
        before = draft.base[path] if path in draft.base else files.get(path)
        if data is not None and path.endswith(".py"):
            mutant = _gutted(data, _spans(draft, path, before or b"", data))
            if mutant is not None and mutant != before:
                yield f"no body in {path}", {path: mutant}
                return


def _spans(draft: Draft, path: str, before: bytes, after: bytes) -> list[tuple[int, int]]:
    """Lines of the solution that belong to the change: its functions, or for history the lines that differ."""
    regions = [(first, last) for name, first, last in draft.regions if name == path]
    if regions:
        return regions
    matcher = difflib.SequenceMatcher(None, before.split(b"\n"), after.split(b"\n"), autojunk=False)
    return [(start + 1, max(end, start + 1)) for tag, _, _, start, end in matcher.get_opcodes() if tag != "equal"]


def _gutted(source: bytes, spans: list[tuple[int, int]]) -> bytes | None:
    """Empty the first function that lies within or around the spans."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = source.split(b"\n")
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.body[0].lineno == node.lineno:
            continue
        if any(first <= (node.end_lineno or node.lineno) and node.lineno <= last for first, last in spans):
            body = node.body[0]
            text = b" " * body.col_offset + b"raise NotImplementedError"
            return b"\n".join([*lines[: body.lineno - 1], text, *lines[node.end_lineno or body.lineno :]])
    return None
