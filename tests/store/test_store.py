"""Rows, metrics, stages, rolling checkpoints, commit points."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from strop.core.episode import EpisodeKey
from strop.core.errors import CheckpointError, ConfigError
from strop.core.outcome import Failed, Ungraded
from strop.ledger import CostBook
from strop.ledger import book as book_module
from strop.store import Store


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path)
    yield opened
    opened.close()


def reopen(store: Store) -> Store:
    store.close()
    return Store(store.path, recover=True)


def test_episodes_are_found_by_every_column(store: Store, episode, is_same):
    for step in range(2):
        for sample in range(3):
            store.put_episode(episode(step, sample))
    store.put_episode(episode(phase="eval.mid", task="x_y%z", outcome=Failed(error="worker died")))
    store.put_episode(episode(phase="eval.base", task="xay%z", outcome=Ungraded(reason="unreadable")))
    assert store.counts() == {"eval.base": 1, "eval.mid": 1, "rl": 6}
    assert is_same(store.get("rl/1/a/b:c#1/2"), episode(1, 2))
    assert is_same(store.get(EpisodeKey(phase="rl", step=0, task_id="a/b:c#1", sample=0)), episode(0, 0))
    assert [row.key.sample for row in store.rows(phase="rl", step=1)] == [0, 1, 2]
    assert [row.reward for row in store.rows(reward=1.0)] == [1.0, 1.0]
    assert [row.outcome for row in store.rows(phase="eval.*")] == ["ungraded", "failed"]
    assert [row.phase for row in store.rows(task="x_y%")] == ["eval.mid"]  # no wildcards in a task id
    assert len(store.rows(limit=2)) == 2
    row = store.rows(phase="rl", step=1)[1]
    assert (row.tokens, row.sampled_tokens, row.version_min, row.version_max, row.flags) == (40, 28, 1, 2, "test_edit")
    assert row.stats == {"edits": 1.0}
    assert [e.key.step for e in store.episodes(phase="rl")] == [0, 0, 0, 1, 1, 1]


def test_an_episode_counts_once(store: Store, episode):
    store.put_episode(episode())
    with pytest.raises(CheckpointError, match="already stored"):
        store.put_episode(episode())
    assert store.counts() == {"rl": 1}
    assert CostBook(store).totals()["cost/sampled_tokens"] == 28


def test_an_unknown_key_names_a_near_one(store: Store, episode):
    with pytest.raises(CheckpointError, match="holds none"):
        store.get("rl/0/x/0")
    store.put_episode(episode())
    with pytest.raises(CheckpointError, match="Did you mean 'rl/0/a/b:c#1/0'"):
        store.get("rl/0/a/b:c#1/7")


def test_metrics_keep_what_is_not_finite(store: Store):
    store.log(3, {"rl/reward": math.nan, "rl/grad_norm": math.inf, "rl/loss": np.float32(0.5)})
    for line in (store.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (record,) = store.metrics(phase="rl")
    assert math.isnan(record["rl/reward"])
    assert (record["rl/grad_norm"], record["rl/loss"], record["step"]) == (math.inf, 0.5, 3)


def test_an_unknown_metric_is_refused(store: Store):
    with pytest.raises(ConfigError, match="Did you mean 'rl/reward'"):
        store.log(0, {"rl/rewards": 1.0})
    assert store.metrics() == []


def test_going_back_to_the_last_commit(store: Store, episode):
    store.put_episode(episode(0, 0))
    store.log(0, {"rl/reward": 0.1})
    store.add_costs("rl", 0, {"cost/cpu_s": 2.0})
    store.save_checkpoint("s0", {"w": np.zeros(3)}, rolling=True)
    store.commit_step(0, checkpoint="s0", weights_digest="abc")
    store.put_episode(episode(1, 0))
    store.put_episode(episode(0, 1))  # a straggler of the committed step, finished after it
    store.log(1, {"rl/reward": 0.2})
    store.add_costs("rl", 0, {"cost/cpu_s": 5.0})
    store.save_checkpoint("s1", {"w": np.ones(3)}, rolling=True)
    store = reopen(store)
    assert [str(row.key) for row in store.rows()] == ["rl/0/a/b:c#1/0"]
    assert [record["step"] for record in store.metrics()] == [0]
    assert CostBook(store).totals() == {"cost/sampled_tokens": 28.0, "cost/sandbox_s": 0.125, "cost/cpu_s": 2.0}
    assert store.shelf.names() == ["s0"]
    last = store.last_step()
    assert last is not None
    assert (last.step, last.checkpoint, last.facts) == (0, "s0", {"weights_digest": "abc"})
    store.put_episode(episode(0, 1))  # it can be done again
    store.commit_step(1)
    store = reopen(store)
    assert store.counts() == {"rl": 2}
    store.close()


def test_a_run_without_commits_goes_back_to_nothing(store: Store, episode):
    store.put_episode(episode())
    store.log(0, {"rl/reward": 0.1})
    store = reopen(store)
    assert (store.counts(), store.metrics(), store.costs()) == ({}, [], [])
    store.close()


def test_a_step_commits_once(store: Store):
    store.commit_step(3)
    with pytest.raises(CheckpointError, match="twice"):
        store.commit_step(3)
    store.commit_step(3, phase="midtrain")


def test_a_commit_needs_its_checkpoint(store: Store):
    with pytest.raises(CheckpointError, match="'s9' was not saved"):
        store.commit_step(0, checkpoint="s9")
    assert store.commits() == []


def test_the_last_two_rolling_checkpoints_and_every_named_one_stay(store: Store):
    store.save_checkpoint("mid", {"w": np.zeros(1)})
    for step in range(4):
        store.save_state(f"s{step}", {"step": step, "w": np.full(2, step)})
        store.commit_step(step, checkpoint=f"s{step}")
    assert store.shelf.names() == ["mid", "s2", "s3"]
    state, meta = store.load_state("s3")
    assert (state["step"], state["w"].tolist(), meta) == (3, [3, 3], {})
    store.set_stage("rl")
    assert store.shelf.names() == ["mid", "s2", "s3"]


def test_stages_continue_where_they_ended(store: Store):
    assert store.stage() == ""
    store.set_stage("base_eval", success=0.1)
    store.set_stage("midtrain")
    store = reopen(store)
    assert store.stage() == "midtrain"
    assert store.is_done("base_eval")
    assert not store.is_done("rl")
    assert store.stage_facts("base_eval") == {"success": 0.1}
    assert store.stage_facts("rl") == {}
    with pytest.raises(CheckpointError, match="Did you mean 'rl_eval'"):
        store.set_stage("rl_evil")
    store.close()


def test_facts_may_be_false(store: Store):
    store.put_fact("x", 0)
    store.put_fact("y", {"a": [1]})
    assert (store.fact("x", 7), store.fact("y"), store.fact("z", 7)) == (0, {"a": [1]}, 7)
    store.put_fact("y", None)
    assert store.fact("y", 7) is None


@pytest.mark.parametrize("commit", [lambda store: store.commit_step(1), lambda store: store.set_stage("rl")])
def test_facts_follow_commit_points(store: Store, commit):
    store.put_fact("kept", 1)
    store.put_fact("replaced", {"n": 1})
    store.put_fact("nothing", None)
    store.commit_step(0)
    store.put_fact("replaced", {"n": 2})
    store.put_fact("new", 2)
    names = ("kept", "replaced", "nothing", "new")
    reader = Store(store.path, read_only=True)  # whoever looks sees what is newest, as with episodes
    assert [reader.fact(name, "none") for name in names] == [1, {"n": 2}, None, 2]
    store = reopen(store)
    assert [store.fact(name, "none") for name in names] == [1, {"n": 1}, None, "none"]
    store.put_fact("replaced", {"n": 3})
    commit(store)
    store = reopen(store)
    assert [store.fact(name, "none") for name in names] == [1, {"n": 3}, None, "none"]
    assert reader.fact("replaced") == {"n": 3}
    reader.close()
    store.close()


def test_a_database_from_before_facts_followed_commit_points(store: Store):
    store.put_fact("x", 1)
    store.commit_step(0)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path / "run.db")) as connection:
        connection.execute("DROP TABLE pending_facts")
        connection.commit()
    reader = Store(store.path, read_only=True)
    assert (reader.fact("x"), reader.fact("y", 7)) == (1, 7)
    reader.close()
    store = Store(store.path, recover=True)
    store.put_fact("x", 2)
    assert store.fact("x") == 2
    store = reopen(store)
    assert store.fact("x") == 1
    store.close()


def test_a_damaged_episode_is_named(store: Store, episode):
    store.put_episode(episode())
    blob = bytearray(store._connection.exec_driver_sql("SELECT blob FROM episodes").scalar_one())
    blob[50] ^= 1
    store._connection.exec_driver_sql("UPDATE episodes SET blob = ?", (bytes(blob),))
    store._connection.commit()
    with pytest.raises(CheckpointError, match=r"episode rl/0/a/b:c#1/0 in .*run.db is damaged: checksum"):
        store.get("rl/0/a/b:c#1/0")


def test_a_shortened_metrics_file_is_named(store: Store):
    store.log(0, {"rl/reward": 0.1})
    store.commit_step(0)
    (store.path / "metrics.jsonl").write_bytes(b"")
    store.close()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged: 0 bytes, \d+ were committed"):
        Store(store.path, recover=True)


def test_another_format_is_refused(store: Store):
    store.put_fact("format", 99)
    store.commit_step(0)
    store.close()
    with pytest.raises(CheckpointError, match="99"):
        Store(store.path)


def test_a_reader_sees_a_running_writer(store: Store, episode):
    reader = Store(store.path, read_only=True)
    store.put_episode(episode())
    store.log(0, {"rl/reward": 0.1})
    assert reader.counts() == {"rl": 1}
    assert len(reader.metrics()) == 1
    reader.close()


class _Clock:
    """Time and processor seconds that pass only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(book_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(book_module, "_cpu_seconds", lambda: 2 * self.now)


@pytest.mark.parametrize("killed_in", range(4))
def test_a_kill_loses_the_seconds_of_its_unfinished_step_alone(store: Store, monkeypatch: pytest.MonkeyPatch, killed_in: int):
    clock = _Clock(monkeypatch)

    def run(store: Store, killed_in: int | None) -> None:
        last = store.last_step()
        with CostBook(store).measure("rl") as extra:
            extra["cost/prompt_tokens"] = 5.0
            for step in range(0 if last is None else last.step + 1, 3):
                clock.now += 10**step
                if step == killed_in:
                    raise InterruptedError
                store.commit_step(step)
            clock.now += 1000
            if killed_in == 3:
                raise InterruptedError
        store.set_stage("rl")
        clock.now += 5000
        store.set_stage("report")  # the block is over: nothing of this is its

    with pytest.raises(InterruptedError):
        run(store, killed_in)
    clock.now = 0  # another process has other clocks
    store = reopen(store)
    done = sum(10**step for step in range(killed_in))
    assert CostBook(store).totals().get("cost/wall_s", 0) == done
    run(store, None)
    store = reopen(store)
    totals = CostBook(store).totals()
    assert (totals["cost/wall_s"], totals["cost/cpu_s"], totals["cost/prompt_tokens"]) == (1111, 2222, 5)
    store.close()


def test_the_cost_book_adds_and_keeps_maxima(store: Store):
    book = CostBook(store)
    book.add("rl", 0, {"cost/cpu_s": 2.0, "cost/peak_memory_bytes": 50})
    book.add("rl", 1, {"cost/cpu_s": 3.0, "cost/peak_memory_bytes": 70})
    book.add("midtrain", 0, {"cost/peak_memory_bytes": 60})
    with book.measure("eval", 0) as extra:
        extra["cost/prompt_tokens"] = 5.0
    assert book.by_phase()["rl"] == {"cost/cpu_s": 5.0, "cost/peak_memory_bytes": 70.0}
    assert book.by_step("rl")[1] == {"cost/cpu_s": 3.0, "cost/peak_memory_bytes": 70.0}
    assert book.totals()["cost/peak_memory_bytes"] > 70  # the measured block saw this process
    assert book.by_phase()["eval"]["cost/prompt_tokens"] == 5.0
    rows = {row["key"]: row for row in book.table()}
    assert (rows["cost/cpu_s"]["unit"], rows["cost/cpu_s"]["rl"], "midtrain" in rows["cost/cpu_s"]) == ("CPU s", 5.0, False)
    with pytest.raises(ConfigError, match="cost/cpu"):
        book.add("rl", 0, {"cost/cpus": 1.0})
