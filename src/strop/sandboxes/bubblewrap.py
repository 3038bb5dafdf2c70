"""The embedded sandbox: bubblewrap, overlayfs and control groups around a warm Python that forks per run.

State: a directory of this process (mode 0700) with one layer per box, and a pool of warm workers. Every run gets fresh namespaces,
a fresh overlay of
base, layer and a throw-away upper directory, and is dead before the call returns; its changes are then moved into the box's layer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import ExecResult, SandboxCapabilities
from strop.sandboxes import cgroups, ownership
from strop.sandboxes.absorb import absorb
from strop.sandboxes.bytecode import layer_of
from strop.sandboxes.host import probe_kernel
from strop.sandboxes.layer import BaseTree, Layer
from strop.sandboxes.outer import prepare
from strop.sandboxes.output import CappedBytes, CappedText
from strop.sandboxes.pool import WorkerPool
from strop.sandboxes.worker import RunReport, Sink, Worker

OPEN_FILES = 256
INODES = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolatedResult:
    """A finished run of ``run_isolated``.

    Attributes:
        exit_code: Status, or ``None`` if a signal ended it.
        stdout: Raw bytes of descriptor 1, at most ``max_stdout_bytes``.
        stdout_truncated: Whether there was more.
        stderr: Descriptor 2, capped (first and last 5,000 characters) and decoded with replacement.
        duration_s: Wall seconds from ready to dead.
        killed_by: As in ``ExecResult``.
    """

    exit_code: int | None
    stdout: bytes
    stdout_truncated: bool
    stderr: str
    duration_s: float
    killed_by: str = ""


class BubblewrapProvider:
    """Starts boxes; see ``ports.SandboxProvider``.

    Args:
        config: Limits and the number of workers.
        parent_dir: Where the provider's directory is made; default: a directory of this user in the system's temporary directory.

    Raises:
        SandboxError: bubblewrap is missing, or the kernel doesn't let this user make namespaces or overlays.
    """

    def __init__(self, config: SandboxConfig | None = None, *, parent_dir: str | None = None) -> None:
        self.config = config or SandboxConfig()
        self._root = ownership.create_root(parent_dir)
        try:
            prepare(self._root)
            probe = probe_kernel(self._root)
            if problem := probe.get("start") or probe.get("overlay"):
                raise SandboxError(
                    f"this machine can't run the bubblewrap sandbox: {problem}; run `strop doctor` for the command that fixes it"
                )
        except BaseException:
            ownership.release_root(self._root)
            raise
        self._probe = probe
        self._hierarchies = cgroups.find_hierarchies()
        cgroups.remove_stale(self._hierarchies)
        self._bases: dict[str, BaseTree] = {}
        self._boxes: dict[str, BubblewrapSandbox] = {}
        self._next_box = 0
        workers = [
            Worker(
                f"w{self._root.name}-{number}",
                self._root,
                self._hierarchies,
                memory_bytes=self.config.memory_mb << 20,
                processes=self.config.processes,
            )
            for number in range(self.config.workers)
        ]
        self._pool = WorkerPool(workers)
        self._capabilities = self._find_capabilities()

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What works on this machine, and why the rest doesn't."""
        return self._capabilities

    @property
    def directory(self) -> Path:
        """This provider's own directory; gone after ``close``."""
        return self._root

    def _find_capabilities(self) -> SandboxCapabilities:
        missing = {}
        if "memory" not in self._hierarchies:
            missing["memory_limit"] = "no writable memory control group: memory is limited per process only, not per box"
            missing["kernel_evidence"] = (
                "no writable memory control group: a run killed for memory can't be told from one that killed itself"
            )
        if "pids" not in self._hierarchies:
            missing["process_limit"] = (
                "no writable pids control group: processes are limited per worker by RLIMIT_NPROC, which root ignores"
            )
        if self._probe["tmpfs_xattr"]:
            missing["disk_limit"] = "tmpfs has no user attributes (kernel before 6.6): a box's disk use is limited per file only"
        if self._probe["filter"]:
            missing["call_filter"] = f"no system call filter: {self._probe['filter']}"
        return SandboxCapabilities(
            network_isolation=True,
            memory_limit="memory" in self._hierarchies,
            process_limit="pids" in self._hierarchies,
            kernel_evidence="memory" in self._hierarchies,
            warm_runner=True,
            snapshots=False,
            missing=missing,
        )

    async def start(self, base: str) -> BubblewrapSandbox:
        """Start a box over the directory ``base``.

        Raises:
            SandboxError: ``base`` isn't a readable directory.
        """
        tree = self._base(base)
        self._next_box += 1
        name = f"b{self._next_box}"
        directory = self._root / name
        directory.mkdir(mode=0o700)
        box = BubblewrapSandbox(self, name, Layer(tree, directory, self.config.disk_mb << 20))
        self._boxes[name] = box
        return box

    def _base(self, base: str) -> BaseTree:
        tree = self._bases.get(base)
        if tree is None:
            try:
                tree = BaseTree.scan(os.path.realpath(base))
            except OSError as error:
                raise SandboxError(f"base directory {base!r} can't be used: {error.strerror}") from error
            self._bases[base] = tree
        return tree

    async def warm(self) -> None:
        """Start all workers now instead of with the first runs."""
        await self._pool.warm()

    async def run_isolated(
        self,
        layers: Sequence[str],
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        extra_ro: Mapping[str, str] | None = None,
        cwd: str = "/workspace",
        max_stdout_bytes: int = 1 << 20,
        writable: bool = False,
    ) -> IsolatedResult:
        """Run Python over given layers in a place that no box ever touched and nothing is kept of.

        Args:
            layers: Host directories that make /workspace, topmost first; read only.
            argv: As for ``run_python``.
            stdin: What the program reads.
            timeout_s: Seconds from ready to kill.
            extra_ro: Box path ``/mnt/NAME`` -> host file or directory, mounted read only.
            cwd: Working directory in the box.
            max_stdout_bytes: Rest of stdout is read and thrown away.
            writable: False: /workspace is read only. True: writes go to memory and are thrown away.

        Raises:
            SandboxError: The machinery failed; nothing that the program does ends here.
        """
        extra = {_extra_name(target): os.path.realpath(source) for target, source in (extra_ro or {}).items()}
        request = self.request("python", argv, [os.path.realpath(layer) for layer in layers], writable=writable, extra=extra, cwd=cwd)
        out, err = CappedBytes(max_stdout_bytes), CappedText()
        report = await self.lease_and_run(request, stdin=stdin, stdout=out, stderr=err, timeout_s=timeout_s)
        if report.delta_fd >= 0:
            os.close(report.delta_fd)
        self.drop_disk_delta(request)
        exit_code, killed_by = judge(report)
        return IsolatedResult(
            exit_code=exit_code,
            stdout=out.value(),
            stdout_truncated=out.truncated,
            stderr=err.text(),
            duration_s=report.duration_s,
            killed_by=killed_by,
        )

    # ------------------------------------------------------------------------------------------------ for the boxes

    def request(
        self,
        kind: str,
        argv: Sequence[str],
        layers: list[str],
        *,
        writable: bool,
        extra: Mapping[str, str],
        cwd: str,
        free_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Fields of a run request (see ``warm/isolate.py``)."""
        if not argv or not all(isinstance(item, str) and "\0" not in item for item in argv):
            raise SandboxError(f"a command must be a non-empty list of strings without NUL, got {list(argv)!r:.200}")
        disk = self.config.disk_mb << 20 if free_bytes is None else max(free_bytes, 1 << 16)
        delta = ""
        if writable and self._probe["tmpfs_xattr"]:
            self._next_box += 1
            delta = f"d{self._next_box}"
            for name in ("upper", "work"):
                (self._root / "delta" / delta / name).mkdir(parents=True)
        compiled = layer_of(layers[-1])
        return {
            "kind_of_run": kind,
            "argv": list(argv),
            "layers": [*layers, compiled] if compiled else layers,
            "writable": writable,
            "extra": dict(extra),
            "cwd": cwd,
            "delta": delta,
            "disk_bytes": disk,
            "inodes": INODES,
            "open_files": OPEN_FILES,
            "nproc": 0 if "pids" in self._hierarchies else self.config.processes + 3,
            "address_space": 0 if "memory" in self._hierarchies else self.config.memory_mb << 20,
        }

    async def lease_and_run(
        self, request: Mapping[str, Any], *, stdin: bytes, stdout: Sink, stderr: Sink | None, timeout_s: float
    ) -> RunReport:
        """Run on the next free worker."""
        async with self._pool.lease() as worker:
            return await worker.run(request, stdin=stdin, stdout=stdout, stderr=stderr, timeout_s=timeout_s)

    def drop_disk_delta(self, request: Mapping[str, Any]) -> None:
        """Remove a run's directory for changes if it was on disk."""
        if request["delta"]:
            ownership.remove_tree(self._root / "delta" / request["delta"])

    def forget(self, name: str) -> None:
        """A box has stopped."""
        self._boxes.pop(name, None)

    async def close(self) -> None:
        """Stop every box and worker and remove all files. Idempotent."""
        await self._pool.close()
        for box in list(self._boxes.values()):
            await box.stop()
        for tree in self._bases.values():
            os.close(tree.fd)
        self._bases.clear()
        ownership.release_root(self._root)
        cgroups.remove_own(self._hierarchies)


class BubblewrapSandbox:
    """One box; see ``ports.Sandbox``. Commands of one box run one after the other."""

    def __init__(self, provider: BubblewrapProvider, name: str, layer: Layer) -> None:
        self._provider = provider
        self._name = name
        self._layer = layer
        self._busy = asyncio.Lock()
        self._stopped = False
        self.entries_dropped = 0
        """Directory entries of finished runs that were not kept (see ``absorb``)."""

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command in the box; see ``ports.Sandbox.exec``."""
        return await self._run("exec", argv, timeout_s=timeout_s, stdin=stdin)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run Python in the box; see ``ports.Sandbox.run_python``."""
        return await self._run("python", argv, timeout_s=timeout_s, stdin=b"")

    async def _run(self, kind: str, argv: Sequence[str], *, timeout_s: float, stdin: bytes) -> ExecResult:
        async with self._busy:
            self._check_open()
            layer, provider = self._layer, self._provider
            layers = [str(layer.directory), layer.base.path]
            free = layer.limit_bytes - layer.used_bytes
            request = provider.request(kind, argv, layers, writable=True, extra={}, cwd="/workspace", free_bytes=free)
            output = CappedText()
            report = await provider.lease_and_run(request, stdin=stdin, stdout=output, stderr=None, timeout_s=timeout_s)
            try:
                if report.delta_fd >= 0:
                    self.entries_dropped += absorb(layer, report.delta_fd)
            except OSError as error:
                raise SandboxError(f"changes of a run can't be kept: {error}") from error
            finally:
                if report.delta_fd >= 0:
                    os.close(report.delta_fd)
                provider.drop_disk_delta(request)
            exit_code, killed_by = judge(report)
            return ExecResult(exit_code=exit_code, output=output.text(), duration_s=report.duration_s, killed_by=killed_by)

    def read(self, path: str) -> bytes:
        """Content of a regular file; see ``ports.Sandbox.read``."""
        self._check_open()
        return self._layer.read(path)

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or delete a file; see ``ports.Sandbox.write``.

        Raises:
            SandboxError: A command is running in this box, or it is stopped.
            OSError: As ``Layer.write`` and ``Layer.delete``.
        """
        self._check_open()
        if self._busy.locked():
            raise SandboxError("the workspace can't be written while a command runs in the box", retryable=True)
        if content is None:
            self._layer.delete(path)
        else:
            self._layer.write(path, content)

    def list_files(self) -> list[str]:
        """Sorted paths of regular files."""
        self._check_open()
        return self._layer.list_files()

    def changes(self) -> dict[str, bytes | None]:
        """Everything that differs from the base tree."""
        self._check_open()
        return self._layer.changes()

    def _check_open(self) -> None:
        if self._stopped:
            raise SandboxError(f"box {self._name} is stopped")

    async def stop(self) -> None:
        """Remove the layer, after a command that still runs. Idempotent."""
        async with self._busy:
            if self._stopped:
                return
            self._stopped = True
            self._layer.close()
            shutil.rmtree(self._layer.directory, ignore_errors=True)
            self._provider.forget(self._name)


def _extra_name(target: str) -> str:
    name = target.removeprefix("/mnt/")
    if name == target or not name or "/" in name or name in (".", ".."):
        raise SandboxError(f"extra mount {target!r} must be /mnt/NAME")
    return name


def judge(report: RunReport) -> tuple[int | None, str]:
    """Exit code and cause of death, from the kernel's evidence only.

    Raises:
        SandboxError: The machine ran out of memory, or the run's first process vanished without a cause. Neither is the agent's doing.
    """
    if report.is_host_out_of_memory:
        raise SandboxError(
            "this machine ran out of memory and killed a process of a run that was within its own limit; lower sandbox.workers or "
            "engine.max_sessions, or free memory",
            retryable=True,
        )
    oom = report.is_out_of_memory
    refused = report.after.refused_forks > report.before.refused_forks
    if report.timed_out:
        return None, "timeout"
    if report.status is None:
        if oom:
            return None, "memory"
        raise SandboxError("a run's first process vanished and the kernel counted no cause", retryable=True)
    code = os.waitstatus_to_exitcode(report.status)
    # A run that ends well although a child of its own was killed or refused has coped with it.
    killed_by = "" if code == 0 else "memory" if oom else "processes" if refused else ""
    return (None if code < 0 else code), killed_by
