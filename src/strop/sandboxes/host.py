"""What this machine offers the bubblewrap sandbox, for ``strop doctor``.

Each requirement comes with what is lost without it and the command that provides it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import SandboxError
from strop.sandboxes import cgroups, ownership
from strop.sandboxes.outer import build_command, prepare

_PROBE_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One thing that the sandbox wants from the machine.

    Attributes:
        name: Short name, for example ``"overlayfs"``.
        ok: Whether it is there.
        is_required: Whether the sandbox can't run at all without it.
        detail: What was found.
        lost: What is lost without it; empty if ``ok``.
        fix: The exact command that provides it; empty if ``ok``.
    """

    name: str
    ok: bool
    is_required: bool
    detail: str
    lost: str = ""
    fix: str = ""


def probe_kernel(run_dir: Path) -> dict[str, str]:
    """Try the outer bubblewrap and, in it, what the warm parent needs.

    Args:
        run_dir: A prepared provider directory.

    Returns:
        Error texts, empty where it works, under ``start``, ``overlay``, ``tmpfs_xattr``, ``filter``. If ``start`` isn't empty it
        is the only key.

    Raises:
        SandboxError: bubblewrap isn't installed.
    """
    command = build_command(run_dir, ["--probe"])
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"start": f"bubblewrap can't be run: {error}"}
    if done.returncode:
        return {"start": (done.stderr.strip() or f"bubblewrap ended with status {done.returncode}")[-300:]}
    return json.loads(done.stdout)


def check_host() -> list[Requirement]:
    """Check this machine; starts one bubblewrap and leaves nothing behind."""
    if not shutil.which("bwrap"):
        lost = "everything: agent code is never run without isolation"
        return [Requirement(name="bubblewrap", ok=False, is_required=True, detail="bwrap isn't on PATH", lost=lost, fix=_install_command())]
    found = [Requirement(name="bubblewrap", ok=True, is_required=True, detail=shutil.which("bwrap") or "")]
    try:
        root = ownership.create_root()
    except SandboxError as error:
        lost = "everything: boxes have no place for their changes"
        return [
            *found,
            Requirement(
                name="directory",
                ok=False,
                is_required=True,
                detail=str(error),
                lost=lost,
                fix="export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
            ),
        ]
    try:
        prepare(root)
        probe = probe_kernel(root)
    finally:
        ownership.release_root(root)
    found.append(_namespaces(probe.get("start", "")))
    if "overlay" in probe:
        found.append(_overlay(probe["overlay"]))
        found.append(_tmpfs(probe["tmpfs_xattr"]))
    found += _control_groups()
    return found


# Switches of the kernel that turn user namespaces off: setting, value that is off, value that is on, whether root is free of it.
_NAMESPACE_SWITCHES = (
    ("user.max_user_namespaces", "0", "15000", False),
    ("kernel.unprivileged_userns_clone", "0", "1", True),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0", True),
)


def _namespaces(problem: str) -> Requirement:
    """Say whether namespaces can be made; when they are switched off, that is said, with the switch, instead of bubblewrap's own words."""
    name, lost = "user namespaces", "everything: no isolation without them"
    if not problem:
        return Requirement(name=name, ok=True, is_required=True, detail="usable")
    for setting, off, on, spares_root in _NAMESPACE_SWITCHES:
        if _sysctl(setting.replace(".", "/")) == off and not (spares_root and _is_root()):
            detail = f"user namespaces are switched off on this machine ({setting} = {off}); bubblewrap says: {problem}"
            fix = f"{'' if _is_root() else 'sudo '}sysctl -w {setting}={on}"
            return Requirement(name=name, ok=False, is_required=True, detail=detail, lost=lost, fix=fix)
    fix = "run strop as a user who may make user namespaces: unshare --user true must succeed"
    if os.path.exists("/.dockerenv"):
        fix = "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined ..."
    return Requirement(name=name, ok=False, is_required=True, detail=problem, lost=lost, fix=fix)


def _overlay(problem: str) -> Requirement:
    if not problem:
        return Requirement(name="overlayfs", ok=True, is_required=True, detail="mounts in a user namespace")
    fix = "sudo modprobe overlay"
    if _kernel() < (5, 11):
        fix = "upgrade to Linux 5.11 or later, for example: sudo apt-get install -y linux-image-amd64 && sudo reboot"
    lost = "everything: boxes over a shared base tree need it"
    return Requirement(name="overlayfs", ok=False, is_required=True, detail=problem, lost=lost, fix=fix)


def _tmpfs(problem: str) -> Requirement:
    if not problem:
        return Requirement(name="disk limit", ok=True, is_required=False, detail="tmpfs holds user attributes")
    lost = "the limit on a box's disk use holds per file, not per box"
    fix = "upgrade to Linux 6.6 or later, for example: sudo apt-get install -y linux-image-amd64 && sudo reboot"
    return Requirement(name="disk limit", ok=False, is_required=False, detail=problem, lost=lost, fix=fix)


def _control_groups() -> list[Requirement]:
    hierarchies = cgroups.find_hierarchies()
    # A user's own slice lets its processes make groups; a login over ssh is outside it.
    fix = "systemd-run --user --scope -p Delegate=yes strop ..." if not _is_root() else "mount -o remount,rw /sys/fs/cgroup"
    result = []
    for controller, lost in (
        ("memory", "memory is limited per process, not per box, and a run killed for memory can't be told from one that killed itself"),
        ("pids", "the number of processes is limited by RLIMIT_NPROC only, which root ignores"),
    ):
        hierarchy = hierarchies.get(controller)
        detail = (
            f"version {hierarchy.version} at {hierarchy.parent}"
            if hierarchy
            else f"no writable control group with the {controller} controller"
        )
        ok = hierarchy is not None
        name = f"control group {controller}"
        result.append(Requirement(name=name, ok=ok, is_required=False, detail=detail, lost="" if ok else lost, fix="" if ok else fix))
    return result


def _install_command() -> str:
    for tool, command in (
        ("apt-get", "sudo apt-get install -y bubblewrap"),
        ("dnf", "sudo dnf install -y bubblewrap"),
        ("pacman", "sudo pacman -S --noconfirm bubblewrap"),
        ("apk", "sudo apk add bubblewrap"),
        ("zypper", "sudo zypper install -y bubblewrap"),
    ):
        if shutil.which(tool):
            return command
    return "sudo apt-get install -y bubblewrap"


def _sysctl(name: str) -> str:
    try:
        return Path(f"/proc/sys/{name}").read_text().strip()
    except OSError:
        return ""


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _is_root() -> bool:
    return os.getuid() == 0
