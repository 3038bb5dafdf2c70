"""Drafts by feature deletion: a function, method, class or option is taken out; the task is to bring it back.

What is deleted goes away whole where nothing else of the package names it; otherwise its definition stays and its body says that there is
none, so that the rest of the suite still runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from strop.core.random import key_of
from strop.tasks.makers.draft import Draft
from strop.tasks.makers.splice import is_real_change
from strop.tasks.repository.layout import module_name
from strop.tasks.repository.probe import Repository

MIN_LINES = 3
MAX_LINES = 120


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that can be deleted.

    Attributes:
        kind: ``"function"``, ``"method"``, ``"class"`` or ``"option"``.
        path: Its file.
        name: Dotted name in the file; of an option, that of its function.
        option: Name of the parameter, else ``""``.
        first_line: Of its definition, decorators included.
        last_line: Its last line.
        signature: Its first line as written.
        doc: Its documentation, ``""`` for none.
    """

    kind: str
    path: str
    name: str
    option: str
    first_line: int
    last_line: int
    signature: str
    doc: str


def find_features(path: str, source: bytes) -> list[Feature]:
    """Return what can be deleted from a module, in the order of the text."""
    try:
        text = source.decode("utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[Feature] = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += _function(path, source, node, "")
        elif isinstance(node, ast.ClassDef):
            found.append(_feature("class", path, source, node, node.name))
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found += _function(path, source, item, f"{node.name}.")
    return [item for item in found if MIN_LINES <= item.last_line - item.first_line + 1 <= MAX_LINES]


def _function(path: str, source: bytes, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> Iterator[Feature]:
    name = owner + node.name
    if not (owner and node.name in ("__init__", "__new__", "__init_subclass__")):
        yield _feature("method" if owner else "function", path, source, node, name)
    arguments = node.args
    options = list(zip(arguments.args[len(arguments.args) - len(arguments.defaults) :], arguments.defaults, strict=True))
    options += [(item, default) for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is not None]
    for parameter, default in options:
        if isinstance(default, ast.Constant) and not node.decorator_list:
            yield _feature("option", path, source, node, name, parameter.arg)


def _feature(
    kind: str, path: str, source: bytes, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str, option: str = ""
) -> Feature:
    lines = source.decode("utf-8").split("\n")
    first = min([item.lineno for item in node.decorator_list] + [node.lineno])
    body = node.body[0].lineno - 1
    signature = " ".join(line.strip() for line in lines[node.lineno - 1 : max(body, node.lineno)])[:300]
    return Feature(kind, path, name, option, first, node.end_lineno or first, signature, (ast.get_docstring(node) or "")[:1500])


def deletion_drafts(repository: Repository, *, seed: int) -> Iterator[Draft]:
    """Yield drafts, in an order that depends on the seed and the source alone; only of features that a test calls."""
    features = []
    for path in repository.layout.sources:
        for feature in find_features(path, repository.files[path]):
            if repository.coverage.tests_of(path, feature.first_line, feature.last_line):
                features.append(feature)
    features.sort(key=lambda item: key_of("deletion", seed, repository.source.name, item))
    words = {path: repository.files[path] for path in repository.layout.sources}
    for feature in features:
        source = repository.files[feature.path]
        mutant = delete(source, feature, is_named_elsewhere=_is_named_elsewhere(feature, words))
        if mutant is not None and is_real_change(source, mutant):
            module = module_name(feature.path, repository.layout)
            yield Draft(
                kind="deletion",
                families=(feature.kind,),
                cluster=f"{feature.path}:{feature.name}",
                base={feature.path: mutant},
                gold={feature.path: source},
                regions=((feature.path, feature.first_line, feature.last_line),),
                subject=f"{module}.{feature.name}" + (f"({feature.option})" if feature.option else ""),
                details=f"{feature.signature}\n{feature.doc}".strip(),
            )


def _is_named_elsewhere(feature: Feature, sources: dict[str, bytes]) -> bool:
    """Whether code outside of the definition names it, so that taking it away whole would break more than its own tests."""
    short = feature.name.rpartition(".")[2].encode()
    pattern = re.compile(rb"\b" + re.escape(short) + rb"\b")
    for path, source in sources.items():
        if path == feature.path:
            lines = source.split(b"\n")
            source = b"\n".join(lines[: feature.first_line - 1] + lines[feature.last_line :])
        if pattern.search(source):
            return True
    return False


def delete(source: bytes, feature: Feature, *, is_named_elsewhere: bool) -> bytes | None:
    """Return a module without a feature, or ``None`` if it can't be taken out in a simple way."""
    lines = source.split(b"\n")
    first, last = feature.first_line - 1, feature.last_line
    if feature.kind == "option":
        return _without_option(source, feature)
    indent = len(lines[first]) - len(lines[first].lstrip())
    if not is_named_elsewhere:
        kept = lines[:first] + lines[last:]
        while first and first < len(kept) and not kept[first - 1].strip() and not kept[first].strip():
            del kept[first]
        text = b"\n".join(kept)
        return text if _is_python(text) else None
    if feature.kind == "class":
        return None
    node = _node_at(source, feature)
    if node is None:
        return None
    has_doc = ast.get_docstring(node, clean=False) is not None
    start = (node.body[0].end_lineno or node.body[0].lineno) if has_doc else node.body[0].lineno - 1
    if not has_doc and node.body[0].lineno == node.lineno:
        return None
    ending = b"\r" if lines[first].endswith(b"\r") else b""
    name = feature.name.rpartition(".")[2].encode()
    stub = b" " * (indent + 4) + b'raise NotImplementedError("' + name + b'")' + ending
    return b"\n".join([*lines[:start], stub, *lines[last:]])


def _node_at(source: bytes, feature: Feature) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.end_lineno != feature.last_line:
            continue
        if min([item.lineno for item in node.decorator_list] + [node.lineno]) == feature.first_line:
            return node
    return None


def _without_option(source: bytes, feature: Feature) -> bytes | None:
    """Take a parameter out of a signature; inside, its name is bound to what was its default."""
    node = _node_at(source, feature)
    if node is None:
        return None
    text = source.decode("utf-8")
    lines = text.split("\n")
    rows = [*node.args.args, *node.args.kwonlyargs]
    defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + list(node.args.defaults) + list(node.args.kw_defaults)
    number = next((i for i, row in enumerate(rows) if row.arg == feature.option), -1)
    default = defaults[number]
    if number < 1 or default is None or node.body[0].lineno == node.lineno or not text.isascii():
        return None
    before_default = defaults[number - 1]
    previous = before_default or rows[number - 1].annotation or rows[number - 1]
    if number == len(node.args.args):  # the first after the star: taking it away may leave a bare star
        return None
    start = (previous.end_lineno or 0, previous.end_col_offset or 0)
    end = (default.end_lineno or 0, default.end_col_offset or 0)
    body = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    binding = " " * body.col_offset + f"{feature.option} = {ast.unparse(default)}"
    joined = lines[start[0] - 1][: start[1]] + lines[end[0] - 1][end[1] :]
    kept = [*lines[: start[0] - 1], joined, *lines[end[0] :]]
    at = body.lineno - 1 - (end[0] - start[0])
    result = "\n".join([*kept[:at], binding, *kept[at:]]).encode()
    return result if _is_python(result) else None


def _is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
