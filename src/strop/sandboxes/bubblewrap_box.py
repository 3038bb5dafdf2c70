"""A box of the bubblewrap back end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import SandboxError
from strop.ports import Egress, ExecResult
from strop.sandboxes.absorb import absorb
from strop.sandboxes.archive import pack, unpack
from strop.sandboxes.box import LayeredBox
from strop.sandboxes.kept import KeptRun, KeptShell
from strop.sandboxes.layer import Layer
from strop.sandboxes.live import LiveView
from strop.sandboxes.output import CappedText
from strop.sandboxes.shell import SHELL_ARGV, ShellSession
from strop.sandboxes.verdict import cause_of_death, judge

if TYPE_CHECKING:
    from strop.sandboxes.bubblewrap import BubblewrapProvider


class BubblewrapSandbox(LayeredBox):
    """One box; see ``ports.Sandbox``. Commands of one box run one after the other, except beside a shell."""

    def __init__(self, provider: BubblewrapProvider, name: str, layer: Layer, base: str, egress: Egress | None) -> None:
        super().__init__(provider, name, base, egress)
        self._provider = provider
        self._layer = layer
        self._kept: KeptRun | None = None
        self._looks: dict[str, Any] = {}

    def disguise(self, looks: Mapping[str, Any]) -> None:
        """Make the commands to come see another ``hostname``, ``path``, ``variables`` or ``uptime_s``; see ``domain``.

        They come true with the next command, or with the next shell; an uptime isn't seen in shells.
        """
        self._looks = dict(looks)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command in the box; see ``ports.Sandbox.exec``."""
        return await self._run("exec", argv, timeout_s=timeout_s, stdin=stdin)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run Python in the box; see ``ports.Sandbox.run_python``."""
        return await self._run("python", argv, timeout_s=timeout_s, stdin=b"")

    async def _run(self, kind: str, argv: Sequence[str], *, timeout_s: float, stdin: bytes) -> ExecResult:
        async with self._busy:
            self._check_open()
            if self._kept is not None:
                return await self._run_kept(self._kept, kind, argv, timeout_s=timeout_s, stdin=stdin)
            layer, provider = self._layer, self._provider
            request = self._request(kind, argv)
            output = CappedText()
            report = await provider.lease_and_run(
                request, stdin=stdin, stdout=output, stderr=None, timeout_s=timeout_s, egress=self._egress
            )
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
            return ExecResult(
                exit_code=exit_code, output=output.text(), duration_s=report.duration_s, killed_by=killed_by, cpu_s=report.cpu_s
            )

    def _request(self, kind: str, argv: Sequence[str]) -> dict[str, Any]:
        layers = [str(self._layer.directory), self._layer.base.path]
        free = self._layer.limit_bytes - self._layer.used_bytes
        below = len(self._layer.index) + len(self._layer.base.entries)
        cwd = str(self._looks.get("path") or "/workspace")
        request = self._provider.request(kind, argv, layers, writable=True, extra={}, cwd=cwd, free_bytes=free, below=below)
        return request | {"looks": self._looks} if self._looks else request

    async def _run_kept(self, kept: KeptRun, kind: str, argv: Sequence[str], *, timeout_s: float, stdin: bytes) -> ExecResult:
        self._request(kind, argv)  # refuses what can't be a command
        output = CappedText()
        try:
            report = await kept.run(kind, argv, stdin=stdin, stdout=output, timeout_s=timeout_s)
        finally:
            if self._live is not None:
                self._live.changed()
        exit_code, killed_by = judge(report)
        return ExecResult(exit_code=exit_code, output=output.text(), duration_s=report.duration_s, killed_by=killed_by)

    # ------------------------------------------------------------------------------------------------ the shell

    async def open_shell(self) -> ShellSession:
        """Start a persistent shell; see ``ports.Sandbox.open_shell``. It takes a worker of its own, beside those of the pool."""
        async with self._busy:
            self._check_no_shell()
            request = self._request("keep", ["keep"])
            kept = await KeptRun.start(await self._provider.extra_worker(self._egress), request)
            try:
                stream = KeptShell(kept, SHELL_ARGV)
            except BaseException:
                await kept.close()
                for fd in (kept.upper, kept.merged):
                    os.close(fd)
                raise
            frozen, base, limit = pack(self._layer), self._layer.base, self._layer.limit_bytes

            def start(place: Path) -> Layer:
                layer = Layer(base, place, limit)
                unpack(layer, frozen)
                return layer

            copies = Path(f"{self._layer.directory}.live")
            live = self._live = LiveView(start, copies, kept.upper, kept.merged)
            self._kept = kept

            async def over() -> None:
                async with self._busy:  # a command beside the shell ends by itself first
                    await kept.close()
                    await self._shell_is_over(live, kept, request, copies)

            self._shell = ShellSession(
                stream, lambda timed_out: "" if timed_out else cause_of_death(*kept.since_last()), on_command=live.changed, on_end=over
            )
            return self._shell

    async def _shell_is_over(self, live: LiveView, kept: KeptRun, request: dict[str, object], copies: Path) -> None:
        """Everything in the kept box is dead: what it changed goes into the box's own layer."""
        try:
            self.entries_dropped += absorb(self._layer, kept.upper)
        except OSError as error:
            raise SandboxError(f"changes of a shell can't be kept: {error}") from error
        finally:
            live.close()
            shutil.rmtree(copies, ignore_errors=True)
            self._provider.drop_disk_delta(request)
            self._live = self._kept = self._shell = None

    async def _remove(self) -> None:
        self._layer.close()
        shutil.rmtree(self._layer.directory, ignore_errors=True)
