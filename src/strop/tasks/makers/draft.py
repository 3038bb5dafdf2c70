"""A task that somebody proposes and the gate hasn't seen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.tasks.makers.splice import Mutation


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A proposal, as differences of files.

    Attributes:
        kind: ``"mutation"``, ``"combined"``, ``"deletion"`` or ``"history"``.
        families: What was done.
        cluster: Group of tasks that aren't independent: file and function of the first change.
        base: Workspace against tree: path to content, ``None`` for deleted.
        gold: Solution against workspace, source files only.
        tests: Test files of the solution where they differ from the workspace's (commit history only).
        regions: Changed functions: path, first and last line in the solution; empty means anything may be affected.
        subject: What the instruction is about: a dotted name, a commit message.
        details: More for the instruction: signature and documentation of what was deleted.
    """

    kind: str
    families: tuple[str, ...]
    cluster: str
    base: Mapping[str, bytes | None]
    gold: Mapping[str, bytes | None]
    tests: Mapping[str, bytes | None] = field(default_factory=dict)
    regions: Sequence[tuple[str, int, int]] = ()
    subject: str = ""
    details: str = ""
    mutations: tuple[Mutation, ...] = ()

    @property
    def digest(self) -> str:
        """Names the draft: kind, families and contents."""
        digest = hashlib.blake2b(digest_size=4)
        for part in (self.base, self.gold, self.tests):
            for path in sorted(part):
                digest.update(path.encode() + b"\0" + (part[path] or b"\xff") + b"\0")
        return digest.hexdigest()
