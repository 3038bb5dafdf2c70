"""Certificates of a whole RL phase: one an epoch, each naming the one before; a stale engine stops within one step and is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rl_toys import toy_config
from test_real_model import world

from strop.core.errors import NumericsError
from strop.numerics.certificate import FOLDER, NAME, verify_certificate
from strop.rl import loop
from strop.rl.loop import resume_step, run_rl
from strop.runtime.certify import certify_policy, explain
from strop.store import RunDir


async def phase(run: RunDir, base: Path) -> Any:
    """The RL phase as the pipeline runs it."""
    toy = world(run.config, base)

    async def certify(step: int) -> None:
        await certify_policy(run, toy.trainer, toy.engine, f"{FOLDER}/rl-{step:05d}.json", threads=1)

    try:
        start = resume_step(run.store, toy.trainer)
        await run_rl(run.config, **toy.ports(), store=run.store, certify=certify, start_step=start)
        return await certify_policy(run, toy.trainer, toy.engine, NAME, threads=1)
    except NumericsError as error:
        raise await explain(error, toy.trainer, toy.engine) from error
    finally:
        await toy.engine.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_epoch_ends_with_a_certificate_and_the_phase_with_the_last(tmp_path: Path, staleness: int) -> None:
    config = toy_config(rl={"steps": 5, "learning_rate": 0.003, "max_staleness": staleness}, numerics={"certify_steps": 2})
    with RunDir.create(tmp_path / "run", config) as run:
        summary = asyncio.run(phase(run, tmp_path))
    assert sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir()) == ["rl-00001.json", "rl-00003.json"]
    assert summary["epochs certified"] == 2
    assert summary["canary largest difference"] == 0
    body = verify_certificate(tmp_path / "run" / NAME, tmp_path / "run")
    assert body["cursor"]["step"] == 4
    assert body["previous"]


def test_a_certificate_that_a_dead_process_owed_is_written_on_resume(tmp_path: Path) -> None:
    config = toy_config(rl={"steps": 5, "learning_rate": 0.003}, numerics={"certify_steps": 2})
    with RunDir.create(tmp_path / "run", config) as run:
        toy = world(config, tmp_path)

        async def dies(step: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run_rl(config, **toy.ports(), store=run.store, certify=dies))
        assert run.store.commits(phase="rl")[-1].step == 1
        asyncio.run(phase(run, tmp_path))
    assert sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir()) == ["rl-00001.json", "rl-00003.json"]
    verify_certificate(tmp_path / "run" / NAME, tmp_path / "run")


def test_a_stale_engine_stops_within_one_step_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = loop._swap

    async def stale(engine: Any, trainer: Any, version: int) -> float:
        if version != 2:
            return await swap(engine, trainer, version)
        engine.version = version  # says that it has them
        return 0.0

    monkeypatch.setattr(loop, "_swap", stale)
    config = toy_config(rl={"steps": 5, "learning_rate": 0.003}, numerics={"certify_steps": 1})
    with RunDir.create(tmp_path / "run", config) as run:
        with pytest.raises(
            NumericsError, match=r"have the digest .*engine has .*stale or misexported.*Culprit: the engine holds other weights"
        ):
            asyncio.run(phase(run, tmp_path))
        assert run.store.commits(phase="rl")[-1].step == 1
        assert [path.name for path in (tmp_path / "run" / FOLDER).iterdir()] == ["rl-00000.json"]


def test_without_certificates_the_step_itself_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = loop._swap

    async def stale(engine: Any, trainer: Any, version: int) -> float:
        engine.version = version
        return await swap(engine, trainer, version) if version < 2 else 0.0

    monkeypatch.setattr(loop, "_swap", stale)
    config = toy_config(rl={"steps": 5, "learning_rate": 0.003}, numerics={"certify_steps": 0})
    with RunDir.create(tmp_path / "run", config) as run:
        with pytest.raises(NumericsError, match=r"rollout and trainer disagree .*Culprit: the engine holds other weights"):
            asyncio.run(phase(run, tmp_path))
        assert run.store.commits(phase="rl")[-1].step == 1
