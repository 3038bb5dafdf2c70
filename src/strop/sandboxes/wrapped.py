"""A box around a box: what a wrapper doesn't change goes to the real one."""

from __future__ import annotations

from strop.ports import Sandbox


class WrappedBox:
    """File operations, snapshots and the end of ``ports.Sandbox``, passed on.

    Args:
        box: The real one.
    """

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def read(self, path: str) -> bytes:
        """Content of a regular file."""
        return self._box.read(path)

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or delete a file."""
        self._box.write(path, content)

    def list_files(self) -> list[str]:
        """Sorted paths of regular files."""
        return self._box.list_files()

    def changes(self) -> dict[str, bytes | None]:
        """Everything that differs from the base tree."""
        return self._box.changes()

    async def snapshot(self) -> bytes:
        """The box's file system as bytes."""
        return await self._box.snapshot()

    async def stop(self) -> None:
        """Stop the real box."""
        await self._box.stop()
