"""A container's control groups as the host sees them: the kernel's counters, and killing what a command left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from strop.core.errors import SandboxError
from strop.sandboxes.cgroups import Evidence, Group, paths_of

_FREEZE_AFTER_ROUNDS = 3
_KILL_TIMEOUT_S = 20.0
_SHELL = "strop-shell"


class ContainerGroup:
    """Groups of one container. A shell's processes live in a child group, so that they can be told from a command's.

    Args:
        init: Process id of the container's first process on this host.
        memory_bytes: The container's memory limit.

    Raises:
        SandboxError: The process isn't on this machine, or its groups can't be used.
    """

    def __init__(self, init: int, memory_bytes: int) -> None:
        self.init = init
        try:
            self._group = Group.of_process(init, memory_bytes)
            paths = paths_of(init)
            self._place = paths.get("pids") or paths[""]
            self._freezer = paths.get("freezer", self._place)
            os.stat(self._place / "cgroup.procs")
        except (OSError, KeyError) as error:
            raise SandboxError(
                f"the control groups of a container can't be used ({error}); is the docker daemon on this machine?"
            ) from error

    def evidence(self) -> Evidence:
        """Read the kernel's counters."""
        try:
            return self._group.evidence()
        except OSError as error:
            raise SandboxError(f"a container's control groups are gone: {error}", retryable=True) from error

    def adopt_shell(self, pid: int) -> None:
        """Move a shell, which has started nothing yet, into the group of its own."""
        place = self._place / _SHELL
        place.mkdir(exist_ok=True)
        (place / "cgroup.procs").write_text(str(pid))

    async def kill_shell(self) -> None:
        """Kill the shell and everything that it started, and wait until all are dead."""
        await self._kill(self._place / _SHELL)
        with contextlib.suppress(OSError):
            (self._place / _SHELL).rmdir()

    async def kill_rest(self) -> None:
        """Kill everything but the first process and the shell's, and wait until all are dead.

        Raises:
            SandboxError: They don't die.
        """
        await self._kill(self._place)

    async def _kill(self, place: Path) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        rounds = 0
        while pids := self._members(place):
            rounds += 1
            if time.monotonic() > deadline:
                raise SandboxError(f"{len(pids)} processes of a container can't be killed within {_KILL_TIMEOUT_S} s")
            # Something that forks faster than it is killed has to stand still for it.
            frozen = rounds > _FREEZE_AFTER_ROUNDS and self._freeze(True)
            try:
                for pid in self._members(place) if frozen else pids:
                    self._kill_one(pid, place)
            finally:
                if frozen:
                    self._freeze(False)
            await asyncio.sleep(0.001 if rounds < 10 else 0.02)

    def _members(self, place: Path) -> list[int]:
        try:
            return [int(word) for word in (place / "cgroup.procs").read_text().split() if int(word) != self.init]
        except OSError:
            return []

    def _kill_one(self, pid: int, place: Path) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                if pid in self._members(place):  # the number belongs to the same process as the descriptor
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)

    def _freeze(self, on: bool) -> bool:
        for name, values in (("cgroup.freeze", ("0", "1")), ("freezer.state", ("THAWED", "FROZEN"))):
            with contextlib.suppress(OSError):
                if (self._freezer / name).exists():
                    (self._freezer / name).write_text(values[on])
                    return True
        return False
