"""A full disk gives one clear error and damages nothing."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strop.core.config import RunConfig
from strop.core.errors import CheckpointError
from strop.store import RunDir
from strop.store import files as files_module

CONFIG = RunConfig(name="full")


def fill(path: Path, episode, limit: int = 10_000) -> int:
    """Write steps until the disk is full; returns the committed ones."""
    with RunDir.create(path, CONFIG, resume=True) as run:
        store = run.store
        last = store.last_step()
        step = 0 if last is None else last.step + 1
        while step < limit:
            for sample in range(8):
                store.put_episode(episode(step, sample))
            store.log(step, {"rl/reward": 0.5})
            store.save_state("state-" + "ab"[step % 2], {"w": np.full(20_000, step, np.float32)})
            store.commit_step(step, checkpoint="state-" + "ab"[step % 2])
            step += 1
    return step


def check_whole(path: Path) -> int:
    with RunDir.open(path) as run:
        steps = [commit.step for commit in run.store.commits()]
        assert steps == list(range(len(steps)))
        for episode in run.store.episodes():
            assert len(episode.traces[0]) == 40
        last = run.store.last_step()
        assert last is not None
        assert run.store.load_state(last.checkpoint)[0]["w"][0] == last.step
    return len(steps)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 3 MiB."""
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(target)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user can't mount a small file system")
    yield target
    subprocess.run(["umount", "-l", str(target)], check=True)


def test_a_really_full_disk(small_disk: Path, episode):
    with pytest.raises(CheckpointError, match=r"no space left while .*free on that disk.*--resume"):
        fill(small_disk / "run", episode)
    before = check_whole(small_disk / "run")
    assert before > 2
    # Room again: the run goes on where it was.
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert fill(small_disk / "run", episode, limit=before + 3) == before + 3
    assert check_whole(small_disk / "run") == before + 3


def test_a_disk_that_is_full_from_the_start(small_disk: Path):
    (small_disk / "ballast").write_bytes(bytes(3 << 20))
    with pytest.raises(CheckpointError, match="no space left"):
        RunDir.create(small_disk / "run", CONFIG)


def test_a_file_size_limit(tmp_path: Path, episode):
    """The same through RLIMIT_FSIZE, which needs no privilege; in a child, since the limit can't be taken back."""
    fill(tmp_path / "run", episode, limit=2)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            fill(tmp_path / "run", episode)
        except CheckpointError as error:
            os._exit(7 if "no space left" in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    before = check_whole(tmp_path / "run")
    assert before >= 2
    assert fill(tmp_path / "run", episode, limit=before + 1) == before + 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_metrics_line_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.store.log(0, {"rl/reward": 0.5})
        real = os.write

        def half(descriptor, data):
            real(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(code, "full")

        monkeypatch.setattr(files_module.os, "write", half)
        with pytest.raises(CheckpointError, match="no space left while writing metrics"):
            run.store.log(1, {"rl/reward": 0.6})
        monkeypatch.undo()
        run.store.log(2, {"rl/reward": 0.7})
        assert [record["step"] for record in run.store.metrics()] == [0, 2]


def test_another_failure_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RunDir.create(tmp_path / "run", CONFIG) as run:

        def denied(*_):
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(files_module.os, "write", denied)
        with pytest.raises(OSError, match="broken"):
            run.store.log(1, {"rl/reward": 0.6})


def test_the_command_says_it_in_one_line(small_disk: Path):
    (small_disk / "ballast").write_bytes(bytes((3 << 20) - 8192))
    recipe = small_disk.parent / "r.toml"
    recipe.write_text("")
    code = "import sys, strop.cli.run as run; run.check_run = lambda config: None; from strop.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(recipe), "--out", str(small_disk / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: no space left")
