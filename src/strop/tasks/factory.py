"""From a source tree to functions with cases and viable mutants: everything between ``sources`` and the gate.

A ``Candidate`` is a function worth looking at; a ``Prepared`` one has its cases chosen and knows which edits they detect.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strop.core.random import key_of
from strop.tasks.box import Box
from strop.tasks.cases import MIN_HIDDEN, NUM_VISIBLE, case_of, choose_cases, has_nan, render_tests, visible_test_path
from strop.tasks.fuzz import literals_of
from strop.tasks.harvest import HarvestedCall, harvest_calls
from strop.tasks.mutation import Edit, FunctionSpan, candidate_edits, find_functions, normalised_digest
from strop.tasks.sources import Tree
from strop.tasks.spans import function_nodes
from strop.tasks.split import module_of, split_of
from strop.tasks.verifier import Verifier

EASY_LINES = (4, 20)
HARD_LINES = (21, 40)
MIN_CANDIDATES = 10
WANTED_CASES = 72
MAX_SOURCE_BYTES = 64_000
"""A mutated module is compiled in every test run."""
MAX_MODULES = 30
"""Modules that importing the function's module may load: a test run waits for all of them."""
_FORBIDDEN = frozenset({"open", "exec", "eval", "input", "print", "globals", "locals", "id", "hash", "__import__", "breakpoint"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A function that may become tasks.

    Attributes:
        tree_id: Its tree.
        package: Distribution.
        path: File in the tree.
        module: Dotted name for import.
        span: Its lines.
        first_line: First line of its decorators.
        digest: Normalised digest.
        split: ``"train"`` or ``"heldout"``.
        is_long: Whether it has 21 to 40 lines.
        calls: Harvested calls.
    """

    tree_id: str
    package: str
    path: str
    module: str
    span: FunctionSpan
    first_line: int
    digest: str
    split: str
    is_long: bool
    calls: tuple[HarvestedCall, ...]

    @property
    def cluster(self) -> str:
        """Group of tasks that aren't independent: ``"boltons/strutils.py:cardinalize"``."""
        return f"{self.path}:{self.span.name}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate with tests.

    Attributes:
        candidate: The function.
        verifier: Visible and hidden cases.
        test_path: Where the visible tests lie.
        test_text: Their text.
        num_edits: Number of candidate edits of the original function.
        mutants: Edits that at least one visible and one hidden case detect, and that don't hang.
    """

    candidate: Candidate
    verifier: Verifier
    test_path: str
    test_text: str
    num_edits: int
    mutants: tuple[Edit, ...]


def logical_module(package: str, path: str) -> str:
    """Return the module name that the split hashes: ``Lib/`` of the standard library doesn't count."""
    return module_of(path.removeprefix("Lib/") if package == "stdlib" else path)


def digests_of(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield ``(split, normalised digest)`` of every function of a tree that is long enough to be recognised."""
    for path, data in tree.files.items():
        if path.endswith(".py"):
            source = data.decode("utf-8", "replace").replace("\r\n", "\n")
            split = split_of(tree.source.name, logical_module(tree.source.name, path))
            for span in find_functions(source):
                if span.end_line - span.start_line + 1 >= EASY_LINES[0]:
                    yield split, normalised_digest(source, span)


def find_candidates(tree: Tree, texts: list[str], refused: Counter[str]) -> list[Candidate]:
    """Return the functions of a tree that could become tasks; what is refused is counted by reason.

    Args:
        tree: The source tree.
        texts: Everything of the source that may hold example calls.
        refused: Counter to add to.
    """
    found: list[Candidate] = []
    if sum(path.endswith(".py") for path in tree.files) < 2:
        refused["tree of one file"] += 1
        return []
    for path, data in sorted(tree.files.items()):
        if not path.endswith(".py"):
            continue
        source = _plain_source(data)
        if source is None:
            refused["module: not plain text"] += 1
            continue
        if len(data) > MAX_SOURCE_BYTES:
            refused["module: too long"] += 1
            continue
        found.extend(_functions(tree, path, source, refused))
    calls = harvest_calls(texts, {candidate.span.name for candidate in found})
    return [
        Candidate(c.tree_id, c.package, c.path, c.module, c.span, c.first_line, c.digest, c.split, c.is_long, tuple(calls[c.span.name]))
        for c in found
    ]


def _plain_source(data: bytes) -> str | None:
    try:
        source = data.decode("utf-8")
        ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return None
    return None if "\r" in source or "\f" in source or source.startswith("\ufeff") else source


def _functions(tree: Tree, path: str, source: str, refused: Counter[str]) -> Iterator[Candidate]:
    package = tree.source.name
    split = split_of(package, logical_module(package, path))
    for span, node in function_nodes(source).items():
        if "." in span.name:
            continue
        length = span.end_line - span.start_line + 1
        reason = _refusal(node, length, "\n".join(source.split("\n")[span.start_line - 1 : span.end_line]))
        if reason:
            refused[f"function: {reason}"] += 1
            continue
        first_line = min([item.lineno for item in node.decorator_list] + [node.lineno])
        yield Candidate(
            tree_id=tree.tree_id,
            package=package,
            path=path,
            module=module_of(path),
            span=span,
            first_line=first_line,
            digest=normalised_digest(source, span),
            split=split,
            is_long=length > EASY_LINES[1],
            calls=(),
        )


def _refusal(node: ast.FunctionDef, length: int, text: str) -> str:
    if length < EASY_LINES[0]:
        return "too short"
    if length > HARD_LINES[1]:
        return "too long"
    if "\t" in text or not text.isascii() or max(map(len, text.split("\n"))) > 120:
        return "not plain text"
    if node.name.startswith(("test", "__")):
        return "test or special name"
    if not (node.args.args or node.args.posonlyargs or node.args.vararg):
        return "no arguments"
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id in _FORBIDDEN:
            return "side effects"
        if isinstance(item, (ast.Global, ast.Nonlocal, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return "global state"
    return ""


_literals_of = functools.lru_cache(maxsize=4)(literals_of)


def prepare(box: Box, candidate: Candidate, source: str, seed: int) -> Prepared | str:
    """Explore a function in a box, choose its cases and collect its viable mutants.

    Returns:
        The result, or the reason why there is none.
    """
    if len(candidate_edits(source, candidate.span)) < MIN_CANDIDATES:
        return "too few candidate edits"
    literals = _literals_of(source)
    reply = box.ask(
        "explore",
        deadline_s=40.0,
        tree=f"/trees/{candidate.tree_id}",
        module=candidate.module,
        source=source,
        span=[candidate.span.name, candidate.span.start_line, candidate.span.end_line],
        first_line=candidate.first_line,
        seed=key_of("tasks", seed, candidate.tree_id, candidate.cluster) & 0xFFFFFFFF,
        calls=list(candidate.calls),
        literals=[literals.strings, literals.ints],
        wanted=WANTED_CASES,
        needed=NUM_VISIBLE + MIN_HIDDEN,
        max_modules=MAX_MODULES,
    )
    if "refused" in reply:
        return reply["refused"]
    return _assemble(candidate, reply)


def _assemble(candidate: Candidate, reply: dict[str, Any]) -> Prepared | str:
    usable = [index for index, case in enumerate(reply["cases"]) if not has_nan(case.get("expected"))]
    found = [reply["cases"][index] for index in usable]
    place = {index: position for position, index in enumerate(usable)}
    kills = [[place[index] for index in row[4] if index in place] if row[4] is not None else [] for row in reply["kills"]]
    visible, hidden = choose_cases(found, kills)
    if len(visible) < NUM_VISIBLE or len(hidden) < MIN_HIDDEN:
        return "too few cases"
    shown, kept = set(visible), set(hidden)
    mutants = [Edit(*row[:4]) for row, cases in zip(reply["kills"], kills, strict=True) if shown & set(cases) and kept & set(cases)]
    if len(mutants) < 3:
        return "too few viable mutants"
    verifier = Verifier(
        module=candidate.module,
        qualname=candidate.span.name,
        path=candidate.path,
        visible=tuple(case_of(found[index]) for index in visible),
        hidden=tuple(case_of(found[index]) for index in hidden),
        drain=reply["drain"],
    )
    text = render_tests(candidate.module, candidate.span.name, verifier.visible, drain=verifier.drain)
    return Prepared(candidate, verifier, visible_test_path(candidate.module), text, len(reply["kills"]), tuple(mutants))


def task_id_of(candidate: Candidate, edit: Edit) -> str:
    """Return the stable id of a mutant: ``"boltons-26.2.0:strutils.cardinalize#3f2a91"``."""
    digest = hashlib.blake2b(repr((candidate.cluster, edit)).encode(), digest_size=3).hexdigest()
    short = candidate.module.rpartition(".")[2]
    return f"{candidate.tree_id}:{short}.{candidate.span.name}#{digest}"
