"""Compiles the kernels for this processor, once, into a cache keyed by everything that could change the result.

``python -m strop.model.native.build`` does it ahead of time and prints the library's path; otherwise the first use does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from strop.core.errors import EngineError, StropError

SOURCES = (
    "pool.c",
    "gemm.c",
    "net.c",
    "attention.c",
    "experts.c",
    "head.c",
    "forward.c",
    "tape.c",
    "head_backward.c",
    "experts_backward.c",
    "gradients.c",
    "backward.c",
)
HEADERS = ("vec.h", "pool.h", "gemm.h", "net.h", "tape.h")
COMPILERS = ("cc", "gcc", "clang")
# -ffp-contract=off: a fused multiply-add only where the source says so, or variants of a kernel would round differently.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default", "-pthread")
TIMEOUT_S = 300.0


def find_compiler() -> str | None:
    """Return the C compiler (``$CC``, cc, gcc or clang), or ``None``."""
    for name in (os.environ.get("CC", ""), *COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    return None


def missing_compiler_text() -> str:
    """What to tell a person without a compiler; ``strop doctor`` prints it too."""
    return (
        f"no C compiler found (looked for $CC, {', '.join(COMPILERS)}); the exact kernels are compiled for this processor on first use. "
        "Install one, for example: apt-get install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora), xcode-select --install (macOS)"
    )


def cache_dir() -> Path:
    """Directory of compiled libraries: ``$XDG_CACHE_HOME/strop/native``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "strop" / "native"


def cpu_features() -> str:
    """Return what ``-march=native`` depends on: machine, processor model and its instruction sets."""
    lines: list[str] = []
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = sorted(
            {line for line in text.splitlines() if line.split(":")[0].strip() in ("flags", "Features", "model name", "CPU part")}
        )
    except OSError:
        pass
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *lines])


def build() -> Path:
    """Return the path of the compiled library, compiling it if the cache has none.

    Concurrent calls compile once: the others wait for the lock.

    Raises:
        EngineError: No compiler, or the compiler failed; the message holds its output.
    """
    sources = Path(__file__).resolve().parent
    compiler = find_compiler()
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update(name.encode() + b"\0" + (sources / name).read_bytes())
    digest.update("\0".join((*FLAGS, cpu_features(), compiler or "", _version(compiler))).encode())
    directory = _private_directory()
    library = directory / f"kernels-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    if compiler is None:
        raise EngineError(missing_compiler_text())
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, sources, library)
    return library


def _private_directory() -> Path:
    # Code is loaded from here, so nobody else may write to it.
    try:
        cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(cache_dir(), os.W_OK) and cache_dir().stat().st_uid == os.getuid():
            return cache_dir()
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"strop-native-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    status = fallback.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EngineError(f"neither {cache_dir()} nor {fallback} is a directory that only this user can write; set XDG_CACHE_HOME to one")
    return fallback


def _version(compiler: str | None) -> str:
    if compiler is None:
        return ""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout


def _compile(compiler: str, sources: Path, library: Path) -> None:
    output = ""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        target = Path(scratch) / library.name
        for tuning in (("-march=native",), ("-mcpu=native",), ()):
            command = [compiler, *FLAGS, *tuning, *(str(sources / name) for name in SOURCES), "-o", str(target), "-lm"]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                raise EngineError(f"{compiler} did not finish compiling the kernels within {TIMEOUT_S:.0f} s", retryable=True) from None
            if result.returncode == 0:
                os.replace(target, library)
                return
            output = output or result.stderr
    raise EngineError(f"{compiler} can't compile the kernels in {sources}: {output.strip()[-2000:]}")


def main() -> int:
    """Compile and print the library's path."""
    try:
        print(build())
    except StropError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
