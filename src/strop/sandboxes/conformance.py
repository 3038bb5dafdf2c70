"""What every sandbox back end must do, as a suite that runs against any of them.

``run_conformance("package.module:Provider", config)`` starts the back end, attacks it from inside with small and bounded programs,
and says for each check: it passed, the back end declares the capability missing on this machine, or it failed and how. Nothing here
knows a particular back end. The checks themselves are in the modules of ``_CHECK_MODULES``; among them are all of Inspect's self check that
this port has a counterpart for.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import secrets
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import ConfigError, nearest
from strop.ports import SandboxProvider
from strop.sandboxes.conformance_arena import CHECKS, SECRET_NAME, Arena, Check

_CHECK_MODULES = ("conformance_checks", "conformance_io", "conformance_escapes", "conformance_state")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Outcome of one check.

    Attributes:
        name: The check's name.
        status: ``"pass"``, ``"missing"`` (the back end declares that it can't do it here) or ``"fail"``.
        detail: Why it is missing or how it failed; empty for a pass.
    """

    name: str
    status: str
    detail: str = ""


def tree_digest(root: Path) -> str:
    """Digest of names, kinds, modes, times and contents of a tree."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        digest.update(f"{path.relative_to(root)}|{info.st_mode}|{info.st_mtime_ns}|{info.st_uid}\n".encode())
        if stat.S_ISREG(info.st_mode):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def make_base(root: Path) -> Path:
    """Write the small package tree that the checks use."""
    base = root / "base"
    (base / "pkg").mkdir(parents=True)
    (base / "tests").mkdir()
    (base / "pkg/__init__.py").write_text("")
    (base / "pkg/core.py").write_text("def double(x):\n    return 2 * x\n")
    (base / "pkg/extra.py").write_text("VALUE = 1\n")
    (base / "tests/__init__.py").write_text("")
    (base / "tests/test_core.py").write_text(
        "import unittest\n\nfrom pkg.core import double\n\n\nclass CoreTest(unittest.TestCase):\n"
        "    def test_double(self):\n        self.assertEqual(double(3), 6)\n"
    )
    (base / "README").write_text("read me\n")
    return base


def load_provider(spec: str) -> Callable[[SandboxConfig], SandboxProvider]:
    """Import ``"module:Class"``.

    Raises:
        ConfigError: It can't be imported or has no such name.
    """
    module_name, separator, name = spec.partition(":")
    if not separator:
        raise ConfigError(f"sandbox back end {spec!r} must look like package.module:Class")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"sandbox back end {spec!r} can't be imported: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"sandbox back end {spec!r}: module {module_name} has no {name!r}.{nearest(name, dir(module))}")
    return getattr(module, name)


async def run_conformance(
    spec: str, config: SandboxConfig | None = None, only: Sequence[str] = (), *, heavy: bool = True
) -> list[CheckResult]:
    """Run the suite.

    Args:
        spec: The back end as ``"module:Class"``; called with the configuration.
        config: Limits; small ones by default, because some checks use them up.
        only: Names of checks; all when empty.
        heavy: Whether to run the checks that keep the machine busy for seconds, when ``only`` doesn't name them.

    Returns:
        One result per check, in a fixed order. The last one says whether the base tree is byte for byte what it was.

    Raises:
        ConfigError: Unknown back end or check name.
        SandboxError: The back end can't start here at all.
    """
    for name in _CHECK_MODULES:
        importlib.import_module(f"strop.sandboxes.{name}")
    known = {check.name: check for check in CHECKS}
    for name in only:
        if name not in known:
            raise ConfigError(f"unknown conformance check {name!r}.{nearest(name, known)}")
    config = config or SandboxConfig(workers=2, memory_mb=96, processes=16, disk_mb=8)
    os.environ.setdefault(SECRET_NAME, secrets.token_hex(16))
    results = []
    with tempfile.TemporaryDirectory(prefix="strop-conformance-") as directory:
        base = make_base(Path(directory))
        before = tree_digest(base)
        provider = load_provider(spec)(config)
        try:
            for check in CHECKS:
                if check.name in only if only else heavy or not check.is_heavy:
                    results.append(await _run_check(check, Arena(provider, base, spec, config)))
        finally:
            await provider.close()
        unmodified = tree_digest(base) == before
    detail = "" if unmodified else "the base tree changed while boxes ran over it"
    results.append(CheckResult(name="base_unmodified", status="pass" if unmodified else "fail", detail=detail))
    return results


async def _run_check(check: Check, arena: Arena) -> CheckResult:
    missing = arena.provider.capabilities.missing
    for need in check.needs:
        if need in missing:
            return CheckResult(name=check.name, status="missing", detail=missing[need])
    try:
        await check.run(arena)
    except Exception as error:  # a check's verdict, whatever went wrong in it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return CheckResult(
            name=check.name, status="fail", detail=f"{type(error).__name__}: {error} (line {where.lineno} of {Path(where.filename).name})"
        )
    return CheckResult(name=check.name, status="pass")


async def _hold(spec: str, base: str, command: str) -> None:
    """In a process of its own: run ``command`` in a box until killed; used by the check of what a killed parent leaves."""
    provider = load_provider(spec)(SandboxConfig(workers=1, memory_mb=96, processes=16, disk_mb=8))
    box = await provider.start(base)
    print(getattr(provider, "directory", ""), flush=True)
    await box.exec(["sh", "-c", command], timeout_s=600)


if __name__ == "__main__":
    asyncio.run(_hold(*sys.argv[1:4]))
