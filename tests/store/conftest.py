"""Episodes to store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strop.core.episode import Episode, EpisodeKey, Trace, Turn, VersionSpan
from strop.core.outcome import Flag, Outcome, Scored
from strop.core.random import generator
from strop.core.routes import Routes


def make_episode(step: int = 0, sample: int = 0, *, phase: str = "rl", task: str = "a/b:c#1", outcome: Outcome | None = None) -> Episode:
    """An episode that depends on its key alone."""
    rng = generator("episode", phase, step, task, sample)
    length, prompt = 40, 12
    mask = np.arange(length) >= prompt
    trace = Trace(
        token_ids=rng.integers(0, 3072, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=(VersionSpan(start=0, end=20, version=step), VersionSpan(start=20, end=length, version=step + 1)),
        routes=Routes(expert_ids=rng.integers(0, 8, (length - 1, 6, 2)).astype(np.uint8), valid=np.ones(length - 1, np.bool_)),
    )
    turn = Turn(
        trace=0, start=12, end=30, call="edit", arguments={"file": "x.py"}, text="edit x.py", observation="ok\n1|\ud800 é", status="ok"
    )
    scored = Scored(reward=float(sample % 2), parts={"tests": 1.0}, flags=(Flag(rule="test_edit", severity="hack", evidence="tests/"),))
    return Episode(
        key=EpisodeKey(phase=phase, step=step, task_id=task, sample=sample),
        traces=(trace,),
        turns=(turn,),
        stop_reason="submitted",
        changes={"x.py": b"\x00\xff", "gone.py": None, "empty.py": b""},
        outcome=scored if outcome is None else outcome,
        costs={"cost/sampled_tokens": 28.0, "cost/sandbox_s": 0.125},
        stats={"edits": 1.0},
    )


@pytest.fixture(scope="session")
def episode() -> Callable[..., Episode]:
    return make_episode


def same(left: Episode, right: Episode) -> bool:
    """Equality that looks into arrays, bit for bit."""
    for a, b in zip(left.traces, right.traces, strict=True):
        pairs = [(a.token_ids, b.token_ids), (a.loss_mask, b.loss_mask), (a.logprobs, b.logprobs)]
        if (a.routes is None) != (b.routes is None) or a.versions != b.versions:
            return False
        if a.routes is not None and b.routes is not None:
            pairs += [(a.routes.expert_ids, b.routes.expert_ids), (a.routes.valid, b.routes.valid)]
        if any(x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes() for x, y in pairs):
            return False
    names = ("key", "turns", "stop_reason", "changes", "outcome", "costs", "stats")
    return all(getattr(left, name) == getattr(right, name) for name in names)


@pytest.fixture(scope="session")
def is_same() -> Callable[[Episode, Episode], bool]:
    return same
