"""Compiles ``warden.c``, once, into a cache keyed by its text and the processor."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from strop.core.errors import SandboxError

SOURCE = Path(__file__).with_name("warden.c")
_TIMEOUT_S = 120


def warden() -> Path:
    """Path of the compiled warden.

    Raises:
        SandboxError: No compiler, or it failed.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop" / "warden"
    key = hashlib.sha256(SOURCE.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    target = root / key
    if target.is_file():
        return target
    compiler = next((found for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise SandboxError("the docker back end compiles a small helper; install a C compiler, for example: apt-get install gcc libc6-dev")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as directory:
        made = Path(directory) / "warden"
        command = [compiler, "-Os", "-std=gnu11", "-Wall", "-static", "-s", str(SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"the docker back end's helper can't be compiled: {error}") from error
        if done.returncode:
            raise SandboxError(f"the docker back end's helper can't be compiled: {done.stderr.strip()[-400:]}")
        made.chmod(0o755)
        os.replace(made, target)
    return target
