"""The run directory and its database: everything a run leaves behind, written so that kill -9 at any point loses nothing committed.

``RunDir`` owns the directory, ``Store`` the rows and checkpoints inside it. Names load lazily, so that small users
(``strop.store.facts``) don't pay for the database library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.store.checkpoint import Checkpoint, load_checkpoint, publish, save_checkpoint, verify
    from strop.store.rundir import RunDir
    from strop.store.store import STAGES, Commit, EpisodeRow, Store

_HOMES = {
    "STAGES": "store",
    "Checkpoint": "checkpoint",
    "Commit": "store",
    "EpisodeRow": "store",
    "RunDir": "rundir",
    "Store": "store",
    "load_checkpoint": "checkpoint",
    "publish": "checkpoint",
    "save_checkpoint": "checkpoint",
    "verify": "checkpoint",
}

__all__ = ["STAGES", "Checkpoint", "Commit", "EpisodeRow", "RunDir", "Store", "load_checkpoint", "publish", "save_checkpoint", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
