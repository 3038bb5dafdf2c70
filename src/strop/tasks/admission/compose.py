"""From a draft that the gate has run to a task: which tests stay hidden, what the agent is told, how it runs the rest."""

from __future__ import annotations

from collections.abc import Sequence

from strop.tasks.admission.hiding import choose_hidden, hide
from strop.tasks.admission.instruct import instruction
from strop.tasks.admission.record import TREE, Content, Delta, SuiteTask, SuiteVerifier
from strop.tasks.makers.draft import Draft
from strop.tasks.repository.layout import is_test_module, module_name
from strop.tasks.repository.probe import Repository
from strop.tasks.repository.suite import VENV, file_of, function_of
from strop.tasks.split import split_of

MAX_VISIBLE_FILES = 12
_RUN = "import sys;sys.path[:0]={paths!r};import pytest;sys.exit(pytest.main(sys.argv[1:]))"
_OPTIONS = (
    "-q",
    "--no-header",
    "--tb=short",
    "--rootdir=/workspace",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-o",
    "required_plugins=",
)


def compose(repository: Repository, draft: Draft, tests: Sequence[str], fails: Sequence[str], *, tree: str, seed: int) -> SuiteTask:
    """Return the task.

    Args:
        repository: Where it comes from.
        draft: What was done.
        tests: Every test that decides.
        fails: Those of them that fail on the workspace.
        tree: Name of the tree in the pool.
        seed: Fixes which tests stay hidden.
    """
    base: dict[str, bytes | None] = dict(draft.base)
    if draft.kind == "history":
        test_delta: Delta = {path: _as_tree(repository, path, data) for path, data in draft.tests.items()}
        gone = {function_of(test) for test in fails if file_of(test) in draft.tests}
    else:
        texts, gone = hide(repository.files, choose_hidden(fails, seed=seed, key=draft.digest))
        base.update(texts)
        test_delta = dict.fromkeys(texts, TREE)
    visible = [test for test in fails if function_of(test) not in gone]
    hidden = tuple(test for test in tests if function_of(test) in gone)
    failing = set(fails)
    package = next(path for path in sorted(draft.gold) if path.endswith(".py"))
    module = module_name(package, repository.layout)
    name = repository.metadata.name or repository.source.name
    where = draft.cluster.partition(":")[2]
    milliseconds = dict(zip(repository.tests, repository.milliseconds, strict=True))
    return SuiteTask(
        task_id=f"{repository.source.name}:{module}.{where}#{draft.digest}"
        if where
        else f"{repository.source.name}:{module}#{draft.digest}",
        kind=draft.kind,
        families=draft.families,
        cluster=draft.cluster,
        tree=tree,
        instruction=instruction(draft, package=name, visible=visible, hidden=[test for test in hidden if test in failing]),
        base={path: _as_tree(repository, path, data) for path, data in base.items()},
        gold={path: _as_tree(repository, path, data) for path, data in draft.gold.items()},
        tests=test_delta,
        verifier=SuiteVerifier(
            spec=repository.spec,
            package=package,
            fail_to_pass=tuple(fails),
            pass_to_pass=tuple(test for test in tests if test not in failing),
            hidden=hidden,
            cpu_s=round(10 + 10 * sum(milliseconds.get(test, 50) for test in tests) / 1000, 1),
        ),
        visible=visible_command(repository, draft, tests, visible),
        split=split_of(name, module),
        source=f"{name} {repository.metadata.version}",
        licence=repository.metadata.licence,
    )


def _as_tree(repository: Repository, path: str, data: bytes | None) -> Content:
    return TREE if data is not None and repository.files.get(path) == data else data


def visible_command(repository: Repository, draft: Draft, tests: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Arguments of ``python`` that run the workspace's tests of what was changed: files of failing tests first."""
    present = {path for path in repository.layout.tests if draft.base.get(path, b"") is not None}
    present |= {path for path, data in draft.base.items() if data is not None}
    files = [path for path in dict.fromkeys(map(file_of, (*visible, *tests))) if path in present]
    paths = [*(f"/workspace/{root}".rstrip("/") for root in repository.spec.roots), f"/workspace/{VENV}"]
    arguments = [*_OPTIONS, *repository.spec.arguments, *(files or sorted(filter(is_test_module, present)))[:MAX_VISIBLE_FILES]]
    return ("-c", _RUN.format(paths=paths), *arguments)
