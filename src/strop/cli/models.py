"""What a person may name: shipped models and pools, run directories, checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import strop
from strop.core.errors import CheckpointError, ConfigError, nearest
from strop.store.checkpoint import DIGESTS, verify

ASSETS = Path(strop.__file__).parent / "assets"
"""Data that ships in the package: ``models/<name>`` and ``pools/<name>``."""

MODEL_NAMES = ("rl", "mid", "base")
"""Names of models in a run directory, best first. A run publishes ``rl`` and ``mid``."""


def model_dir(name: str) -> Path:
    """Return the directory of ``builtin:<name>`` or of a path.

    Raises:
        ConfigError: No such model; names the nearest shipped one.
    """
    return _asset(name, "models", "model")


def pool_dir(name: str) -> Path:
    """Return the directory of the task pool ``builtin:<name>`` or of a path.

    Raises:
        ConfigError: No such pool; names the nearest shipped one.
    """
    return _asset(name, "pools", "task pool")


def _asset(name: str, folder: str, what: str) -> Path:
    prefix, _, rest = name.partition(":")
    if prefix == "builtin":
        path = ASSETS / folder / rest
        if not rest or not path.is_dir():
            parent = ASSETS / folder
            known = [f"builtin:{entry.name}" for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
            raise ConfigError(f"{what} {name!r} does not ship with strop.{nearest(name, known)}")
        return path
    path = Path(name)
    if not path.is_dir():
        siblings = [str(entry) for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        raise ConfigError(f"{what} {name!r}: no such directory.{nearest(name, siblings) if siblings else ''}")
    return path


def is_run(path: Path) -> bool:
    """Whether a directory is a run."""
    return (path / "run.db").is_file()


def find_model(path: Path) -> Path:
    """Return the checkpoint directory that a run or checkpoint path stands for, verified.

    Of a run it is the promoted model (the fact ``promoted`` names it), else the last one that it published.

    Raises:
        CheckpointError: No model there, or a damaged one.
        ConfigError: No such directory.
    """
    if not path.is_dir():
        return _asset(str(path), "models", "model")
    if not is_run(path):
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is neither a run directory (run.db) nor a checkpoint (config.json)")
        if (path / DIGESTS).is_file():
            verify(path)
        return path
    from strop.store import Store

    store = Store(path, read_only=True)
    try:
        known = store.shelf.names()
        name = store.fact("promoted") or next((name for name in MODEL_NAMES if name in known), None)
        if name is None:
            raise CheckpointError(f"{path} has no model yet; stage done: {store.stage() or 'none'}. Continue it with strop run --resume.")
        return store.checkpoint_path(name)
    finally:
        store.close()
