"""A git checkout's committed files and history, read by a git that never sees the checkout's configuration.

The object store is bound read only into a box; there a fresh bare repository borrows it. So hooks, filters, ``core.fsmonitor``, replace
refs and alternates of the checkout have no effect, and nothing of the working tree is looked at.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import TaskError
from strop.tasks.repository.boxed import Boxed, run_boxed
from strop.tasks.repository.files import MAX_FILE_BYTES, Files, is_skipped, problem_of

_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SMALL = 1 << 20
_BORROW = (
    "set -e; git init -q --bare /tmp/own.git; cd /tmp/own.git; echo /objects > objects/info/alternates; "
    'if [ -n "$SHALLOW" ]; then printf "%s\\n" $SHALLOW > shallow; fi; exec git "$@"'
)


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit.

    Attributes:
        sha: Its name.
        parent: Its first parent, ``""`` for none.
        num_parents: More than one for a merge.
        message: Subject and body.
    """

    sha: str
    parent: str
    num_parents: int
    message: str


@dataclass(frozen=True, slots=True)
class FileChange:
    """A path that a commit changed; ``before`` or ``after`` is ``""`` where there is no file."""

    path: str
    before: str
    after: str


class GitCheckout:
    """Reads one checkout.

    Args:
        folder: The working tree; it must hold a ``.git`` directory.

    Raises:
        TaskError: It holds none, or no commit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._git = folder / ".git"
        if self._git.is_symlink() or not self._git.is_dir():
            raise TaskError(f"{str(folder)!r} has no .git directory (a worktree or submodule only points to one): give the main checkout")
        if not (self._git / "objects").is_dir():
            raise TaskError(f"{str(folder)!r}: .git has no objects")
        shallow = self._small(self._git / "shallow").split()
        self._shallow = " ".join(line for line in shallow if _SHA.fullmatch(line))
        self.head = self._head()

    def _small(self, path: Path) -> str:
        """Text of a small file of .git, ``""`` if there is none; follows no link."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with open(descriptor, "rb") as file:
            return file.read(_SMALL).decode("utf-8", "replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""

    def _head(self) -> str:
        text = self._small(self._git / "HEAD").strip()
        for _ in range(5):
            if _SHA.fullmatch(text):
                return text
            name = text.removeprefix("ref: ").strip()
            if not re.fullmatch(r"refs/[\w./+-]+", name) or ".." in name:
                break
            text = self._small(self._git / name).strip() or self._packed(name)
        raise TaskError(f"git checkout {str(self.folder)!r} has no commit to start from (HEAD is {text[:60]!r})")

    def _packed(self, name: str) -> str:
        for line in self._small(self._git / "packed-refs").splitlines():
            sha, _, ref = line.partition(" ")
            if ref == name:
                return sha
        return ""

    def run(self, arguments: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 120.0) -> Boxed:
        """Run a git command over the checkout's objects.

        Raises:
            TaskError: git failed.
        """
        done = run_boxed(
            ["sh", "-c", _BORROW, "git", *arguments],
            read_only={"/objects": self._git / "objects"},
            variables={"SHALLOW": self._shallow, "GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"},
            stdin=stdin,
            timeout_s=timeout_s,
        )
        if done.exit_code:
            raise TaskError(
                f"git {arguments[0]} failed on {str(self.folder)!r}: {done.stderr.strip()[-300:] or f'status {done.exit_code}'}"
            )
        return done

    def commits(self, limit: int) -> list[Commit]:
        """The newest ``limit`` commits of the first-parent line, newest first."""
        out = self.run(["log", "--first-parent", "-n", str(limit), "--format=%H%x00%P%x00%B%x00%x01", self.head]).stdout
        found = []
        for row in out.decode("utf-8", "replace").split("\x00\x01"):
            sha, separator, rest = row.strip("\n").partition("\x00")
            if separator:
                parents, _, message = rest.partition("\x00")
                names = parents.split()
                found.append(Commit(sha, names[0] if names else "", len(names), message.strip()))
        return found

    def changes(self, commits: Iterable[Commit]) -> dict[str, list[FileChange]]:
        """What each commit changed against its first parent, by its name; regular files only."""
        pairs = [commit for commit in commits if commit.parent]
        text = "".join(f"{commit.sha} {commit.parent}\n" for commit in pairs)
        out = self.run(
            ["diff-tree", "--stdin", "-r", "-z", "--no-renames", "--no-abbrev", "-m", "--first-parent"], stdin=text.encode()
        ).stdout
        found: dict[str, list[FileChange]] = {}
        words = out.split(b"\x00")
        at, current = 0, ""
        while at < len(words):
            word = words[at].decode("utf-8", "replace").strip("\n")
            if word.startswith(":"):
                old_mode, new_mode, before, after, _ = word[1:].split(" ")
                path = words[at + 1].decode("utf-8", "surrogateescape")
                is_plain = all(mode in ("000000", "100644", "100755") for mode in (old_mode, new_mode))
                if is_plain and not problem_of(path) and not is_skipped(path):
                    zero = "0" * len(before)
                    found.setdefault(current, []).append(FileChange(path, "" if before == zero else before, "" if after == zero else after))
                at += 2
            else:
                current = word.split(" ")[0] or current
                at += 1
        return found

    def tree(self, sha: str) -> dict[str, str]:
        """Paths and blob names of a commit's files; links, submodules and unusable names left out."""
        return self._tree(sha)[0]

    def _tree(self, sha: str) -> tuple[dict[str, str], Files]:
        notes = Files()
        found = {}
        for row in self.run(["ls-tree", "-r", "-z", "-l", sha]).stdout.split(b"\x00"):
            head, _, name = row.partition(b"\t")
            if not name:
                continue
            mode, _, blob, size = head.decode().split()
            path = name.decode("utf-8", "surrogateescape")
            if mode not in ("100644", "100755"):
                notes.leave_out("link or submodule", path)
            elif problem := problem_of(path):
                notes.leave_out(problem, path)
            elif int(size) > MAX_FILE_BYTES:
                raise TaskError(f"{str(self.folder)!r}: {path!r} is larger than {MAX_FILE_BYTES >> 20} MiB; remove it from the source")
            elif not is_skipped(path):
                found[path] = blob
        return found, notes

    def blobs(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents of blobs.

        Raises:
            TaskError: One is missing.
        """
        wanted = sorted(set(names))
        out = self.run(["cat-file", "--batch", "--buffer"], stdin="".join(f"{name}\n" for name in wanted).encode(), timeout_s=300).stdout
        found = {}
        at = 0
        for name in wanted:
            end = out.index(b"\n", at)
            words = out[at:end].split()
            if len(words) != 3 or words[1] != b"blob":
                raise TaskError(f"{str(self.folder)!r}: git object {name} is missing or damaged")
            size = int(words[2])
            found[name] = out[end + 1 : end + 1 + size]
            at = end + 2 + size
        return found

    def files(self, sha: str = "") -> Files:
        """The files of a commit, by default of HEAD.

        Raises:
            TaskError: An object is missing, or the limits are crossed.
        """
        tree, files = self._tree(sha or self.head)
        contents = self.blobs(tree.values())
        for path, blob in sorted(tree.items()):
            files.add(path, contents[blob], str(self.folder))
        return files
