"""What goes into a box and what comes out of it: changes of a workspace as an overlayfs layer, and the record of a finished run."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class IsolatedRun(Protocol):
    """What a grading box leaves behind; see ``strop.sandboxes.IsolatedResult``."""

    @property
    def exit_code(self) -> int | None:
        """Status, or ``None`` if a signal ended it."""
        ...

    @property
    def stdout(self) -> bytes:
        """Raw bytes, at most ``max_stdout_bytes``."""
        ...

    @property
    def stdout_truncated(self) -> bool:
        """Whether there was more."""
        ...

    @property
    def stderr(self) -> str:
        """Text, capped and decoded with replacement."""
        ...

    @property
    def duration_s(self) -> float:
        """Wall seconds."""
        ...

    @property
    def killed_by(self) -> str:
        """As in ``ports.ExecResult``: from kernel evidence only."""
        ...

    @property
    def cpu_s(self) -> float:
        """As in ``ports.ExecResult``."""
        ...


class BoxRunner(Protocol):
    """Runs one Python program in a fresh box over read-only layers; see ``strop.sandboxes.BubblewrapProvider.run_isolated``."""

    async def run_isolated(
        self,
        layers: Sequence[str],
        argv: Sequence[str],
        *,
        stdin: bytes,
        timeout_s: float,
        max_stdout_bytes: int,
        extra_ro: Mapping[str, str] | None = None,
        writable: bool = False,
    ) -> IsolatedRun:
        """Run ``python argv...`` over host directories, topmost first.

        Args:
            layers: What makes the workspace.
            argv: Arguments of Python.
            stdin: What the program reads.
            timeout_s: Wall seconds.
            max_stdout_bytes: The rest of stdout is thrown away.
            extra_ro: Path in the box to a host file or directory, mounted read only.
            writable: Writes go to memory and are thrown away; otherwise there are none.

        Raises:
            SandboxError: The box, not the program, failed.
        """
        ...


def write_layer(parent: Path, changes: Mapping[str, bytes | None]) -> Path:
    """Write changes as an overlayfs layer and return its directory; a deletion is a whiteout.

    Raises:
        OSError: The disk is full, or the like.
    """
    layer = Path(tempfile.mkdtemp(dir=parent))
    try:
        layer.chmod(0o755)
        for path, content in changes.items():
            target = layer / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(0, 0))
            else:
                target.write_bytes(content)
    except OSError:
        shutil.rmtree(layer, ignore_errors=True)
        raise
    return layer
