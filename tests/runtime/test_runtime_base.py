"""A run continues from the base that it began from."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strop.core.config import RunConfig
from strop.core.errors import ConfigError
from strop.numerics.digest import weights_digest
from strop.runtime import pipeline
from strop.runtime.base import FACT
from strop.store import RunDir

CONFIG = RunConfig(name="test")
OLD: dict[str, Any] = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
STAGES = ("base_eval", "midtrain", "mid_eval", "rl", "rl_eval", "report")
OTHERS = {
    "one bit": OLD | {"a": np.nextafter(OLD["a"], np.float32(9))},
    "another shape": OLD | {"b": np.ones(4, np.float32)},
    "another name": {"a": OLD["a"], "c": OLD["b"]},
    "one more": OLD | {"c": OLD["b"]},
}


class Killed(Exception):
    pass


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts the pipeline over a base with these weights, as far as a stage; returns the stages that it did."""

    def run(weights: dict[str, Any], until: str = "") -> list[str]:
        async def close() -> None:
            pass

        def stage(name: str) -> Any:
            async def do(self: pipeline.Pipeline) -> None:
                if name == until:
                    raise Killed  # what a kill leaves: nothing behind the last commit
                if not self.store.is_done(name):
                    self.store.set_stage(name)
                    done.append(name)

            return do

        done: list[str] = []
        parts = SimpleNamespace(config=CONFIG, grader=None, base_weights=weights, close=close)
        monkeypatch.setattr(pipeline, "model_dir", lambda name: tmp_path)
        monkeypatch.setattr(pipeline, "pool_dir", lambda name: tmp_path)
        monkeypatch.setattr(pipeline, "build_parts", lambda *args: parts)
        for name in STAGES:
            monkeypatch.setattr(pipeline.Pipeline, name, stage(name))
        with RunDir.create(tmp_path / "run", CONFIG, resume=True) as opened, contextlib.suppress(Killed):
            asyncio.run(pipeline._run(CONFIG, opened, SimpleNamespace()))  # type: ignore[arg-type]
        return done

    return run


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("until", [*STAGES[1:], ""])
def test_another_base_is_refused_after_any_stage(start: Any, tmp_path: Path, until: str, other: dict[str, Any]) -> None:
    start(OLD, until)
    with pytest.raises(ConfigError, match=r"model\.base = 'builtin:.*--out") as caught:
        start(other)
    assert weights_digest(OLD) in str(caught.value)
    assert weights_digest(other) in str(caught.value)
    assert start(dict(OLD)) == (list(STAGES[STAGES.index(until) :]) if until else [])


def test_a_run_without_a_commit_begins_with_the_base_that_is_there(start: Any, tmp_path: Path) -> None:
    start(OLD, STAGES[0])
    assert start(OTHERS["one bit"]) == list(STAGES)
    with RunDir.open(tmp_path / "run") as run:
        assert run.store.fact(FACT) == weights_digest(OTHERS["one bit"])


def test_a_run_from_before_digests_were_recorded_resumes(start: Any, tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        run.store.set_stage("base_eval")
    assert start(OLD, "rl") == ["midtrain", "mid_eval"]
    assert start(OTHERS["one bit"]) == ["rl", "rl_eval", "report"]
    with RunDir.open(tmp_path / "run") as run:
        assert run.store.fact(FACT) is None
