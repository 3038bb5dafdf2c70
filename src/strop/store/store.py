"""Rows, metrics and checkpoints of one run.

State: a SQLite database, ``metrics.jsonl`` and ``checkpoints/``. Invariant: after ``Store(..., recover=True)`` all three are
exactly as they were at the last commit point, whatever killed the writer. The training loop is the only writer; readers may
look at any time.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from strop.core import metrics as metric_table
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import CheckpointError, nearest
from strop.store import schema
from strop.store.checkpoint import Checkpoint, load_checkpoint, verify
from strop.store.codec import decode_episode, encode_episode
from strop.store.database import Database
from strop.store.files import full_disk_is_clear, write_all
from strop.store.rows import EpisodeRow, cost_values, episode_values, row_condition, split_key
from strop.store.shelf import Shelf
from strop.store.state import flatten, unflatten

STAGES = ("base_eval", "midtrain", "mid_eval", "rl", "rl_eval", "report")
"""Stages of a run in order; ``Store.stage`` names the last one that is done."""

_KEEP_ROLLING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit point.

    Attributes:
        phase: Phase of the step.
        step: The step that it ends.
        stage: The stage that it ends, or ``""``.
        checkpoint: Name of the rolling checkpoint that belongs to it, or ``""``.
        facts: JSON values given by the caller, for example digests.
        time: When, ISO 8601 UTC.
    """

    phase: str
    step: int
    stage: str
    checkpoint: str
    facts: Mapping[str, Any]
    time: str


