"""The files of a run that hold rows: the SQLite database and ``metrics.jsonl``, with one transaction at a time."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from strop.core.errors import CheckpointError
from strop.store import schema
from strop.store.files import full_disk_is_clear


class Database:
    """Opens the files and turns their failures into ``CheckpointError``; ``Store`` gives them meaning.

    One connection, guarded by a lock, so that the event loop and a trainer thread may both use it.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._metrics_path = self.path / "metrics.jsonl"
        self._database = self.path / "run.db"
        self._lock = threading.RLock()
        self._metrics_fd: int | None = None
        if read_only and not self._database.is_file():
            raise CheckpointError(f"{self.path} is not a run directory: {self._database.name} is missing")
        self._engine = schema.open_engine(self._database, read_only=read_only)
        try:
            with full_disk_is_clear(self.path, "opening the run"):
                self._connection = self._engine.connect()
                self._check_format()
        except DatabaseError as error:
            raise CheckpointError(f"{self._database} can't be read: {error.orig}") from None

    def _check_format(self) -> None:
        if not self.read_only:
            schema.metadata.create_all(self._connection)
            statement = sa.text("INSERT OR IGNORE INTO facts (name, value) VALUES ('format', :value)")
            self._connection.execute(statement, {"value": json.dumps(schema.FORMAT)})
            self._connection.commit()
        master = sa.table("sqlite_master", sa.column("name"))
        self._has_pending = bool(self._query(sa.select(master.c.name).where(master.c.name == schema.pending_facts.name)))
        found = self._query(sa.select(schema.facts.c.value).where(schema.facts.c.name == "format"))
        if not found or found[0][0] != schema.FORMAT:
            raise CheckpointError(f"{self._database} has format {found!r}; this version of strop reads format {schema.FORMAT}")

    def close(self) -> None:
        """Give back the files. Idempotent."""
        with self._lock:
            if self._metrics_fd is not None:
                os.close(self._metrics_fd)
                self._metrics_fd = None
            self._connection.close()
            self._engine.dispose()

    def _metrics_descriptor(self) -> int:
        if self._metrics_fd is None:
            self._metrics_fd = os.open(self._metrics_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        return self._metrics_fd

    def _highest(self, table: sa.Table) -> int:
        return self._connection.execute(sa.select(sa.func.coalesce(sa.func.max(table.c.seq), 0))).scalar_one()

    def _query(self, statement: sa.Select[*tuple[Any, ...]] | sa.CompoundSelect[*tuple[Any, ...]]) -> Sequence[Any]:
        with self._lock:
            try:
                rows = self._connection.execute(statement).fetchall()
            except DatabaseError as error:
                raise CheckpointError(f"{self._database} can't be read: {error.orig}") from None
            self._connection.rollback()  # ends the read, so that a reader never holds back the log file
            return rows

    @contextlib.contextmanager
    def _writing(self, doing: str, *, durable: bool = False) -> Iterator[None]:
        """One transaction: all of it or nothing."""
        with self._lock, full_disk_is_clear(self.path, doing):
            if durable:
                self._connection.exec_driver_sql("PRAGMA synchronous=FULL")
                self._connection.commit()
            try:
                yield
                self._connection.commit()
            except BaseException:
                self._connection.rollback()
                raise
            finally:
                if durable:
                    self._connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
                    self._connection.commit()
