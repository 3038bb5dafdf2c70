"""The same episodes in real boxes: what the tools say must not depend on the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from agent_kit import BUGGY, DirProvider, OneTaskPool, Plays, make_task

from strop.agent.baselines import NoChange
from strop.agent.episode import run_episode
from strop.agent.render import CompactRenderer
from strop.agent.scripted import Policy, ScriptedEngine
from strop.agent.workspace import TreeCache
from strop.core.config import SandboxConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.task import Limits, Task
from strop.ports import SandboxProvider
from strop.sandboxes import BubblewrapProvider, check_host

pytestmark = pytest.mark.skipif(any(item.is_required and not item.ok for item in check_host()), reason="no bubblewrap here")

ACTIONS = [
    ("list",),
    ("search", "def "),
    ("read", "3", "4"),
    ("edit", "3", "x", "6", "object()"),
    ("test",),
    ("undo",),
    ("edit", "pkg/numbers.py", "<", "4", ">"),
    ("search", "x > high"),
    ("test",),
    ("submit",),
]


async def play_group(
    provider: SandboxProvider, base: Path, renderer: CompactRenderer, task: Task, policy: Callable[[], Policy], count: int
) -> list[Episode]:
    engine = ScriptedEngine(renderer, lambda key: policy())
    cache = TreeCache()
    pool = OneTaskPool(task, base)
    try:
        return await asyncio.gather(
            *(
                run_episode(
                    task,
                    EpisodeKey(phase="rl", step=1, task_id=task.task_id, sample=sample),
                    engine=engine,
                    sandbox_provider=provider,
                    pool=pool,
                    renderer=renderer,
                    temperature=1.0,
                    cache=cache,
                )
                for sample in range(count)
            )
        )
    finally:
        await provider.close()


def test_a_group_in_real_boxes_and_in_a_directory_gives_one_stream(base: Path, tmp_path: Path, renderer: CompactRenderer) -> None:
    task = make_task()
    real = asyncio.run(play_group(BubblewrapProvider(SandboxConfig(workers=1)), base, renderer, task, lambda: Plays(*ACTIONS), 4))
    plain = asyncio.run(play_group(DirProvider(tmp_path), base, renderer, task, lambda: Plays(*ACTIONS), 1))
    assert "object at 0x..." in plain[0].turns[4].observation
    for episode in real:
        for turn, expected in zip(episode.turns, plain[0].turns, strict=True):
            assert (turn.status, turn.observation) == (expected.status, expected.observation)
        assert np.array_equal(episode.traces[0].token_ids, plain[0].traces[0].token_ids)
        assert episode.changes == {"pkg/numbers.py": BUGGY.replace("x < high", "x > high").encode()}
        assert episode.stats == plain[0].stats
    assert (base / "pkg" / "numbers.py").read_text() == BUGGY


def test_a_test_that_hangs_is_an_answer_not_a_failure(base: Path, renderer: CompactRenderer) -> None:
    (base / "tests" / "test_numbers.py").write_text("while True:\n    pass\n")
    task = make_task(limits=Limits(exec_s=0.3, max_turns=2, max_tokens=4000))

    class Tests(NoChange):
        def act(self, observation: str | None) -> tuple[str, list[str]]:
            return "test", []

    (episode,) = asyncio.run(play_group(BubblewrapProvider(SandboxConfig(workers=1)), base, renderer, task, Tests, 1))
    assert [turn.status for turn in episode.turns] == ["ok", "ok"]
    assert episode.turns[0].observation.endswith("[killed: ran longer than 0.3 s]")
    assert episode.stop_reason == "max_turns"
    assert episode.stats["killed_timeout"] == 2.0
