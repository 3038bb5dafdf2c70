"""A box of the docker back end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.ports import Egress, ExecResult
from strop.sandboxes.box import LayeredBox, check_command
from strop.sandboxes.docker.container import READY, Container
from strop.sandboxes.docker.mount import Workspace
from strop.sandboxes.docker.stream import STDERR, STDOUT, Attached
from strop.sandboxes.live import LiveView
from strop.sandboxes.output import CappedText
from strop.sandboxes.ownership import remove_tree
from strop.sandboxes.shell import SHELL_ARGV, ShellSession
from strop.sandboxes.verdict import cause_of_death, judge

if TYPE_CHECKING:
    from strop.sandboxes.docker.provider import DockerProvider

_PYTHON = ("/bin/sh", "-c", 'exec "$(command -v python3)" "$@"', "sh")  # by its full path, as it names itself then


class DockerSandbox(LayeredBox):
    """One box; see ``ports.Sandbox``. Its container and mounted workspace live from ``start`` to ``stop``, and so does its /tmp."""

    def __init__(
        self,
        provider: DockerProvider,
        name: str,
        base: str,
        egress: Egress | None,
        container: Container,
        workspace: Workspace,
        view: LiveView,
    ) -> None:
        super().__init__(provider, name, base, egress)
        self._provider = provider
        self._container = container
        self._workspace = workspace
        self._live = view

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command in the box; see ``ports.Sandbox.exec``."""
        check_command(argv)
        async with self._busy, self._provider.slot():
            self._check_open()
            output = CappedText()
            try:
                report = await self._container.run(argv, stdin=stdin, stdout=output, timeout_s=timeout_s)
            finally:
                self._view.changed()
            exit_code, killed_by = judge(report)
            return ExecResult(exit_code=exit_code, output=output.text(), duration_s=report.duration_s, killed_by=killed_by)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run the image's Python in the box; see ``ports.Sandbox.run_python``. There is no warm runner here."""
        return await self.exec([*_PYTHON, *argv], timeout_s=timeout_s)

    @property
    def _view(self) -> LiveView:
        assert self._live is not None, "a box of this back end is always mounted"
        return self._live

    async def open_shell(self) -> ShellSession:
        """Start a persistent shell; see ``ports.Sandbox.open_shell``."""
        async with self._busy:
            self._check_no_shell()
            group = self._container.group
            exec_id, stream = await self._container.attach_exec(SHELL_ARGV, stdin=True)
            try:
                # The shell's first process waits for a line that hasn't been sent: all that it will ever start is in the group.
                for pid in await self._container.family_of(exec_id):
                    group.adopt_shell(pid)
            except BaseException:
                stream.close()
                await group.kill_rest()
                raise
            readings = [group.evidence()]

            def cause(timed_out: bool) -> str:
                readings.append(group.evidence())
                return "" if timed_out else cause_of_death(*readings[-2:])

            async def over() -> None:
                self._shell = None
                self._view.changed()

            self._shell = ShellSession(_DockerShell(self._container, stream), cause, on_command=self._view.changed, on_end=over)
            return self._shell

    async def _remove(self) -> None:
        self._view.close()
        try:
            await self._container.remove()
        finally:
            self._workspace.unmount()
            remove_tree(self._workspace.root)


class _DockerShell:
    """The stream of a shell in a container (see ``shell.ShellStream``)."""

    def __init__(self, container: Container, stream: Attached) -> None:
        self._container = container
        self._stream = stream

    async def write(self, data: bytes) -> None:
        """Feed the shell's stdin."""
        with contextlib.suppress(ConnectionError):
            await self._stream.send(data)

    async def read(self) -> bytes:
        """Next piece of output."""
        while True:
            source, data = await self._stream.frame()
            if source == STDERR and data != READY:  # the shell's status: it is gone, and what it left may still hold its output
                await self._container.group.kill_shell()
            elif source == 0 or (source == STDOUT and data):
                return data

    async def kill(self) -> None:
        """Kill the shell and everything that it started."""
        await self._container.group.kill_shell()
        self._stream.close()
