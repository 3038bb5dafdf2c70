"""Which base a run began from: a path stays the same while its weights change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.core.errors import ConfigError
from strop.numerics.digest import weights_digest
from strop.store import RunDir

FACT = "base_digest"


def check_base(run: RunDir, weights: Mapping[str, Any]) -> None:
    """Record the digest of the base where the run begins, and hold the base against it where the run continues.

    Where nothing is committed yet nothing depends on the base, so the run begins with the one that is there. A run that was begun
    before digests were recorded continues unchecked: to record what is there now would claim too much.

    Args:
        run: The run, open for writing.
        weights: The base's, as loaded.

    Raises:
        ConfigError: The run began from other weights.
    """
    here, then = weights_digest(weights), run.store.fact(FACT)
    if then is None:
        if not run.store.commits():
            run.store.put_fact(FACT, here)
    elif then != here:
        raise ConfigError(
            f"{run.path} can't be resumed with another base: model.base = {run.config.model.base!r} now has weights of digest {here}, "
            f"the run began from {then}. Put the old weights back, or choose another --out."
        )
