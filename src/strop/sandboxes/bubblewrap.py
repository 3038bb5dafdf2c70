"""The embedded sandbox: bubblewrap, overlayfs and control groups around a warm Python that forks per run.

State: a directory of this process (mode 0700) with one layer per box, and a pool of warm workers. Every run gets fresh namespaces,
a fresh overlay of
base, layer and a throw-away upper directory, and is dead before the call returns; its changes are then moved into the box's layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import Egress, SandboxCapabilities
from strop.sandboxes import cgroups, ownership
from strop.sandboxes.archive import unpack
from strop.sandboxes.box import check_command
from strop.sandboxes.bubblewrap_box import BubblewrapSandbox
from strop.sandboxes.bytecode import layer_of
from strop.sandboxes.egress import Networks
from strop.sandboxes.egress.gateway import EgressEvent, Gateway
from strop.sandboxes.host import probe_kernel
from strop.sandboxes.layer import BaseTree, Layer
from strop.sandboxes.outer import prepare
from strop.sandboxes.output import CappedBytes, CappedText
from strop.sandboxes.pool import WorkerPool
from strop.sandboxes.streams import Sink
from strop.sandboxes.verdict import judge
from strop.sandboxes.worker import RunReport, Worker

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
        cpu_s: As in ``ExecResult``.
    """

    exit_code: int | None
    stdout: bytes
    stdout_truncated: bool
    stderr: str
    duration_s: float
    killed_by: str = ""
    cpu_s: float = 0.0


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
        self._next_worker = 0
        self._networks = Networks()
        self._pool = WorkerPool([self._new_worker() for _ in range(self.config.workers)])
        self._network_pools: dict[Egress, WorkerPool] = {}
        self._extra: list[Worker] = []
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
            snapshots=True,
            missing=missing | self._networks.missing,
            shells=True,
            egress=self._networks.modes,
        )

    def _new_worker(self, gateway: Gateway | None = None) -> Worker:
        self._next_worker += 1
        return Worker(
            f"w{self._root.name}-{self._next_worker}",
            self._root,
            self._hierarchies,
            memory_bytes=self.config.memory_mb << 20,
            processes=self.config.processes,
            gateway=gateway,
        )

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> BubblewrapSandbox:
        """Start a box over the directory ``base``; see ``ports.SandboxProvider.start``.

        Raises:
            SandboxError: ``base`` isn't a readable directory, ``snapshot`` isn't one or doesn't fit, or this machine can't give ``egress``.
        """
        egress = self._networks.check(egress)
        tree = self._base(base)
        self._next_box += 1
        name = f"b{self._next_box}"
        directory = self._root / name
        directory.mkdir(mode=0o700)
        layer = Layer(tree, directory, self.config.disk_mb << 20)
        if snapshot is not None:
            try:
                unpack(layer, snapshot)
            except BaseException:
                layer.close()
                ownership.remove_tree(directory)
                raise
        box = BubblewrapSandbox(self, name, layer, base, egress)
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
            cpu_s=report.cpu_s,
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
        below: int = 0,
    ) -> dict[str, Any]:
        """Fields of a run request (see ``warm/isolate.py``); a run must be able to delete the ``below`` entries of the layers."""
        check_command(argv)
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
            "inodes": INODES + below,
            "open_files": OPEN_FILES,
            "nproc": 0 if "pids" in self._hierarchies else self.config.processes + 3,
            "address_space": 0 if "memory" in self._hierarchies else self.config.memory_mb << 20,
        }

    async def lease_and_run(
        self,
        request: Mapping[str, Any],
        *,
        stdin: bytes,
        stdout: Sink,
        stderr: Sink | None,
        timeout_s: float,
        egress: Egress | None = None,
    ) -> RunReport:
        """Run on the next free worker; those with a way out are workers of their own."""
        pool = self._pool if egress is None else await self._network_pool(egress)
        async with pool.lease() as worker:
            return await worker.run(request, stdin=stdin, stdout=stdout, stderr=stderr, timeout_s=timeout_s)

    async def _network_pool(self, egress: Egress) -> WorkerPool:
        gateway = await self._networks.gateway(egress)
        if egress not in self._network_pools:
            self._network_pools[egress] = WorkerPool([self._new_worker(gateway) for _ in range(self.config.workers)])
        return self._network_pools[egress]

    async def extra_worker(self, egress: Egress | None) -> Worker:
        """A worker that isn't in a pool, for a box that stays up; killed by ``close`` at the latest."""
        worker = self._new_worker(None if egress is None else await self._networks.gateway(egress))
        self._extra = [*(worker for worker in self._extra if worker.is_running), worker]
        return worker

    def egress_events(self) -> list[EgressEvent]:
        """The last connections that boxes tried to make, and why they were refused."""
        return self._networks.events()

    def drop_disk_delta(self, request: Mapping[str, Any]) -> None:
        """Remove a run's directory for changes if it was on disk."""
        if request["delta"]:
            ownership.remove_tree(self._root / "delta" / request["delta"])

    def forget(self, name: str) -> None:
        """A box has stopped."""
        self._boxes.pop(name, None)

    async def close(self) -> None:
        """Stop every box and worker and remove all files. Idempotent."""
        for pool in (self._pool, *self._network_pools.values()):
            await pool.close()
        for box in list(self._boxes.values()):
            await box.stop()
        for worker in self._extra:
            await worker.kill()
        await self._networks.close()
        for tree in self._bases.values():
            os.close(tree.fd)
        self._bases.clear()
        ownership.release_root(self._root)
        cgroups.remove_own(self._hierarchies)


def _extra_name(target: str) -> str:
    name = target.removeprefix("/mnt/")
    if name == target or not name or "/" in name or name in (".", ".."):
        raise SandboxError(f"extra mount {target!r} must be /mnt/NAME")
    return name
