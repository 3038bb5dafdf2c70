"""kill -9 anywhere: what was committed is there, whole and once; what wasn't is gone."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.core.config import RunConfig
from strop.ledger import CostBook
from strop.store import RunDir
from strop.store import checkpoint as checkpoint_module
from strop.store import files as files_module

STEPS, EPISODES = 4, 4
Episodes = Callable[..., Any]


def work(path: Path, episode: Episodes, pause_s: float = 0.0) -> None:
    """A small run with the order of writes of the real loop; continues wherever it stands."""
    with RunDir.create(path, RunConfig(name="kill"), resume=True) as run:
        store = run.store
        last = store.last_step()
        weights = np.zeros(500, np.float32) if last is None else store.load_state(last.checkpoint)[0]["weights"]
        for step in range(0 if last is None else last.step + 1, STEPS):
            for sample in range(EPISODES):
                store.put_episode(episode(step, sample))
                time.sleep(pause_s)
            weights = weights * np.float32(0.5) + np.float32(step)
            store.log(step, {"rl/reward": step / 10})
            store.add_costs("rl", step, {"cost/cpu_s": 1.0})
            store.put_fact("step", step)
            store.put_fact(f"only {step}", True)
            store.save_state(f"step-{step}", {"weights": weights, "step": step})
            store.commit_step(step, checkpoint=f"step-{step}", total=float(weights.sum()))
        if not store.is_done("rl"):
            store.save_checkpoint("rl", {"weights": weights})
            store.set_stage("rl")


def contents(path: Path) -> dict[str, Any]:
    """Everything that a run is, less clock times."""
    with RunDir.create(path, RunConfig(name="kill"), resume=True) as run:
        store = run.store
        return {
            "episodes": [(str(e.key), e.outcome, e.traces[0].token_ids.tolist()) for e in store.episodes()],
            "metrics": [{key: value for key, value in record.items() if key != "time"} for record in store.metrics()],
            "costs": CostBook(store).totals(),
            "commits": [(c.phase, c.step, c.stage, c.checkpoint, c.facts) for c in store.commits()],
            "stage": store.stage(),
            "facts": [store.fact("step"), *(store.fact(f"only {step}") for step in range(STEPS))],
            "checkpoints": {name: store.load_checkpoint(name).digest for name in store.shelf.names()},
        }


def check_consistent(path: Path) -> int:
    """A run that was killed holds exactly its committed steps. Returns how many."""
    found = contents(path)
    steps = [step for phase, step, *_ in found["commits"] if phase == "rl"]
    assert steps == list(range(len(steps)))
    assert len(found["episodes"]) == EPISODES * len(steps)
    assert [record["step"] for record in found["metrics"]] == steps
    assert found["costs"].get("cost/cpu_s", 0) == len(steps)
    assert found["facts"] == [steps[-1] if steps else None, *(True if step in steps else None for step in range(STEPS))]
    assert not [entry for entry in path.rglob("*") if entry.name.startswith((".tmp-", ".old-"))]
    return len(steps)


def in_child(action: Callable[[], None]) -> int:
    """Run in a forked process that ends without any clean-up of Python's."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(3)
    return pid


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: kill -9 doesn't ask a disk, and many commits are slow on one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def undisturbed(memory: Path, episode: Episodes) -> dict[str, Any]:
    work(memory / "undisturbed", episode)
    return contents(memory / "undisturbed")


def test_twenty_random_kills(memory: Path, episode: Episodes, undisturbed: dict[str, Any]):
    path, rng = memory / "killed", np.random.default_rng(7)
    kills = 0
    for _ in range(200):
        pid = in_child(lambda path=path: work(path, episode, pause_s=0.004))
        time.sleep(float(rng.uniform(0.01, 0.06)))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        kills += os.WIFSIGNALED(status)
        check_consistent(path)
        if kills == 20:
            break
        if os.WIFEXITED(status):  # it had come to its end: kill another one
            assert os.WEXITSTATUS(status) == 0
            assert contents(path) == undisturbed
            path = memory / f"killed-{kills}-{_}"
    assert kills == 20
    work(path, episode)
    assert contents(path) == undisturbed


@pytest.mark.parametrize("name", ["replace", "rename", "fsync", "ftruncate", "write"])
def test_a_kill_at_every_system_call_of_a_kind(name: str, memory: Path, episode: Episodes, undisturbed: dict[str, Any], monkeypatch):
    """Planted: the process dies right before and right after its n-th such call, for n spread over the run."""
    real, calls = getattr(os, name), [0]

    def count(*args):
        calls[0] += 1
        return real(*args)

    monkeypatch.setattr(os, name, count)
    work(memory / f"counted-{name}", episode)
    monkeypatch.setattr(os, name, real)
    assert calls[0] > 0
    for nth in sorted({1 + calls[0] * part // 5 for part in range(5)} | {calls[0]}):
        path = memory / f"{name}-{nth}"

        def die(*args, nth=nth):
            calls[0] += 1
            if calls[0] < nth:
                return real(*args)
            if nth % 2:
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        calls[0] = 0
        monkeypatch.setattr(os, name, die)
        _, status = os.waitpid(in_child(lambda path=path: work(path, episode)), 0)
        monkeypatch.setattr(os, name, real)
        assert os.WIFSIGNALED(status)
        check_consistent(path)
        work(path, episode)
        assert contents(path) == undisturbed


def test_the_check_finds_a_store_that_does_not_recover(tmp_path: Path, episode: Episodes, monkeypatch):
    """Planted fault: without recovery the same check must fail."""
    from strop.store import rundir

    with RunDir.create(tmp_path / "r", RunConfig(name="kill")) as run:
        run.store.put_episode(episode(0, 0))
    real = rundir.Store
    monkeypatch.setattr(rundir, "Store", lambda path, recover=False, read_only=False: real(path, recover=False, read_only=read_only))
    with pytest.raises(AssertionError):
        check_consistent(tmp_path / "r")


def test_modules_share_one_os():
    """The kill test patches ``os``; it would miss a module that copies names out of it."""
    assert checkpoint_module.os is os
    assert files_module.os is os
