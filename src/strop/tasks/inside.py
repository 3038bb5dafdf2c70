"""What runs inside the box: a server that forks one child for each request, and the questions that a child answers.

Started as a script by ``strop.tasks.box`` with an interpreter that sees the standard library, one source tree and this package only.
Requests and replies are JSON lines; the reply comes from the child through a pipe, the server kills a child at its deadline.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.environ["STROP_SRC"])

import io
import json
import resource
import select
import signal
import time
import unittest
from collections.abc import Callable
from typing import Any

from strop.tasks.explore import TooLongError, explore, limited, load, raise_too_long
from strop.tasks.values import canonical
from strop.tasks.verifier import observe


def replay(request: dict[str, Any]) -> dict[str, Any]:
    """Run cases in the given orders on the module as it lies in the tree.

    Returns:
        ``passed``: for each order, the indices of the cases that hold, sorted.
    """
    module, _ = load(request["tree"], request["module"])
    function = getattr(module, request["name"])
    passed = []
    for order in request["orders"]:
        good = []
        for index in order:
            case = request["cases"][index]
            try:
                result, raised = limited(
                    lambda case=case: observe(function, case["args"], case.get("kwargs", {}), drain=request["drain"]), 1.0
                )
            except (TooLongError, SystemExit, KeyboardInterrupt, GeneratorExit):
                continue
            same = raised == case["raises"] if case.get("raises") else raised is None and canonical(result) == canonical(case["expected"])
            if same:
                good.append(index)
        passed.append(sorted(good))
    return {"passed": passed}


def unittests(_: dict[str, Any]) -> dict[str, Any]:
    """Run ``python -m unittest discover -q -s tests`` in ``/workspace``."""
    os.chdir("/workspace")
    sys.path.insert(0, "/workspace")
    stream = io.StringIO()
    sys.stderr = sys.stdout = stream
    code = 1
    try:
        unittest.main(module=None, argv=["python -m unittest", "discover", "-q", "-s", "tests"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return {"output": stream.getvalue(), "exit_code": code}


def lay(request: dict[str, Any]) -> dict[str, Any]:
    """Fill ``/workspace`` with links to a read-only tree. The server itself does this: its children share the file system."""
    for root, folders, names in os.walk("/workspace", topdown=False):
        for name in names:
            os.unlink(os.path.join(root, name))
        for name in folders:
            os.rmdir(os.path.join(root, name))
    for root, folders, names in os.walk(request["tree"]):
        target = os.path.join("/workspace", os.path.relpath(root, request["tree"]))
        for name in folders:
            os.makedirs(os.path.join(target, name), exist_ok=True)
        for name in names:
            os.symlink(os.path.join(root, name), os.path.join(target, name))
    return {}


def write_files(files: dict[str, str]) -> list[tuple[str, str | None]]:
    """Write files over ``/workspace``; returns each path with the link target to put back, or ``None`` to delete it."""
    undo: list[tuple[str, str | None]] = []
    for relative, text in files.items():
        path = os.path.join("/workspace", relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        undo.append((path, os.readlink(path) if os.path.islink(path) else None))
        if os.path.lexists(path):
            os.unlink(path)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    return undo


def restore(undo: list[tuple[str, str | None]]) -> None:
    """Take ``write_files`` back."""
    for path, target in undo:
        os.unlink(path)
        if target is not None:
            os.symlink(target, path)


# --------------------------------------------------------------------------------------------------------------- server

OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"explore": explore, "replay": replay, "unittests": unittests}


def _child(request: dict[str, Any], pipe: int) -> None:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    signal.signal(signal.SIGPROF, raise_too_long)
    try:
        reply = OPERATIONS[request["op"]](request)
    except (ImportError, AttributeError, NameError, SyntaxError, TypeError, ValueError, OSError, KeyError, RuntimeError) as error:
        reply = {"refused": f"import: {type(error).__name__}" if request["op"] == "explore" else f"{type(error).__name__}: {error}"}
    except BaseException as error:
        reply = {"refused": f"{type(error).__name__}"}
    data = memoryview(json.dumps(reply).encode())
    while data:
        data = data[os.write(pipe, data) :]
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _child(request, writer)
    os.close(writer)
    deadline = time.monotonic() + request["deadline_s"]
    chunks = []
    late = False
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            late = True
            break
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
    os.close(reader)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if late:
        return {"refused": "deadline"}
    return json.loads(b"".join(chunks)) if chunks else {"refused": "died"}


def serve() -> None:
    """Answer requests until standard input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        request = json.loads(line)
        undo = write_files(request.get("files", {}))
        reply = lay(request) if request["op"] == "lay" else _answer(request)
        restore(undo)
        output.write(json.dumps(reply) + "\n")
        output.flush()


if __name__ == "__main__":
    serve()
