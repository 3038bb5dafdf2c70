"""Control groups of the warm workers: limits on memory and processes, and the kernel's own count of who was killed for what.

Version 1 and version 2 are supported; whichever hierarchy can be written is used, each limit on its own. A worker and all runs
that it forks live in one group; runs of a worker follow each other, so the difference of two readings belongs to one run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from strop.sandboxes.ownership import identity, is_dead

_NEAR_BYTES = 2 << 20  # an allocation that doesn't fit, one huge page at most, leaves the group so far below its limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the kernel has counted in a group so far.

    Attributes:
        oom_kills: Processes killed for want of memory, the group's own or the machine's.
        limit_hits: Grows when the group has reached its own memory limit (version 2: and nothing but killing could help). A process killed
            while this stands still was killed because the machine, or a group above, had no memory left.
        refused_forks: Forks refused because the process limit was reached.
    """

    oom_kills: int = 0
    limit_hits: int = 0
    refused_forks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """Where groups can be created for one controller: ``parent`` directory and cgroup ``version``."""

    controller: str
    version: int
    parent: Path


def find_hierarchies(proc: Path = Path("/proc/self")) -> dict[str, Hierarchy]:
    """Writable places for the ``memory`` and ``pids`` controllers; a controller that can't be used is absent.

    Args:
        proc: Directory with this process's ``cgroup`` and ``mountinfo`` files.
    """
    mounts = _cgroup_mounts(proc)
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    found = {}
    for controller in ("memory", "pids"):
        if controller in own and controller in mounts:
            root, mounted_path = mounts[controller]
            parent = _below(root, mounted_path, own[controller])
            if _can_create(parent):
                found[controller] = Hierarchy(controller=controller, version=1, parent=parent)
        elif "" in own and "" in mounts:
            root, mounted_path = mounts[""]
            for parent in _v2_candidates(root, _below(root, mounted_path, own[""])):
                if controller in _words(parent / "cgroup.subtree_control") and _can_create(parent):
                    found[controller] = Hierarchy(controller=controller, version=2, parent=parent)
                    break
    return found


def paths_of(pid: int) -> dict[str, Path]:
    """Directory of the group that a process is in, for each controller of version 1, and under ``""`` for version 2.

    Raises:
        OSError: No such process.
    """
    mounts = _cgroup_mounts(Path("/proc/self"))
    found = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                root, mounted_path = mounts[controller]
                found[controller] = _below(root, mounted_path, own)
    return found


