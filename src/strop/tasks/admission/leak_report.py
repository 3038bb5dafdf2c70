"""What a scan for leaks reports, and the two things that every part of it does: read a file, search a text."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.tasks.admission.needles import Needle, normalise

KINDS: Mapping[str, str] = {
    "git objects": "Loose, packed and dangling objects of any .git folder.",
    "git refs": "A branch, tag or other ref that names a commit beyond HEAD's history.",
    "git reflog": "A log of where refs pointed that names a commit beyond HEAD's history.",
    "git remotes": "A remote or a submodule address: a way to fetch the solution.",
    "byte code": "Compiled code of a changed module that isn't that of the workspace's source.",
    "pytest cache": "Names and results of tests.",
    "type-checker cache": "What mypy, ruff, pyre or pytype kept.",
    "backup": "Copies that editors and patch leave: *.orig, *.rej, *.bak, *~, swap files.",
    "site-packages": "An installed copy of the solution, in the workspace or in the box's interpreter.",
    "pip cache": "Downloaded or built packages.",
    "archive": "A wheel, egg or source archive.",
}
MAX_READ = 32 << 20


@dataclass(frozen=True, slots=True)
class Leak:
    """One finding: kind of place, path, and what it holds."""

    kind: str
    path: str
    evidence: str


@dataclass(slots=True)
class LeakReport:
    """What a scan looked at and found.

    Attributes:
        leaks: Findings.
        looked_at: Number of places by kind.
        unread: Places that couldn't be read or unpacked, with the reason.
    """

    leaks: list[Leak] = field(default_factory=list)
    looked_at: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "leaks": [[leak.kind, leak.path, leak.evidence] for leak in self.leaks],
            "looked_at": dict(sorted(self.looked_at.items())),
            "unread": self.unread[:50],
        }


def read_file(path: str) -> bytes:
    """Read the first ``MAX_READ`` bytes of a regular file, following no link; anything else counts as empty.

    Raises:
        OSError: It can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read(MAX_READ) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def search(report: LeakReport, kind: str, path: str, data: bytes, needles: Sequence[Needle]) -> None:
    """Note every needle that a content holds."""
    text = normalise(data.decode("utf-8", "replace"))
    for needle in needles:
        if needle.is_in(text):
            report.leaks.append(Leak(kind, path, f"holds the solution of {needle.path}: {needle.windows[0].strip()[:120]}"))
