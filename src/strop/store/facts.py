"""Facts that make a figure repeatable: revision, versions, machine. Nothing here imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("strop", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "SQLAlchemy", "zstandard")


def git_revision(start: str | Path | None = None) -> str:
    """Return the commit of the checkout that holds ``start``, with ``+dirty`` when tracked files differ, or ``"unknown"``.

    Recorded results (``docs/results``) don't count: an experiment with several bars would call itself dirty by writing the first one.

    Args:
        start: A directory inside the checkout; by default that of this package.
    """
    directory = Path(start) if start is not None else Path(__file__).resolve().parent
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results")
        return commit + ("+dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL).stdout.strip()


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, without importing them."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name.lower()] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine_facts() -> dict[str, str | int | float]:
    """Return processor, usable cores, memory and system; nothing that names the machine or its owner."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release().split("-")[0],
        "accelerator": _accelerator(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 0


def _accelerator() -> str:
    """Name the first accelerator; only asks torch when it is loaded anyway, since importing it takes seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return "none"
