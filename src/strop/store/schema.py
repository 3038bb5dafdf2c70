"""Tables of a run's database, and how it is opened.

A run is one log with commit points. ``commits`` records how far each stream (episodes, costs, metrics file) had come; what
lies behind the last commit belongs to an unfinished step and is removed before the run continues.
Facts wait in a table of their own for the commit.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import StaticPool

FORMAT = 1
"""Version of the tables; another version is refused, not guessed at."""

metadata = sa.MetaData()

episodes = sa.Table(
    "episodes",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("sample", sa.Integer, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),  # scored, ungraded, failed, none
    sa.Column("reward", sa.Float),  # only scored episodes have one
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("stop_reason", sa.Text, nullable=False),
    sa.Column("turns", sa.Integer, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("sampled_tokens", sa.Integer, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("version_min", sa.Integer, nullable=False),
    sa.Column("version_max", sa.Integer, nullable=False),
    sa.Column("flags", sa.Text, nullable=False),  # rules that fired, comma separated
    sa.Column("stats", sa.JSON, nullable=False),
    sa.Column("blob", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("phase", "step", "task_id", "sample"),
    sqlite_autoincrement=True,
)

costs = sa.Table(
    "costs",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("value", sa.Float, nullable=False),
    sqlite_autoincrement=True,
)

commits = sa.Table(
    "commits",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("stage", sa.Text),  # set when this commit ends a stage of the pipeline
    sa.Column("checkpoint", sa.Text),  # rolling checkpoint that belongs to it
    sa.Column("facts", sa.JSON, nullable=False),
    sa.Column("episodes_seq", sa.Integer, nullable=False),
    sa.Column("costs_seq", sa.Integer, nullable=False),
    sa.Column("metrics_bytes", sa.Integer, nullable=False),
    sa.Column("time", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)

facts = sa.Table("facts", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.JSON, nullable=False))

# Facts replace each other, so a sequence number can't tell where the last commit was: new ones wait here and a commit moves them over.
# Databases of before lack this table; a writer makes it, a reader does without.
pending_facts = sa.Table(
    "pending_facts", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.JSON, nullable=False)
)


def open_engine(path: Path, *, read_only: bool) -> sa.Engine:
    """Open the SQLite file at ``path``: write-ahead log, foreign writers waited for up to 10 s.

    ``synchronous=NORMAL`` survives kill -9 for every transaction; the store raises it to ``FULL`` for commit points, so that
    these also survive a power failure.
    """
    mode = "ro" if read_only else "rwc"
    url = f"sqlite:///file:{_quote(path.resolve())}?mode={mode}&uri=true"
    engine = sa.create_engine(url, connect_args={"timeout": 10, "check_same_thread": False}, poolclass=StaticPool)

    @event.listens_for(engine, "connect")
    def _configure(connection, _record) -> None:
        if not read_only:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")

    return engine


def is_run_database(path: Path) -> bool:
    """Whether a file is a database of this module: SQLite, undamaged where it says so, with the tables that every format has.

    The file may be a stranger's, so it is only looked at: ``immutable`` makes no lock and no journal beside it.
    """
    if not path.is_file():
        return False
    url = f"file:{_quote(path.resolve())}?mode=ro&immutable=1"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(url, uri=True)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if {"episodes", "costs", "commits", "facts"} <= tables:
            return connection.execute("SELECT 1 FROM facts WHERE name = 'format'").fetchone() is not None
    return False


def _quote(path: Path) -> str:
    return "".join(f"%{ord(char):02x}" if char in "%?#" else char for char in str(path))
