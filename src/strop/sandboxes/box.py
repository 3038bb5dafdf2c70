"""What the boxes of every back end that keeps a layer share: file operations, snapshots, forks and the end.

A back end says where the current layer is (``_now``), what may interfere, and how a box is removed (``_remove``); nothing here knows a
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from strop.core.errors import SandboxError
from strop.ports import Egress, Sandbox
from strop.sandboxes.archive import pack
from strop.sandboxes.layer import Layer
from strop.sandboxes.live import LiveView
from strop.sandboxes.shell import ShellSession


class Starts(Protocol):
    """The part of a provider that its boxes need."""

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> Sandbox: ...

    def forget(self, name: str) -> None: ...


def check_command(argv: Sequence[str]) -> None:
    """Refuse what can't be a command.

    Raises:
        SandboxError: It is empty, or an item isn't a text without NUL.
    """
    if not argv or not all(isinstance(item, str) and "\0" not in item for item in argv):
        raise SandboxError(f"a command must be a non-empty list of strings without NUL, got {list(argv)!r:.200}")


class LayeredBox:
    """File operations of ``ports.Sandbox`` over a ``Layer`` at rest, or over a ``LiveView`` of a workspace that is mounted.

    Args:
        provider: What made the box.
        name: For messages.
        base: The base directory as it was given to ``start``.
        egress: As given to ``start``.
    """

    _layer: Layer
    _live: LiveView | None = None
    _shell: ShellSession | None = None

    def __init__(self, provider: Starts, name: str, base: str, egress: Egress | None) -> None:
        self._starter = provider
        self._name = name
        self._base = base
        self._egress = egress
        self._busy = asyncio.Lock()
        self._stopped = False
        self.entries_dropped = 0
        """Directory entries of finished runs that were not kept (see ``absorb``)."""

    def _now(self) -> Layer:
        if self._live is None:
            return self._layer
        try:
            return self._live.layer()
        except OSError as error:
            message = f"the files of box {self._name} change while they are read ({error}); processes of its shell are still at work"
            raise SandboxError(message, retryable=True) from error

    def read(self, path: str) -> bytes:
        """Content of a regular file; see ``ports.Sandbox.read``."""
        self._check_open()
        return self._now().read(path)

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or delete a file; see ``ports.Sandbox.write``.

        Raises:
            SandboxError: A command is running in this box, or it is stopped.
            OSError: As ``Layer.write`` and ``Layer.delete``.
        """
        self._check_open()
        self._check_idle("written")
        if self._live is not None:
            self._now()
            self._live.write(path, content)
        elif content is None:
            self._layer.delete(path)
        else:
            self._layer.write(path, content)

    def list_files(self) -> list[str]:
        """Sorted paths of regular files."""
        self._check_open()
        return self._now().list_files()

    def changes(self) -> dict[str, bytes | None]:
        """Everything that differs from the base tree."""
        self._check_open()
        return self._now().changes()

    async def snapshot(self) -> bytes:
        """The box's file system as bytes; see ``ports.Sandbox.snapshot``."""
        self._check_open()
        self._check_idle("read for a snapshot")
        return pack(self._now())

    async def fork(self) -> Sandbox:
        """A new box with the same content; see ``ports.Sandbox.fork``."""
        return await self._starter.start(self._base, snapshot=await self.snapshot(), egress=self._egress)

    async def stop(self) -> None:
        """Remove the box, after a command that still runs; see ``ports.Sandbox.stop``."""
        if self._shell is not None:
            await self._shell.close()
        async with self._busy:
            if self._stopped:
                return
            self._stopped = True
            try:
                await self._remove()
            finally:
                self._starter.forget(self._name)

    async def _remove(self) -> None:
        """Remove everything that the back end keeps of this box; called once, while nothing runs in it."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._stopped:
            raise SandboxError(f"box {self._name} is stopped")

    def _check_idle(self, what: str) -> None:
        if self._busy.locked() or (self._shell is not None and self._shell.is_busy):
            raise SandboxError(f"the workspace can't be {what} while a command runs in the box", retryable=True)

    def _check_no_shell(self) -> None:
        self._check_open()
        if self._shell is not None:
            raise SandboxError(f"box {self._name} has an open shell already; close it first")
