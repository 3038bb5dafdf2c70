"""The run directory: who may write into it, and what its resolved configuration is.

RUN/
  config.json      the configuration as resolved, git revision, versions, machine; never edited by hand
  run.db           episodes, costs, commit points
  metrics.jsonl    one line per log call
  checkpoints/     named ones, and steps/ for the rolling ones
  certificate.json of the RL phase; those of its epochs lie in certificates/
  logs/            tracebacks
  report.html      written by the last stage
  lock             held while a process writes
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from strop.core.config import RunConfig
from strop.core.errors import CheckpointError, ConfigError, nearest
from strop.store.facts import git_revision, machine_facts, package_versions
from strop.store.files import full_disk_is_clear, write_atomic
from strop.store.schema import is_run_database
from strop.store.store import Store

_CONFIG, _LOCK = "config.json", "lock"
_HELD: set[Path] = set()  # the system's lock is per process; this one keeps two writers of one process apart


class RunDir:
    """An open run directory. Use ``create`` (to write) or ``open`` (to look); a context manager.

    Attributes:
        path: The directory.
        config: The run's configuration.
        store: Its contents.
        facts: Everything in ``config.json`` beside the configuration: revision, versions, machine.
        is_resumed: Whether an earlier process had begun this run.
    """

    def __init__(self, path: Path, config: RunConfig, store: Store, facts: dict[str, Any], is_resumed: bool, lock: int | None) -> None:
        self.path = path
        self.config = config
        self.store = store
        self.facts = facts
        self.is_resumed = is_resumed
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, *, resume: bool = False, clean: bool = False) -> RunDir:
        """Open a run directory for writing.

        Args:
            path: The directory; made if it is missing.
            config: The resolved configuration.
            resume: Continue the run that is there; with nothing there, begin.
            clean: Remove the run that is there, then begin.

        Raises:
            ConfigError: Something is there and neither flag is given, both are given, the configuration differs from the one to
                resume, or the directory can't be written.
            CheckpointError: Another process writes into it, or its files are damaged.
        """
        target = Path(path)
        if resume and clean:
            raise ConfigError("--resume and --clean exclude each other: continue the run, or begin anew")
        _make_directory(target)
        existing = _entries(target)
        is_run = _is_run(target)
        if existing and not is_run:
            raise ConfigError(f"{target} holds files that are not a run ({', '.join(existing[:3])}, ...); choose another --out")
        lock = _acquire(target)
        try:
            if is_run and not (resume or clean):
                raise ConfigError(
                    f"{target} already holds a run. Continue it with --resume, replace it with --clean, or choose another --out."
                )
            if is_run and clean:
                _clean(target)
                is_run = False
            facts = _check_same(target, config) if is_run else _begin(target, config)
            for leftover in target.glob(".tmp-*"):
                if leftover.is_file():
                    leftover.unlink()
            store = Store(target, recover=True)
            (target / "logs").mkdir(exist_ok=True)
            return cls(target, config, store, facts, is_run, lock)
        except BaseException:
            _release(target, lock)
            raise

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Open a finished or running run for reading.

        Raises:
            CheckpointError: No run there (names a near one), or its files are damaged.
        """
        target = Path(path)
        if not _is_run(target):
            siblings = [str(entry.parent) for entry in target.parent.glob("*/run.db")] if target.parent.is_dir() else []
            raise CheckpointError(f"{target} is not a run directory.{nearest(str(target), siblings) if siblings else ''}")
        record = _read_config(target)
        config = _parse_config(target, record)
        return cls(target, config, Store(target, read_only=True), _without_config(record), True, None)

    @property
    def report_path(self) -> Path:
        """Where the HTML report goes."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """Directory of tracebacks."""
        return self.path / "logs"

    def close(self) -> None:
        """Give the files and the lock back. Idempotent."""
        self.store.close()
        if self._lock is not None:
            _release(self.path, self._lock)
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _make_directory(target: Path) -> None:
    try:
        with full_disk_is_clear(target, "creating the run"):
            target.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--out {target}: there is a file of that name; choose another directory") from None
    except OSError as error:
        raise ConfigError(f"--out {target} can't be made: {error.strerror}") from None
    if not os.access(target, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {target} can't be written by this user; choose another directory")


def _is_run(target: Path) -> bool:
    """Whether a directory is a run, by what its files hold: a stranger's may have these names, and ``--clean`` would delete it.

    A run writes ``config.json`` before ``run.db`` and removes it last, so the record alone tells of a run that was killed early or
    whose database is damaged; the database alone tells of a run whose record is damaged.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        record = json.loads((target / _CONFIG).read_text(encoding="utf-8"))
        if isinstance(record, dict) and isinstance(record.get("config"), dict) and "revision" in record:
            return True
    return is_run_database(target / "run.db")


