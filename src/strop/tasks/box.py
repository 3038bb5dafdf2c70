"""The box that runs the code under test: bubblewrap, no network, read-only root, an interpreter that serves requests.

Stronger than a sandbox for agents needs to be in one way only: it is started from pinned sources. It has the same walls: own namespaces,
nothing writable but memory, a deadline and a memory limit for every request.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import strop
from strop.core.errors import TaskError

_SKIPPED_ROOT = frozenset({"proc", "dev", "sys", "tmp", "workspace", "trees", "strop", "lost+found"})


class Box:
    """One server process inside bubblewrap, restarted when it dies.

    Args:
        trees: Host directory of source trees, seen as ``/trees``.
        with_site: Whether installed packages can be imported (as in a user's sandbox) or only the standard library.
        hash_seed: ``PYTHONHASHSEED`` inside.
        environment: More variables.

    Raises:
        TaskError: bubblewrap isn't installed.
    """

    def __init__(self, trees: Path, *, with_site: bool = False, hash_seed: int = 0, environment: dict[str, str] | None = None) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise TaskError("bubblewrap is needed to run the code that tasks are made from; install the package 'bubblewrap'")
        binds = [part for name in sorted(os.listdir("/")) if name not in _SKIPPED_ROOT for part in self._bind(f"/{name}")]
        variables = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": "/tmp",
            "TZ": "UTC",
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNODEBUGRANGES": "1",
            "STROP_SRC": "/strop",
            **(environment or {}),
        }
        settings = [part for name, value in variables.items() for part in ("--setenv", name, value)]
        self._argv = [
            *(bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
            *("--tmpfs", "/", *binds, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace"),
            *("--ro-bind", str(trees), "/trees", "--ro-bind", str(Path(strop.__file__).parent.parent), "/strop"),
            *(part for prefix in sorted({sys.base_prefix, sys.prefix}) if prefix.startswith("/tmp/") for part in self._bind(prefix)),
            *("--chdir", "/tmp", *settings),
            *(sys.executable, "-P", "-s", *(() if with_site else ("-S",)), "/strop/strop/tasks/inside.py"),
        ]
        self._process: subprocess.Popen[str] | None = None
        self.restarts = 0

    @staticmethod
    def _bind(path: str) -> tuple[str, ...]:
        return ("--symlink", os.readlink(path), path) if os.path.islink(path) else ("--ro-bind", path, path)

    def ask(self, op: str, *, deadline_s: float = 20.0, **request: Any) -> dict[str, Any]:
        """Send a request; a reply with the key ``refused`` says why there is no answer.

        Raises:
            TaskError: The server can't be started.
        """
        for attempt in range(2):
            process = self._process or self._start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps({"op": op, "deadline_s": deadline_s, **request}) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if line:
                return json.loads(line)
            error = self._stop()
            if attempt:
                raise TaskError(f"the box for task building ends at once: {error[-400:]}")
        raise AssertionError("unreachable")

    def _start(self) -> subprocess.Popen[str]:
        self.restarts += 1
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        return self._process

    def _stop(self) -> str:
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        _, error = process.communicate()
        return error

    def close(self) -> None:
        """End the server and everything inside."""
        self._stop()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
