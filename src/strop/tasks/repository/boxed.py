"""One command inside bubblewrap: git over foreign objects, pip over a foreign source archive, a build back end.

Read-only system, cleared environment, an own temporary directory, no network unless asked for; dies with this process. For tests of a
repository and for agents there are sandboxes with limits (``strop.sandboxes``); this one is for tools that a build needs once or twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import TaskError

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc")


@dataclass(frozen=True, slots=True)
class Boxed:
    """What a command left behind.

    Attributes:
        exit_code: Its status; negative for a signal, ``-9`` after the deadline.
        stdout: Bytes of standard output.
        stderr: Standard error as text.
    """

    exit_code: int
    stdout: bytes
    stderr: str


def run_boxed(
    argv: Sequence[str],
    *,
    read_only: Mapping[str, str | Path] | None = None,
    writable: Mapping[str, str | Path] | None = None,
    variables: Mapping[str, str] | None = None,
    network: bool = False,
    stdin: bytes = b"",
    timeout_s: float = 120.0,
    cwd: str = "/tmp",
) -> Boxed:
    """Run a command.

    Args:
        argv: The command; paths as seen in the box.
        read_only: Box path -> host path.
        writable: Box path -> host path.
        variables: Environment beyond the minimum.
        network: Share the host's network.
        stdin: Its standard input.
        timeout_s: Wall seconds, then everything inside is killed.
        cwd: Working directory in the box.

    Raises:
        TaskError: bubblewrap isn't installed or can't start.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise TaskError("bubblewrap is needed to work on foreign code; install the package 'bubblewrap'")
    command = [bwrap, "--unshare-all", *(("--share-net",) if network else ()), "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL", "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for prefix in sorted({sys.base_prefix, sys.prefix}):
        if not prefix.startswith("/usr"):
            command += ["--ro-bind", prefix, prefix]
    for target, source in (read_only or {}).items():
        command += ["--ro-bind", str(source), target]
    for target, source in (writable or {}).items():
        command += ["--bind", str(source), target]
    settings = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", **(variables or {})}
    for name, value in settings.items():
        command += ["--setenv", name, value]
    return _run([*command, "--chdir", cwd, *argv], stdin, timeout_s)


def _run(command: list[str], stdin: bytes, timeout_s: float) -> Boxed:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
            return Boxed(-9, out, f"no answer within {timeout_s:g} s")
    text = err.decode("utf-8", "replace")
    if process.returncode and text.startswith("bwrap: "):
        raise TaskError(f"bubblewrap can't start: {text.strip()[-300:]}; run `strop doctor`")
    return Boxed(process.returncode, out, text)
