"""A repository task as plain data: what the agent finds, what repairs it, which tests decide. Nothing of it but the workspace is shown.

A task says how it differs from its source's tree. ``Delta`` maps a path to its content, to ``None`` (deleted), or to ``TREE`` (as in the
tree); so a mutation of a large source is a few lines of JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from strop.core.errors import TaskError
from strop.tasks.repository.suite import SuiteRun, SuiteSpec

FORMAT = 1


class _Tree:
    """The content that a path has in the source's tree."""

    def __repr__(self) -> str:
        return "TREE"


TREE: Final = _Tree()
Content = bytes | _Tree | None
Delta = Mapping[str, Content]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteVerifier:
    """The hidden side of a repository task: which tests must pass, from which files.

    Attributes:
        spec: How tests run.
        package: Workspace path of a file of the package; what may be changed is the package (see ``strop.grading.admission``).
        fail_to_pass: Node ids that fail on the workspace and pass on the solution.
        pass_to_pass: Node ids that pass on both.
        hidden: Those of them that the workspace doesn't hold.
        cpu_s: Processor seconds that one run of all of them may take.
    """

    spec: SuiteSpec
    package: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    cpu_s: float = 30.0

    @property
    def tests(self) -> tuple[str, ...]:
        """Every test that a verdict needs."""
        return (*self.fail_to_pass, *self.pass_to_pass)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "spec": self.spec.to_json(),
            "package": self.package,
            "fail_to_pass": list(self.fail_to_pass),
            "pass_to_pass": list(self.pass_to_pass),
            "hidden": list(self.hidden),
            "cpu_s": self.cpu_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteVerifier:
        """Inverse of ``to_json``."""
        return cls(
            spec=SuiteSpec.from_json(data["spec"]),
            package=data["package"],
            fail_to_pass=tuple(data["fail_to_pass"]),
            pass_to_pass=tuple(data["pass_to_pass"]),
            hidden=tuple(data["hidden"]),
            cpu_s=float(data["cpu_s"]),
        )


def is_solved(run: SuiteRun) -> bool:
    """Whether a run of all tests of a verifier is a solution: it ended well, and every single test passed.

    A skipped, missing or expectedly failing test is not a passed one, so a suite that skips everything solves nothing.
    """
    return run.ending == "ok" and bool(run.outcomes) and all(letter == "p" for letter in run.outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteTask:
    """One task.

    Attributes:
        task_id: Unique and stable.
        kind: ``"mutation"``, ``"combined"``, ``"deletion"`` or ``"history"``.
        families: What was done: families of mutations, ``"function"``, a commit's name.
        cluster: Group of tasks that aren't independent.
        tree: Folder of the tree in the pool.
        instruction: What the agent is told.
        base: Workspace against tree.
        gold: Solution against workspace.
        tests: What the grading box holds instead of the workspace's files: every test file as it is on the solution.
        verifier: What decides.
        visible: Arguments of ``python`` that run the workspace's own tests.
        split: ``"train"`` or ``"heldout"``, by the module that is repaired.
        source: ``"boltons 25.0.0"``.
        licence: As far as it is known.
        report: What the gate saw (see ``gate.Evidence``).
    """

    task_id: str
    kind: str
    families: tuple[str, ...]
    cluster: str
    tree: str
    instruction: str
    base: Delta
    gold: Delta
    tests: Delta
    verifier: SuiteVerifier
    visible: tuple[str, ...]
    split: str
    source: str
    licence: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "format": FORMAT,
            "id": self.task_id,
            "kind": self.kind,
            "families": list(self.families),
            "cluster": self.cluster,
            "tree": self.tree,
            "instruction": self.instruction,
            "base": delta_to_json(self.base),
            "gold": delta_to_json(self.gold),
            "tests": delta_to_json(self.tests),
            "verifier": self.verifier.to_json(),
            "visible": list(self.visible),
            "split": self.split,
            "source": self.source,
            "licence": self.licence,
            "report": dict(self.report),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteTask:
        """Inverse of ``to_json``.

        Raises:
            TaskError: It is of another format, or a key is missing.
        """
        if data.get("format") != FORMAT:
            raise TaskError(f"task {data.get('id')!r} has format {data.get('format')!r}, expected {FORMAT}")
        try:
            return cls(
                task_id=data["id"],
                kind=data["kind"],
                families=tuple(data["families"]),
                cluster=data["cluster"],
                tree=data["tree"],
                instruction=data["instruction"],
                base=delta_from_json(data["base"]),
                gold=delta_from_json(data["gold"]),
                tests=delta_from_json(data["tests"]),
                verifier=SuiteVerifier.from_json(data["verifier"]),
                visible=tuple(data["visible"]),
                split=data["split"],
                source=data["source"],
                licence=data["licence"],
                report=data["report"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise TaskError(f"task {data.get('id')!r} lacks or misuses the key {error}") from None


def delta_to_json(delta: Delta) -> dict[str, Any]:
    """Return a delta as JSON: ``null`` deleted, ``true`` as in the tree, a string text, ``{"base64": ...}`` other bytes."""
    found: dict[str, Any] = {}
    for path, data in sorted(delta.items()):
        if isinstance(data, bytes):
            try:
                text = data.decode("utf-8")
                found[path] = text
            except UnicodeDecodeError:
                found[path] = {"base64": base64.b64encode(data).decode()}
        else:
            found[path] = None if data is None else True
    return found


def delta_from_json(data: Mapping[str, Any]) -> dict[str, Content]:
    """Inverse of ``delta_to_json``.

    Raises:
        TaskError: A path leaves the workspace.
    """
    found: dict[str, Content] = {}
    for path, value in data.items():
        if path.startswith("/") or ".." in path.split("/") or not path:
            raise TaskError(f"path {path!r} leaves the workspace")
        if value is None:
            found[path] = None
        elif value is True:
            found[path] = TREE
        else:
            found[path] = value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])
    return found


def resolve(delta: Delta, tree: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return a delta with ``TREE`` filled in from a tree's files; a path that the tree lacks counts as deleted."""
    return {path: tree.get(path) if isinstance(data, _Tree) else data for path, data in delta.items()}