def _cgroup_mounts(proc: Path) -> dict[str, tuple[Path, str]]:
    """Controller (``""`` for version 2) -> (mount point, path inside the hierarchy that is mounted there)."""
    mounts: dict[str, tuple[Path, str]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = (Path(fields[4]), fields[3])
        elif kind == "cgroup":
            for option in options.split(","):
                mounts[option] = (Path(fields[4]), fields[3])
    return mounts


def _below(root: Path, mounted_path: str, own: str) -> Path:
    inside = own[len(mounted_path) :] if mounted_path != "/" and own.startswith(mounted_path) else own
    return root / inside.strip("/")


def _v2_candidates(root: Path, own: Path) -> list[Path]:
    # A version 2 group that holds processes can't have controlled children, so the place is beside this process's group, or further up.
    found = [own] if own == root else []
    while own != root and root in own.parents:
        own = own.parent
        found.append(own)
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _can_create(parent: Path) -> bool:
    probe = parent / f"{identity()}.probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return os.access(parent / "cgroup.procs", os.W_OK)


class Group:
    """One worker's control groups (one directory per hierarchy)."""

    def __init__(self, name: str, hierarchies: dict[str, Hierarchy]) -> None:
        self._hierarchies = hierarchies
        self._paths: dict[str, Path] = {}
        self._limit_bytes = self._hits = 0
        for controller, hierarchy in hierarchies.items():
            owner = hierarchy.parent / identity()
            owner.mkdir(exist_ok=True)
            if hierarchy.version == 2:
                (owner / "cgroup.subtree_control").write_text("".join(f"+{c} " for c, h in hierarchies.items() if h.version == 2))
            path = owner / name
            path.mkdir(exist_ok=True)
            self._paths[controller] = path

    @classmethod
    def of_process(cls, pid: int, memory_bytes: int) -> Group:
        """The groups that a process is in, made by somebody else, for reading ``evidence``.

        Args:
            pid: A process of this machine.
            memory_bytes: The memory limit of its group.

        Raises:
            OSError: No such process.
        """
        group = cls("", {})
        for controller, path in paths_of(pid).items():
            if controller in ("memory", "pids"):
                group._hierarchies[controller] = Hierarchy(controller=controller, version=1, parent=path.parent)
                group._paths[controller] = path
        if not group._paths:
            for controller in ("memory", "pids"):
                path = paths_of(pid)[""]
                group._hierarchies[controller] = Hierarchy(controller=controller, version=2, parent=path.parent)
                group._paths[controller] = path
        group._limit_bytes = memory_bytes
        return group

    @property
    def join_files(self) -> list[str]:
        """Files into which a process writes its id to join."""
        return sorted({str(path / "cgroup.procs") for path in self._paths.values()})

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Set the limits, on top of what the idle worker itself uses now."""
        if path := self._paths.get("memory"):
            if self._hierarchies["memory"].version == 1:
                used = int((path / "memory.usage_in_bytes").read_text())
                self._limit_bytes = used + memory_bytes
                (path / "memory.limit_in_bytes").write_text(str(self._limit_bytes))
                with contextlib.suppress(OSError):
                    (path / "memory.memsw.limit_in_bytes").write_text(str(self._limit_bytes))
                with contextlib.suppress(OSError):
                    (path / "memory.swappiness").write_text("0")
            else:
                used = int((path / "memory.current").read_text())
                (path / "memory.max").write_text(str(used + memory_bytes))
                with contextlib.suppress(OSError):
                    (path / "memory.swap.max").write_text("0")
        if path := self._paths.get("pids"):
            used = int((path / "pids.current").read_text())
            (path / "pids.max").write_text(str(used + processes))

    def evidence(self) -> Evidence:
        """Read the kernel's counters."""
        kills = hits = refused = 0
        if path := self._paths.get("memory"):
            if self._hierarchies["memory"].version == 1:
                kills = _counter(path / "memory.oom_control", "oom_kill")
                hits = self._hits_version_1(path)
            else:
                kills, hits = (_counter(path / "memory.events", key) for key in ("oom_kill", "oom"))
        if path := self._paths.get("pids"):
            refused = _counter(path / "pids.events", "max")
        return Evidence(oom_kills=kills, limit_hits=hits, refused_forks=refused)

    def _hits_version_1(self, path: Path) -> int:
        # By the high-water mark, since newer kernels no longer count failures (failcnt). It is set back once it was high.
        marks = [path / "memory.max_usage_in_bytes", path / "memory.memsw.max_usage_in_bytes"]
        if self._limit_bytes and max(map(_number, marks)) >= self._limit_bytes - _NEAR_BYTES:
            self._hits += 1
            for mark in marks:
                with contextlib.suppress(OSError):
                    mark.write_text("0")
        return self._hits

    def remove(self) -> None:
        """Remove the directories; their processes are gone or going."""
        for path in set(self._paths.values()):
            _remove_group(path)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        self._paths = {}


def _counter(path: Path, key: str) -> int:
    with open(path, encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _number(path: Path) -> int:
    """A file with one number; 0 where this kernel doesn't have it (swap that isn't counted)."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


def _remove_group(path: Path, wait_s: float = 1.0) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # the next start of strop tries again
            time.sleep(0.005)


def remove_own(hierarchies: dict[str, Hierarchy]) -> None:
    """Remove this process's (empty) directories; one that another provider still uses stays."""
    for hierarchy in hierarchies.values():
        with contextlib.suppress(OSError):
            (hierarchy.parent / identity()).rmdir()


def remove_stale(hierarchies: dict[str, Hierarchy]) -> None:
    """Remove the groups of dead owners; a process that is still in one is killed first."""
    for parent in {hierarchy.parent for hierarchy in hierarchies.values()}:
        for owner in parent.glob("strop-*"):
            if not is_dead(owner.name):
                continue
            for group in [*owner.glob("*/"), owner]:
                for pid in _words(group / "cgroup.procs"):
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
                _remove_group(group)
