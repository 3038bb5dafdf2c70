"""Who may write into a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from strop.core.config import RunConfig, load_config
from strop.core.errors import CheckpointError, ConfigError
from strop.store import RunDir

CONFIG = RunConfig(name="test")


def test_a_run_is_never_overwritten_without_a_flag(tmp_path: Path, episode):
    with RunDir.create(tmp_path / "r", CONFIG) as run:
        run.store.put_episode(episode())
        run.store.commit_step(0)
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--clean.*--out"):
        RunDir.create(tmp_path / "r", CONFIG)
    with RunDir.create(tmp_path / "r", CONFIG, resume=True) as run:
        assert run.is_resumed
        assert run.store.counts() == {"rl": 1}
    with RunDir.create(tmp_path / "r", CONFIG, clean=True) as run:
        assert not run.is_resumed
        assert run.store.counts() == {}


def test_flags_that_exclude_each_other(tmp_path: Path):
    with pytest.raises(ConfigError, match="exclude each other"):
        RunDir.create(tmp_path / "r", CONFIG, resume=True, clean=True)


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"clean": True}])
def test_foreign_files_are_never_touched(tmp_path: Path, flags):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')  # a model's, not a run's
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not a run"):
        RunDir.create(tmp_path, CONFIG, **flags)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "thesis.tex"]


def _foreign_databases() -> dict[str, bytes]:
    """Files that may well be named ``run.db`` and are no run's."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE laps (runner TEXT, seconds REAL)")
        other = connection.serialize()
        for table in ("episodes", "costs", "commits", "facts"):
            connection.execute(f"CREATE TABLE {table} (name TEXT)")
        same_names = connection.serialize()
    return {"empty": b"", "text": b"marathon 4:12\n", "torn": other[:100] + b"\xff" * 4000, "other": other, "same names": same_names}


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"clean": True}])
@pytest.mark.parametrize("kind", _foreign_databases())
def test_a_strangers_database_is_no_run(tmp_path: Path, kind: str, flags):
    data = _foreign_databases()[kind]
    (tmp_path / "run.db").write_bytes(data)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not a run"):
        RunDir.create(tmp_path, CONFIG, **flags)
    with pytest.raises(CheckpointError, match="not a run directory"):
        RunDir.open(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.db", "thesis.tex"]
    assert (tmp_path / "run.db").read_bytes() == data


@pytest.mark.parametrize("left", [("config.json",), ("run.db",), ("config.json", "run.db")])
@pytest.mark.parametrize("damaged", [None, "config.json", "run.db"])
def test_what_is_left_of_a_run_can_be_cleaned(tmp_path: Path, left: tuple[str, ...], damaged: str | None):
    """Either file tells of a run, as long as it can be read; one is damaged, or was not yet written when the run was killed."""
    RunDir.create(tmp_path, CONFIG).close()
    for entry in tmp_path.iterdir():
        if entry.is_file() and entry.name not in left:
            entry.unlink()
    if damaged in left:
        (tmp_path / damaged).write_text("{")
    if set(left) == {damaged}:
        with pytest.raises(ConfigError, match="not a run"):
            RunDir.create(tmp_path, CONFIG, clean=True)
        return
    with RunDir.create(tmp_path, CONFIG, clean=True) as run:
        assert not run.is_resumed


def test_resume_needs_the_same_configuration(tmp_path: Path):
    RunDir.create(tmp_path / "r", CONFIG).close()
    other = load_config(None, ["name='test'", "rl.steps=7"])
    with pytest.raises(ConfigError, match=r"rl.steps = 7 \(was 24\)"):
        RunDir.create(tmp_path / "r", other, resume=True)


def test_resume_of_nothing_begins(tmp_path: Path):
    with RunDir.create(tmp_path / "r", CONFIG, resume=True) as run:
        assert not run.is_resumed


def test_killed_before_the_configuration_was_written(tmp_path: Path):
    (tmp_path / "lock").write_text("pid 1")
    (tmp_path / ".tmp-config.json-1").write_text("{")
    with RunDir.create(tmp_path, CONFIG) as run:
        assert run.store.stage() == ""


@pytest.mark.parametrize("name", [".tmp-my-notes.txt", ".tmp-dir/inside"])
def test_a_strangers_temporary_files_are_left_alone(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not a run"):
        RunDir.create(tmp_path, CONFIG)
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_resolved_configuration_is_written(tmp_path: Path):
    with RunDir.create(tmp_path / "r", load_config(None, ["seed=5"])) as run:
        record = json.loads((run.path / "config.json").read_text())
    assert record["config"]["seed"] == 5
    assert {"revision", "versions", "machine", "command", "created"} <= set(record)
    assert record["versions"]["python"] == sys.version.split()[0]
    with RunDir.open(tmp_path / "r") as run:
        assert run.config.seed == 5


def test_a_second_process_is_told_who_writes(tmp_path: Path):
    code = (
        "import sys, time; from strop.core.config import RunConfig; from strop.store import RunDir\n"
        "run = RunDir.create(sys.argv[1], RunConfig(name='test')); print('open', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(CheckpointError, match=rf"in use by another process \(pid {child.pid}, since"):
            RunDir.create(tmp_path / "r", CONFIG, resume=True)
        with pytest.raises(CheckpointError, match="in use"):
            RunDir.create(tmp_path / "r", CONFIG, clean=True)
        with RunDir.open(tmp_path / "r") as run:  # readers may look
            assert run.store.counts() == {}
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    RunDir.create(tmp_path / "r", CONFIG, resume=True).close()  # the lock died with its holder


def test_one_process_can_not_open_it_twice(tmp_path: Path):
    with RunDir.create(tmp_path / "r", CONFIG), pytest.raises(CheckpointError, match="already open for writing in this process"):
        RunDir.create(tmp_path / "r", CONFIG, resume=True)
    RunDir.create(tmp_path / "r", CONFIG, resume=True).close()


def test_out_is_a_file_or_can_not_be_made(tmp_path: Path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError, match="file of that name"):
        RunDir.create(tmp_path / "f", CONFIG)
    with pytest.raises(ConfigError, match="file of that name"):
        RunDir.create(tmp_path / "f" / "deeper", CONFIG)


def test_damage_is_named(tmp_path: Path):
    RunDir.create(tmp_path / "r", CONFIG).close()
    (tmp_path / "r" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        RunDir.create(tmp_path / "r", CONFIG, resume=True)
    RunDir.create(tmp_path / "s", CONFIG).close()
    (tmp_path / "s" / "run.db").write_bytes(b"not a database" * 100)
    for suffix in ("-wal", "-shm"):
        (tmp_path / "s" / f"run.db{suffix}").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"run.db can't be read"):
        RunDir.open(tmp_path / "s")
    with pytest.raises(CheckpointError, match="not a run directory"):
        RunDir.open(tmp_path / "nowhere")
