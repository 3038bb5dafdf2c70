"""Which checkpoint serves: one JSON file with its whole history, replaced atomically, with rollback.

The file is the only state; a crash leaves the old content or the new. Writers exclude each other through a lock file beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.core.errors import CheckpointError, StropError
from strop.production.promotion import Decision
from strop.store.files import write_atomic

FILE = "current.json"
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One change of the pointer.

    Attributes:
        checkpoint: Directory that serves from then on, as given.
        digest: Its digest, or empty if unknown.
        action: ``"promote"`` or ``"rollback"``.
        reason: The gate's sentence, or why it was rolled back.
        at: Unix seconds.
    """

    checkpoint: str
    digest: str
    action: str
    reason: str
    at: float


class CurrentPointer:
    """The pointer of one deployment.

    Args:
        directory: Where ``current.json`` lives; created on the first promotion.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / FILE

    def history(self) -> tuple[Entry, ...]:
        """All changes, oldest first; empty before the first promotion.

        Raises:
            CheckpointError: The file is damaged.
        """
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return tuple(Entry(**entry) for entry in data["history"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"pointer {self.path} can't be read: {type(error).__name__}: {error}") from None

    def current(self) -> Entry | None:
        """What serves now, or ``None``."""
        history = self.history()
        return history[-1] if history else None

    def promote(self, checkpoint: str | Path, decision: Decision | None, *, digest: str = "") -> Entry:
        """Point to ``checkpoint``.

        Args:
            checkpoint: Directory of the new model.
            decision: The gate's verdict; ``None`` only for the first model, which has no incumbent.
            digest: Its digest.

        Raises:
            StropError: The gate refused it, or there is an incumbent and no decision.
        """
        with self._locked():
            history = self.history()
            if decision is None and history:
                raise StropError(f"{checkpoint} can't replace {history[-1].checkpoint} without a decision of the promotion gate")
            if decision is not None and not decision.promote:
                raise StropError(f"{checkpoint} was refused by the promotion gate: {decision.reason}")
            reason = "first model" if decision is None else decision.reason
            return self._append(history, Entry(checkpoint=str(checkpoint), digest=digest, action="promote", reason=reason, at=time.time()))

    def rollback(self, reason: str) -> Entry:
        """Point to the model that served before the current one; called again, to the one before that.

        Raises:
            StropError: Nothing served before.
        """
        with self._locked():
            history = self.history()
            served: list[Entry] = []
            for entry in history:
                if entry.action == "promote":
                    served.append(entry)
                else:
                    served.pop()
            if len(served) < 2:
                raise StropError(f"nothing to roll back to: {self.path} has no earlier model")
            target = served[-2]
            entry = Entry(checkpoint=target.checkpoint, digest=target.digest, action="rollback", reason=reason, at=time.time())
            return self._append(history, entry)

    def _append(self, history: tuple[Entry, ...], entry: Entry) -> Entry:
        entries = [asdict(e) for e in (*history, entry)]
        write_atomic(self.path, (json.dumps({"current": entry.checkpoint, "history": entries}, indent=1) + "\n").encode())
        return entry

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path.with_name(f".{FILE}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StropError(f"waited {LOCK_TIMEOUT_S:g} s for another writer of {self.path}", retryable=True) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)
