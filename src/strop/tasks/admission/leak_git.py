"""Every object, ref, log and address of a ``.git`` folder, read by a boxed git that sees the objects and nothing else of it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from strop.tasks.admission.leak_archives import unpacked
from strop.tasks.admission.leak_report import Leak, LeakReport, read_file, search
from strop.tasks.admission.needles import Needle
from strop.tasks.repository.boxed import run_boxed

_GIT_SCRIPT = (
    "set -e; git init -q --bare /tmp/own.git; cd /tmp/own.git; echo /git/objects > objects/info/alternates; "
    "exec git cat-file --batch-all-objects --batch --buffer --unordered"
)
_GIT_HISTORY = (
    'set -e; git init -q --bare /tmp/own.git; cd /tmp/own.git; echo /git/objects > objects/info/alternates; exec git rev-list "$HEAD"'
)


def look_at_git(report: LeakReport, root: str, git: str, needles: Sequence[Needle]) -> None:
    """Look at one ``.git`` folder.

    Args:
        report: Gets the findings.
        root: The workspace.
        git: The folder.
        needles: What must not be found.
    """
    name = os.path.relpath(git, root)
    objects = os.path.join(git, "objects")
    if os.path.islink(objects) or os.path.islink(git):
        report.leaks.append(Leak("git objects", name, "its objects lie behind a link"))
        return
    if os.path.lexists(os.path.join(objects, "info", "alternates")):
        report.leaks.append(Leak("git objects", f"{name}/objects/info/alternates", "borrows objects from elsewhere"))
    history = _look_at_refs(report, git, name)
    done = run_boxed(["sh", "-c", _GIT_SCRIPT], read_only={"/git/objects": objects}, timeout_s=300)
    if done.exit_code:
        report.leaks.append(Leak("git objects", f"{name}/objects", f"can't be read: {done.stderr.strip()[-100:]}"))
    out, at = done.stdout, 0
    while (end := out.find(b"\n", at)) >= 0:
        words = out[at:end].split()
        if len(words) != 3:
            break
        size = int(words[2])
        content = out[end + 1 : end + 1 + size]
        at = end + 2 + size
        sha, what = words[0].decode(), words[1].decode()
        report.looked_at["git objects"] += 1
        if what == "blob":
            for inner, data in unpacked(sha, content, report):
                search(report, "git objects", f"{name}: blob {inner}", data, needles)
        elif what in ("commit", "tag") and sha not in history:
            search(report, "git objects", f"{name}: {what} {sha}", content, needles)


def _look_at_refs(report: LeakReport, git: str, name: str) -> set[str]:
    """Refs, logs and remotes; returns the commits of HEAD's history."""
    head = _text(git, "HEAD").strip()
    sha = head if re.fullmatch(r"[0-9a-f]{40,64}", head) else _resolve(git, head.removeprefix("ref: ").strip())
    history: set[str] = set()
    if sha:
        done = run_boxed(["sh", "-c", _GIT_HISTORY], read_only={"/git/objects": os.path.join(git, "objects")}, variables={"HEAD": sha})
        history = set(done.stdout.decode("ascii", "replace").split()) | {sha}
    for path in _files_below(git, "refs"):
        report.looked_at["git refs"] += 1
        _hold(report, "git refs", f"{name}/{path}", _text(git, path), history)
    for special in ("packed-refs", "ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if text := _text(git, special):
            report.looked_at["git refs"] += 1
            _hold(report, "git refs", f"{name}/{special}", text, history)
    for path in _files_below(git, "logs"):
        report.looked_at["git reflog"] += 1
        _hold(report, "git reflog", f"{name}/{path}", _text(git, path), history)
    for path in ("config", "config.worktree"):
        report.looked_at["git remotes"] += 1
        for match in re.finditer(r"^\s*(?:push)?(?:url|insteadof)\s*=\s*(\S+)", _text(git, path), re.MULTILINE | re.IGNORECASE):
            report.leaks.append(Leak("git remotes", f"{name}/{path}", f"an address to fetch from: {match[1][:100]}"))
    return history


def _hold(report: LeakReport, kind: str, path: str, text: str, history: set[str]) -> None:
    """Report names of commits that HEAD's history doesn't have."""
    beyond = [sha for sha in re.findall(r"\b[0-9a-f]{40,64}\b", text) if sha.strip("0") and sha not in history]
    if beyond:
        report.leaks.append(Leak(kind, path, f"names {beyond[0]}, which isn't in the history of HEAD"))


def _resolve(git: str, ref: str) -> str:
    text = _text(git, ref).strip() if ".." not in ref else ""
    if re.fullmatch(r"[0-9a-f]{40,64}", text):
        return text
    return next((line.split()[0] for line in _text(git, "packed-refs").splitlines() if line.endswith(f" {ref}")), "")


def _text(git: str, path: str) -> str:
    try:
        return read_file(os.path.join(git, path)).decode("utf-8", "replace")
    except OSError:
        return ""


def _files_below(git: str, folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, file), git)
        for parent, _, files in os.walk(os.path.join(git, folder))
        for file in sorted(files)
    ]
