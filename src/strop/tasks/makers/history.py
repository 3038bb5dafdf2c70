"""Drafts from history: a commit, or the step from one release to the next, that changes tests and source.

The state before is the workspace; the source part of the change is the solution, the test part stays hidden. Which tests decide is found by
running both sides (``strop.tasks.admission.gate``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from strop.tasks.makers.draft import Draft
from strop.tasks.repository.gitread import Commit, FileChange, GitCheckout
from strop.tasks.repository.layout import Layout, find_layout, is_test_module, is_test_path
from strop.tasks.repository.probe import Repository

MAX_GOLD_FILES = 40
MAX_GOLD_LINES = 1500
MAX_FILE_BYTES = 500_000
MAX_MESSAGE = 4_000
_NEWS = re.compile(
    r"(?:docs?/(?:source/)?)?(?:changes|changelog|change_log|history|news|releases?|whatsnew|versions)[\w-]*(?:\.\w+)?", re.IGNORECASE
)
_TRAILERS = re.compile(r"^(?:Signed-off-by|Co-authored-by|Reviewed-by|Change-Id|git-svn-id)[: ].*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a repository's history.

    Attributes:
        name: Short name of the commit, or ``"1.2 to 1.3"``.
        message: What its author says it does.
        before: Every file before.
        after: Every file after.
    """

    name: str
    message: str
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]


def steps_of(repository: Repository, *, limit: int, scan: int = 400) -> Iterator[Step]:
    """Yield the steps of a source, newest first: commits that change tests and source, or successive releases.

    Args:
        repository: The source.
        limit: At most so many.
        scan: Commits looked at.

    Raises:
        TaskError: The history can't be read.
    """
    source = repository.source
    if source.checkout is not None:
        yield from _commits(source.checkout, repository.layout, limit=limit, scan=scan)
        return
    states = [*source.releases, (source.name, source.files)]
    for (older, before), (newer, after) in list(pairwise(states))[::-1][:limit]:
        yield Step(f"{older}..{newer}", news(before, after), before, after)


def news(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """Return what a project's own list of changes says about a step: the lines that are new in it, ``""`` if it has none."""
    lines: list[str] = []
    for path in sorted(after):
        if _NEWS.fullmatch(path):
            known = set((before.get(path) or b"").decode("utf-8", "replace").splitlines())
            lines += [line.rstrip() for line in after[path].decode("utf-8", "replace").splitlines() if line not in known]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()[:MAX_MESSAGE]


def _commits(checkout: GitCheckout, layout: Layout, *, limit: int, scan: int) -> Iterator[Step]:
    commits = [commit for commit in checkout.commits(scan) if commit.num_parents == 1]
    changes = checkout.changes(commits)
    wanted = [commit for commit in commits if is_candidate(changes.get(commit.sha, []), layout)][:limit]
    known: dict[str, bytes] = {}
    for commit in wanted:
        before = _state(checkout, commit.parent, known)
        yield Step(commit.sha[:10], _message(commit), before, _state(checkout, commit.sha, known))


def _state(checkout: GitCheckout, sha: str, known: dict[str, bytes]) -> dict[str, bytes]:
    tree = checkout.tree(sha)
    missing = [blob for blob in tree.values() if blob not in known]
    if missing:
        known.update(checkout.blobs(missing))
    return {path: known[blob] for path, blob in tree.items()}


def is_candidate(changes: list[FileChange], layout: Layout) -> bool:
    """Whether a commit's paths could make a task: it changes tests, and at most a few files of the packages' source."""
    tests = [change for change in changes if is_test_module(change.path) and change.after]
    sources = [
        change for change in changes if change.path.endswith(".py") and not is_test_path(change.path) and _is_inside(change.path, layout)
    ]
    return bool(tests) and 0 < len(sources) <= MAX_GOLD_FILES


def _is_inside(path: str, layout: Layout) -> bool:
    return any(path == package or path.startswith(f"{package}/") for package in layout.packages)


def _message(commit: Commit) -> str:
    text = _TRAILERS.sub("", commit.message)
    return re.sub(r"\n{3,}", "\n\n", text).strip()[:MAX_MESSAGE]


def history_draft(repository: Repository, step: Step) -> Draft | str:
    """Return the draft of a step, or why there is none."""
    layout = find_layout({*step.before, *step.after}, repository.metadata.name or repository.source.name)
    paths = {path for path in {*step.before, *step.after} if step.before.get(path) != step.after.get(path)}
    tests = {path: step.after.get(path) for path in sorted(paths) if is_test_path(path) or _is_test_support(path)}
    gold = {path: step.after.get(path) for path in sorted(paths) if path not in tests and _is_inside(path, layout)}
    if not step.message:
        return "says nothing about itself"
    if not any(is_test_module(path) and data is not None for path, data in tests.items()):
        return "changes no tests"
    if not any(path.endswith(".py") for path in gold):
        return "changes no source"
    if len(gold) > MAX_GOLD_FILES or any(data is not None and len(data) > MAX_FILE_BYTES for data in gold.values()):
        return "changes too much"
    lines = sum(_changed_lines(step.before.get(path, b""), data or b"") for path, data in gold.items())
    if lines > MAX_GOLD_LINES:
        return "changes too much"
    if len({path.split("/")[0] for path in gold}) > 1:
        return "changes two packages"
    tree = repository.files
    base = {path: step.before.get(path) for path in {*tree, *step.before} if step.before.get(path) != tree.get(path)}
    generated = {path for path in base if path not in step.before and path not in repository.source.files}
    first = next(path for path in gold if path.endswith(".py"))
    return Draft(
        kind="history",
        families=(step.name,),
        cluster=f"{first}:{step.name}",
        base={path: base[path] for path in sorted(base) if path not in generated},
        gold=gold,
        tests=tests,
        subject=step.message,
    )


def _is_test_support(path: str) -> bool:
    return any(part in ("test", "tests", "testdata") for part in path.lower().split("/")[:-1])


def _changed_lines(before: bytes, after: bytes) -> int:
    """Lines that only one of two texts has; cheaper than a real difference."""
    a, b = set(before.split(b"\n")), set(after.split(b"\n"))
    return len(a ^ b)