class Store(Database):
    """The contents of a run directory.

    Args:
        path: The run directory.
        read_only: Look only; several readers may do so beside one writer.
        recover: Remove what an unfinished step left behind (only for the process that holds the run's lock).

    Raises:
        CheckpointError: No run there, a damaged database, or one of another format.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, recover: bool = False) -> None:
        super().__init__(Path(path), read_only=read_only)
        self.shelf = Shelf(self.path / "checkpoints")
        self.before_commit: list[Callable[[], None]] = []
        if recover:
            self._recover()

    # ------------------------------------------------------------------------------------------------ episodes

    def put_episode(self, episode: Episode) -> None:
        """Write a finished episode with its costs, in one transaction, before any filter sees it.

        Raises:
            CheckpointError: The key is already stored (it would count twice), or the disk is full.
        """
        values = episode_values(episode, encode_episode(episode))
        with self._writing("writing an episode"):
            try:
                self._connection.execute(schema.episodes.insert(), values)
            except IntegrityError:
                raise CheckpointError(f"episode {episode.key} is already stored in {self.path}") from None
            self._insert_costs(episode.key.phase, episode.key.step, episode.costs)

    def get(self, key: EpisodeKey | str) -> Episode:
        """Return one episode.

        Args:
            key: The key or its text form ``phase/step/task/sample``.

        Raises:
            CheckpointError: No such episode (names a near key), or its bytes are damaged.
        """
        parts = split_key(str(key))
        table = schema.episodes
        blob = None
        if parts is not None:
            phase, step, task_id, sample = parts
            condition = (table.c.phase == phase, table.c.step == step, table.c.task_id == task_id, table.c.sample == sample)
            found = self._query(sa.select(table.c.blob).where(*condition))
            blob = found[0][0] if found else None
        if blob is None:
            columns = (table.c.phase, table.c.step, table.c.task_id, table.c.sample)
            known = ["/".join(map(str, row)) for row in self._query(sa.select(*columns).limit(2000))]
            close = difflib.get_close_matches(str(key), known, n=1) or known[:1]
            hint = f" Did you mean {close[0]!r}?" if close else " It holds none."
            raise CheckpointError(f"no episode {str(key)!r} in {self.path}.{hint}")
        return decode_episode(blob, f"episode {key} in {self._database}")

    def rows(
        self, *, phase: str | None = None, step: int | None = None, task: str | None = None, reward: float | None = None, limit: int = 0
    ) -> list[EpisodeRow]:
        """Return the columns of matching episodes, without their tokens, sorted by key.

        Args:
            phase: Phase, or a prefix ending in ``*`` (``"eval.*"``).
            step: Step.
            task: Part of the task id.
            reward: Exact reward.
            limit: At most so many; 0 means all.
        """
        table = schema.episodes
        columns = [column for column in table.c if column.name not in ("blob", "seq")]
        statement = sa.select(*columns, sa.func.length(table.c.blob).label("stored_bytes"))
        statement = statement.where(*row_condition(phase, step, task, reward))
        statement = statement.order_by(table.c.phase, table.c.step, table.c.task_id, table.c.sample)
        if limit:
            statement = statement.limit(limit)
        return [EpisodeRow(**row._mapping) for row in self._query(statement)]

    def episodes(
        self, *, phase: str | None = None, step: int | None = None, task: str | None = None, reward: float | None = None
    ) -> Iterator[Episode]:
        """Yield matching episodes in full, sorted by key. Arguments as in ``rows``."""
        for row in self.rows(phase=phase, step=step, task=task, reward=reward):
            yield self.get(row.key)

    def counts(self) -> dict[str, int]:
        """Return the number of stored episodes of every phase."""
        table = schema.episodes
        statement = sa.select(table.c.phase, sa.func.count()).group_by(table.c.phase).order_by(table.c.phase)
        return {row[0]: row[1] for row in self._query(statement)}

    # ------------------------------------------------------------------------------------------------ metrics and costs

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str = "rl") -> None:
        """Append one line to ``metrics.jsonl``; it appears whole or not at all.

        Raises:
            ConfigError: A key that isn't in the metrics table.
            CheckpointError: The disk is full.
        """
        checked = metric_table.validate(metrics)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = {"phase": phase, "step": step, "time": now}
        record |= {key: value if math.isfinite(value) else str(value) for key, value in checked.items()}
        line = (json.dumps(record) + "\n").encode()
        with self._lock, full_disk_is_clear(self._metrics_path, "writing metrics"):
            descriptor = self._metrics_descriptor()
            size = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, line)
            except OSError:
                os.ftruncate(descriptor, size)
                raise

    def metrics(self, *, phase: str | None = None) -> list[dict[str, Any]]:
        """Return the logged lines in order: ``phase``, ``step``, ``time`` and the values by key. A torn last line is left out."""
        if not self._metrics_path.exists():
            return []
        records = []
        for line in self._metrics_path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or "phase" not in record:
                continue
            if phase is None or record["phase"] == phase:
                records.append({key: float(value) if "/" in key else value for key, value in record.items()})
        return records

    def add_costs(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Append to the cost book. Keys are ``cost/*`` of the metrics table; see ``strop.ledger``."""
        with self._writing("writing costs"):
            self._insert_costs(phase, step, values)

    def _insert_costs(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        rows = cost_values(phase, step, values)
        if rows:
            self._connection.execute(schema.costs.insert(), rows)

    def costs(self) -> list[tuple[str, int, str, float]]:
        """Return ``(phase, step, key, value)``, combined with each key's reducer, sorted."""
        table = schema.costs
        group = (table.c.phase, table.c.step, table.c.key)
        statement = sa.select(*group, sa.func.sum(table.c.value), sa.func.max(table.c.value)).group_by(*group).order_by(*group)
        is_max = metric_table.Reducer.MAX
        return [
            (p, s, key, high if metric_table.lookup(key).reducer is is_max else total) for p, s, key, total, high in self._query(statement)
        ]

    # ------------------------------------------------------------------------------------------------ commit points

    def commit_step(self, step: int, *, phase: str = "rl", checkpoint: str = "", stage: str = "", **facts: Any) -> None:
        """Make everything written so far permanent, at once: kill -9 falls either before or after this.

        Args:
            step: The step that is complete.
            phase: Its phase.
            checkpoint: Name of a rolling checkpoint to continue from (``save_checkpoint(..., rolling=True)``).
            stage: Stage of the pipeline that is complete with it.
            facts: JSON values to keep with it, for example ``weights_digest``.

        Raises:
            CheckpointError: The checkpoint doesn't exist, or the disk is full (then nothing of this step is committed).
        """
        if checkpoint and not self.shelf.path(checkpoint, rolling=True).is_dir():
            raise CheckpointError(f"step {step} of {phase} can't be committed: rolling checkpoint {checkpoint!r} was not saved")
        last = self.last_step(phase)
        if not stage and last is not None and last.step >= step:
            raise CheckpointError(f"step {step} of {phase} can't be committed: step {last.step} already is, it would count twice")
        if stage and stage not in STAGES:
            raise CheckpointError(f"unknown stage {stage!r}.{nearest(stage, STAGES)}")
        with self._lock:
            for settle in self.before_commit:
                settle()
            descriptor = self._metrics_descriptor()
            with full_disk_is_clear(self._metrics_path, "writing metrics"):
                os.fsync(descriptor)
            values = {
                "phase": phase,
                "step": step,
                "stage": stage or None,
                "checkpoint": checkpoint or None,
                "facts": facts,
                "metrics_bytes": os.fstat(descriptor).st_size,
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            with self._writing("committing a step", durable=True):
                values["episodes_seq"] = self._highest(schema.episodes)
                values["costs_seq"] = self._highest(schema.costs)
                self._connection.execute(schema.commits.insert(), values)
                self._commit_facts()
            self.shelf.prune_rolling(self._rolling_to_keep())

    def _commit_facts(self) -> None:
        facts, pending = schema.facts, schema.pending_facts
        self._connection.execute(facts.delete().where(facts.c.name.in_(sa.select(pending.c.name))))
        self._connection.execute(facts.insert().from_select(["name", "value"], sa.select(pending.c.name, pending.c.value)))
        self._connection.execute(pending.delete())

    def commits(self, *, phase: str | None = None) -> list[Commit]:
        """Return the commit points in order."""
        table = schema.commits
        statement = sa.select(table.c.phase, table.c.step, table.c.stage, table.c.checkpoint, table.c.facts, table.c.time).order_by(
            table.c.id
        )
        if phase is not None:
            statement = statement.where(table.c.phase == phase)
        found = self._query(statement)
        return [Commit(phase=p, step=s, stage=stage or "", checkpoint=c or "", facts=f, time=t) for p, s, stage, c, f, t in found]

    def last_step(self, phase: str = "rl") -> Commit | None:
        """Return the last commit point of a phase, or ``None``."""
        found = self.commits(phase=phase)
        return found[-1] if found else None

    def set_stage(self, stage: str, **facts: Any) -> None:
        """Record that a stage of the pipeline is done; this is a commit point.

        Args:
            stage: One of ``STAGES``.
            facts: JSON values to keep, readable with ``stage_facts``.
        """
        self.commit_step(STAGES.index(stage) if stage in STAGES else 0, phase="stage", stage=stage, **facts)

    def stage(self) -> str:
        """Return the last stage that is done, or ``""``."""
        done = {commit.stage for commit in self.commits()}
        return next((stage for stage in reversed(STAGES) if stage in done), "")

    def is_done(self, stage: str) -> bool:
        """Whether a stage is done."""
        if stage not in STAGES:
            raise CheckpointError(f"unknown stage {stage!r}.{nearest(stage, STAGES)}")
        return any(commit.stage == stage for commit in self.commits())

    def stage_facts(self, stage: str) -> dict[str, Any]:
        """Return what ``set_stage`` kept for a stage, or ``{}``."""
        found = [commit for commit in self.commits() if commit.stage == stage]
        return dict(found[-1].facts) if found else {}

    def put_fact(self, name: str, value: Any) -> None:
        """Keep a JSON value under a name, replacing an older one (certificate, evaluation tables, ...); permanent with the next commit."""
        table = schema.pending_facts
        with self._writing("writing a fact"):
            self._connection.execute(table.delete().where(table.c.name == name))
            self._connection.execute(table.insert(), {"name": name, "value": value})

    def fact(self, name: str, default: Any = None) -> Any:
        """Return what ``put_fact`` kept last, committed or not, or ``default``."""
        committed, pending = (
            sa.select(sa.literal(order).label("age"), table.c.value).where(table.c.name == name)
            for order, table in enumerate((schema.facts, schema.pending_facts))
        )
        # In one statement, so that a reader never falls between the two tables while a writer commits.
        found = self._query(sa.union_all(pending, committed).order_by("age") if self._has_pending else committed)
        return found[-1][1] if found else default

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, name: str, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None, *, rolling: bool = False
    ) -> str:
        """Write a checkpoint atomically and return its digest.

        Args:
            name: Its name.
            tensors: Name to numpy array or torch tensor.
            meta: JSON values.
            rolling: It only serves to continue a run: name it in ``commit_step``; the last two committed ones are kept.
        """
        return self.shelf.save(name, tensors, meta, rolling=rolling)

    def load_checkpoint(self, name: str, *, framework: str | None = None) -> Checkpoint:
        """Verify and read a checkpoint.

        Raises:
            CheckpointError: Missing or damaged; names the file, expected and actual digest.
        """
        return load_checkpoint(self.shelf.find(name), framework=framework)

    def save_state(self, name: str, state: Any, meta: Mapping[str, Any] | None = None, *, rolling: bool = True) -> str:
        """Write a nested state (``Trainer.state()``) as a checkpoint; maps, lists, numbers and tensors of any depth."""
        tensors, tree = flatten(state)
        return self.shelf.save(name, tensors, {"tree": tree, **(meta or {})}, rolling=rolling)

    def load_state(self, name: str) -> tuple[Any, dict[str, Any]]:
        """Return ``(state, meta)`` as given to ``save_state``."""
        found = self.load_checkpoint(name)
        meta = dict(found.meta)
        return unflatten(found.tensors, meta.pop("tree")), meta

    def publish(self, name: str, write: Callable[[Path], object], *, rolling: bool = False) -> str:
        """Write a checkpoint of any layout (a Hugging Face directory): ``write`` fills an empty directory; return the digest."""
        return self.shelf.publish(name, write, rolling=rolling)

    def checkpoint_path(self, name: str) -> Path:
        """Verify a checkpoint of any layout and return its directory.

        Raises:
            CheckpointError: Missing or damaged.
        """
        path = self.shelf.find(name)
        verify(path)
        return path

    def _rolling_to_keep(self) -> list[str]:
        table = schema.commits
        statement = sa.select(table.c.checkpoint).where(table.c.checkpoint.is_not(None)).order_by(table.c.id.desc())
        return [name for (name,) in self._query(statement.limit(_KEEP_ROLLING))]

    # ------------------------------------------------------------------------------------------------ inside

    def _recover(self) -> None:
        """Go back to the last commit point."""
        table = schema.commits
        columns = (table.c.episodes_seq, table.c.costs_seq, table.c.metrics_bytes)
        last = self._query(sa.select(*columns).order_by(table.c.id.desc()).limit(1))
        episodes_seq, costs_seq, metrics_bytes = last[0] if last else (0, 0, 0)
        with self._writing("recovering", durable=True):
            self._connection.execute(schema.episodes.delete().where(schema.episodes.c.seq > episodes_seq))
            self._connection.execute(schema.costs.delete().where(schema.costs.c.seq > costs_seq))
            self._connection.execute(schema.pending_facts.delete())
        descriptor = self._metrics_descriptor()
        size = os.fstat(descriptor).st_size
        if size < metrics_bytes:
            raise CheckpointError(f"{self._metrics_path} is damaged: {size} bytes, {metrics_bytes} were committed")
        os.ftruncate(descriptor, metrics_bytes)
        self.shelf.recover()
        self.shelf.prune_rolling(self._rolling_to_keep())
