"""``strop doctor``: what this machine lacks, what is lost without it, and the command that fixes it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from strop.cli.registry import resolve
from strop.core.errors import SandboxError
from strop.model.native.build import find_compiler, missing_compiler_text
from strop.store.facts import machine_facts

MIN_MEMORY_GIB = 6.0
MIN_DISK_GIB = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        area: What it belongs to.
        name: What was looked for.
        ok: Whether it is there.
        is_required: Whether a run is impossible without it.
        found: What was found.
        lost: What is lost without it.
        fix: The command or step that fixes it.
    """

    area: str
    name: str
    ok: bool
    is_required: bool
    found: str = ""
    lost: str = ""
    fix: str = ""


def check_machine() -> list[Check]:
    """Look at everything that strop needs."""
    return [*_check_python(), *_check_hardware(), *_check_tools(), *_check_host()]


def _check_python() -> list[Check]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    checks = [
        Check(
            area="python",
            name="Python 3.11 or newer",
            ok=sys.version_info >= (3, 11),
            is_required=True,
            found=version,
            lost="everything",
            fix="install Python 3.11 and run make again",
        )
    ]
    for requirement in metadata.requires("strop") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = ""
        wanted = requirement.split(";")[0].strip()
        fix = f"{sys.executable} -m pip install '{wanted}'"
        checks.append(Check(area="packages", name=wanted, ok=bool(found), is_required=True, found=found, lost="everything", fix=fix))
    return checks


def _check_hardware() -> list[Check]:
    facts = machine_facts()
    memory = float(facts["memory_gib"])
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return [
        Check(
            area="machine",
            name=f"memory of {MIN_MEMORY_GIB:g} GiB",
            ok=memory >= MIN_MEMORY_GIB,
            is_required=False,
            found=f"{memory} GiB, {facts['cores']} cores",
            lost="larger batches; the quickstart needs about 4 GiB",
            fix="lower engine.max_sessions and rl.groups",
        ),
        Check(
            area="machine",
            name=f"{MIN_DISK_GIB:g} GiB free here",
            ok=free >= MIN_DISK_GIB,
            is_required=False,
            found=f"{free:.0f} GiB",
            lost="room for the virtual environment and a run",
            fix="free some space, or choose another --out",
        ),
    ]


def _check_tools() -> list[Check]:
    compiler, git = find_compiler() or "", shutil.which("git") or ""
    return [
        Check(
            area="tools",
            name="C compiler",
            ok=bool(compiler),
            is_required=True,
            found=compiler or missing_compiler_text(),
            lost="the kernels that generate and train on the CPU",
            fix=install_command("gcc libc6-dev"),
        ),
        Check(
            area="tools",
            name="git",
            ok=bool(git),
            is_required=False,
            found=git,
            lost="the revision in results and run directories",
            fix=install_command("git"),
        ),
    ]


def install_command(package: str) -> str:
    """Return the command that installs system packages, for root or for others."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install -y {package}"


def _check_host() -> list[Check]:
    """Ask the sandbox room; its requirements carry their own texts."""
    if util.find_spec("strop.sandboxes") is None:
        return []
    requirements = resolve("strop.sandboxes:check_host", "the host check")()
    return [
        Check(
            area="sandbox",
            name=item.name,
            ok=item.ok,
            is_required=item.is_required,
            found=item.detail,
            lost=item.lost,
            fix=item.fix,
        )
        for item in requirements
    ]


def check_sandbox() -> None:
    """Stop a run before it begins on a host that can't isolate agent code.

    Raises:
        SandboxError: What is missing and the command that fixes it.
    """
    missing = [check for check in _check_host() if check.is_required and not check.ok]
    if missing:
        lines = [f"{check.name}: {check.found}. Lost: {check.lost}. Fix: {check.fix}." for check in missing]
        raise SandboxError("this machine can't isolate agent code. " + " ".join(lines) + " strop doctor shows the whole list.")


def print_report() -> int:
    """Print one line per check; exit code 1 when something required is missing."""
    checks = check_machine()
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            print(area)
        mark = "ok     " if check.ok else ("MISSING" if check.is_required else "missing")
        print(f"  {mark}  {check.name}" + (f": {check.found}" if check.found else ""))
        if not check.ok:
            print(f"           lost: {check.lost}\n           fix:  {check.fix}")
    missing = sum(not check.ok for check in checks)
    required = sum(not check.ok and check.is_required for check in checks)
    if not missing:
        print("nothing is missing")
    else:
        print(f"{missing} missing, {required} of them needed by every run")
    return 1 if required else 0