def _entries(target: Path) -> list[str]:
    """Names in the directory, less what a run leaves that was killed before its configuration was written."""
    is_ours = (target / _LOCK).exists()  # without our lock, even a name of our temporary files is a stranger's
    return sorted(entry.name for entry in target.iterdir() if entry.name != _LOCK and not (is_ours and entry.name.startswith(".tmp-")))


def _acquire(target: Path) -> int:
    key = target.resolve()
    if key in _HELD:
        raise CheckpointError(f"{target} is already open for writing in this process")
    try:
        descriptor = os.open(target / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"--out {target} can't be written: {error.strerror}") from None
    try:
        # A record lock, not flock: a forked helper that outlives a killed run must not keep the directory locked.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(f"--out {target} can't be locked: {error.strerror}; choose a directory on a local disk") from None
        raise CheckpointError(
            f"{target} is in use by another process ({holder or 'just starting'}); wait for it, stop it, or choose another --out"
        ) from None
    _HELD.add(key)
    os.ftruncate(descriptor, 0)
    note = f"pid {os.getpid()}, since {datetime.datetime.now().isoformat(timespec='seconds')}"
    with contextlib.suppress(OSError):  # the lock holds without its note, on a full disk too
        os.pwrite(descriptor, note.encode(), 0)
    return descriptor


def _release(target: Path, lock: int) -> None:
    _HELD.discard(target.resolve())
    os.close(lock)


def _clean(target: Path) -> None:
    # The configuration goes last, so that a crash in between leaves something that --clean still recognises.
    for entry in sorted(target.iterdir(), key=lambda entry: entry.name == _CONFIG):
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _begin(target: Path, config: RunConfig) -> dict[str, Any]:
    facts = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "revision": git_revision(),
        "versions": package_versions(),
        "machine": machine_facts(),
    }
    text = json.dumps({"config": config.model_dump(mode="json"), **facts}, indent=2)
    write_atomic(target / _CONFIG, (text + "\n").encode())
    return facts


def _read_config(target: Path) -> dict[str, Any]:
    try:
        record = json.loads((target / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(record["config"], dict):
            raise TypeError("config is not a table")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{target / _CONFIG} is damaged: {error}") from None
    return record


def _parse_config(target: Path, record: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(record["config"])
    except ValidationError as error:
        raise CheckpointError(f"{target / _CONFIG} was written by another version of strop: {error.errors()[0]['msg']}") from None


def _without_config(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "config"}


def _check_same(target: Path, config: RunConfig) -> dict[str, Any]:
    record = _read_config(target)
    then, now = flat(_parse_config(target, record)), flat(config)
    changed = [f"{key} = {now.get(key)!r} (was {then.get(key)!r})" for key in sorted(then | now) if then.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"{target} can't be resumed with another configuration: {'; '.join(changed)}. Restore it, or choose another --out."
        )
    return _without_config(record)


def flat(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as dotted keys and values."""
    values: dict[str, Any] = {}

    def walk(prefix: str, node: dict[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)
            else:
                values[f"{prefix}{key}"] = value

    walk("", config.model_dump(mode="json"))
    return values
