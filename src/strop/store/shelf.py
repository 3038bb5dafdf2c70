"""The checkpoints of one run: named ones stay, rolling ones make room for newer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from strop.core.errors import CheckpointError
from strop.store import checkpoint as files


class Shelf:
    """Directories below ``checkpoints/``; rolling ones below ``checkpoints/steps/``.

    Args:
        directory: The ``checkpoints`` directory of a run.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rolling = directory / "steps"

    def path(self, name: str, *, rolling: bool = False) -> Path:
        """Return where a checkpoint is or would be.

        Raises:
            CheckpointError: A name that isn't a plain file name.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or (name == "steps" and not rolling):
            raise CheckpointError(f"checkpoint name {name!r} must be letters, digits, dots, dashes and underscores, and not 'steps'")
        return (self._rolling if rolling else self.directory) / name

    def find(self, name: str) -> Path:
        """Return the directory of a named or rolling checkpoint.

        Raises:
            CheckpointError: No such checkpoint; lists those that exist.
        """
        for rolling in (False, True):
            path = self.path(name, rolling=rolling)
            if path.is_dir():
                return path
        raise CheckpointError(f"no checkpoint {name!r} in {self.directory}. Known: {', '.join(self.names()) or 'none'}.")

    def names(self) -> list[str]:
        """Names of all checkpoints: named ones sorted, then rolling ones sorted."""
        named = [entry.name for entry in _directories(self.directory) if entry.name != "steps"]
        return sorted(named) + sorted(entry.name for entry in _directories(self._rolling))

    def save(self, name: str, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None, *, rolling: bool) -> str:
        """Write tensors and JSON values; return the digest."""
        return files.save_checkpoint(self.path(name, rolling=rolling), tensors, meta)

    def publish(self, name: str, write: Callable[[Path], object], *, rolling: bool) -> str:
        """Write a directory of any layout; return the digest."""
        return files.publish(self.path(name, rolling=rolling), write)

    def prune_rolling(self, keep: Collection[str]) -> None:
        """Remove rolling checkpoints other than ``keep``."""
        for entry in _directories(self._rolling):
            if entry.name not in keep:
                shutil.rmtree(entry, ignore_errors=True)

    def recover(self) -> None:
        """Undo what a crash while writing left behind."""
        files.recover(self.directory)
        files.recover(self._rolling)


def _directories(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
