"""Tools of the conformance suite: what it needs to know about an engine, and how it compares streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.core.episode import EpisodeKey, Trace
from strop.core.errors import EngineError
from strop.core.random import generator
from strop.ports import Engine, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """What the suite needs to know about an engine.

    Attributes:
        make: ``(seed, version, max_sessions) -> Engine`` with the weights of ``version`` loaded; each call makes an independent one.
        weights: Weights of a version, at least versions 0 and 1, which must differ clearly.
        vocab_size: Token ids lie in ``[0, vocab_size)``.
        max_tokens: Context length of the engines made, at least 128.
        tolerance: Largest difference of log-probabilities between batches, in nats; 0 for an exact engine. Another engine may
            also sample another token where the draw falls between two: checks then compare what comes before the first difference.
    """

    make: Callable[[int, int, int], Engine]
    weights: Callable[[int], Mapping[str, Any]]
    vocab_size: int
    max_tokens: int
    tolerance: float = 0.0


def key(sample: int, task: str = "conformance") -> EpisodeKey:
    """An episode key of the suite."""
    return EpisodeKey(phase="check", step=0, task_id=task, sample=sample)


def prompt(setup: EngineSetup, number: int, length: int) -> list[int]:
    """A fixed random prompt."""
    return generator("conformance", number).integers(0, setup.vocab_size, length).tolist()


def expect(condition: bool, message: str) -> None:
    """Fail with ``message`` unless ``condition``; works under ``python -O`` too."""
    if not condition:
        raise AssertionError(message)


async def play(engine: Engine, setup: EngineSetup, number: int, *, delay: Callable[[], float] | None = None, turns: int = 3) -> Trace:
    """One small episode of several turns; everything but time depends on ``number`` alone."""
    session = await engine.open(key(number))
    try:
        for turn in range(turns):
            if delay is not None:
                await asyncio.sleep(delay())
            ids = prompt(setup, 100 * (number // 2) + turn, 5)
            if turn == 0:  # all share 21 tokens, pairs share the whole prompt
                ids = prompt(setup, 0, 21) + ids + prompt(setup, number // 2, 7 * (number // 2 % 3))
            await session.generate(ids, max_new_tokens=6, stop_ids=[number % setup.vocab_size], temperature=1.0 if number % 4 else 0.7)
        return session.trace()
    finally:
        await session.close()


def expect_same(one: Trace, two: Trace, setup: EngineSetup, what: str) -> None:
    """Compare two traces of the same stream."""
    count = min(len(one), len(two))
    differ = np.flatnonzero(one.token_ids[:count] != two.token_ids[:count])
    if setup.tolerance == 0:
        expect(len(one) == len(two) and not len(differ), f"{what}: tokens differ from position {differ[0] if len(differ) else count}")
    count = int(differ[0]) if len(differ) else count
    worst = float(np.abs(one.logprobs[:count] - two.logprobs[:count]).max(initial=0))
    expect(worst <= setup.tolerance, f"{what}: log-probabilities differ by {worst:g}, allowed {setup.tolerance:g}")
    if one.routes is not None and two.routes is not None and setup.tolerance == 0:
        both = one.routes.valid & two.routes.valid
        expect(bool((one.routes.expert_ids == two.routes.expert_ids)[both].all()), f"{what}: routes differ")


async def expect_error(work: Awaitable[Any], what: str) -> None:
    """Expect an ``EngineError``."""
    try:
        await work
    except EngineError as error:
        expect(len(str(error)) > 10, f"{what}: the error says nothing")
        return
    raise AssertionError(f"{what}: expected EngineError, got an answer")


async def sampled(session: Session, ids: Sequence[int], count: int, temperature: float = 1.0) -> list[int]:
    """Generate ``count`` tokens without stop ids."""
    result = await session.generate(ids, max_new_tokens=count, stop_ids=[], temperature=temperature)
    return result.token_ids.tolist()


def endless(session: Session, setup: EngineSetup) -> asyncio.Future[Any]:
    """Start a call on an empty session that runs until the context is full."""
    ids = prompt(setup, 8, 20)
    return asyncio.ensure_future(session.generate(ids, max_new_tokens=setup.max_tokens - len(ids), stop_ids=[], temperature=1.0))
