"""The embedded engine when something goes wrong: deadlines, a model that hangs or fails, sessions that are closed or used twice."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine_setups import MAX_TOKENS, PROMPT, ScriptedModel, generate, key, scripted_engine, scripted_weights, wait_until

from strop.core.config import EngineConfig
from strop.core.errors import EngineError
from strop.engine.embedded import Deadlines, EmbeddedEngine


class StuckModel(ScriptedModel):
    """Waits in its first call until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def infer(self, rows, cache, want):
        self.release.wait(10)
        return super().infer(rows, cache, want)


def stuck_engine(**deadlines: float) -> tuple[EmbeddedEngine, StuckModel]:
    model = StuckModel()
    config = EngineConfig(max_sessions=2, max_tokens=MAX_TOKENS, max_batch=2, prefill_rows=32)
    return EmbeddedEngine(config, model, seed=0, make_cache=model.make_cache, deadlines=Deadlines(**deadlines)), model


def test_every_wait_has_a_deadline_that_says_what_was_waited_for():
    async def main():
        engine, model = stuck_engine(open_s=0.05, generate_s=0.1, job_s=0.05, close_s=0.05)
        one, two = await engine.open(key(0)), await engine.open(key(1))
        with pytest.raises(EngineError, match=r"waited 0\.05 s for a free session for test/0/t/2: all 2 are open") as full:
            await engine.open(key(2))
        assert full.value.retryable
        running = asyncio.ensure_future(generate(one, PROMPT, 4))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"waited 0\.05 s for swap to version 1: 1 requests running"):
            await engine.swap(scripted_weights(1), 1)
        with pytest.raises(EngineError, match=r"waited 0\.1 s for tokens of test/0/t/0: 0 of 4 sampled, 60 tokens pending"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await generate(one, [1], 1)
        model.release.set()
        engine.deadlines = Deadlines()  # a busy machine may need longer
        await generate(two, PROMPT, 2)  # the engine itself is fine
        await engine.close()

    asyncio.run(main())


def test_a_step_that_never_ends_breaks_the_engine_with_a_message():
    async def main():
        engine, model = stuck_engine(step_s=0.05, close_s=0.05)
        session = await engine.open(key(0))
        with pytest.raises(EngineError, match=r"engine broke after 0 steps: .*waited 0\.05 s for a step of 32 rows"):
            await generate(session, PROMPT, 4)
        with pytest.raises(EngineError, match="engine is broken"):
            await engine.open(key(1))
        model.release.set()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("offload", [True, False])
def test_a_failing_model_fails_every_session(offload):
    async def main():
        engine, model = scripted_engine(max_sessions=2, offload=offload)
        model.fail_at = 3
        sessions = [await engine.open(key(i)) for i in range(2)]
        waiting = asyncio.ensure_future(engine.open(key(5)))
        results = await asyncio.gather(*(generate(s, PROMPT, 40) for s in sessions), waiting, return_exceptions=True)
        assert all(isinstance(r, EngineError) and "planted failure" in str(r) for r in results), results
        with pytest.raises(EngineError, match="planted failure"):
            await engine.swap(scripted_weights(1), 1)
        await engine.close()

    asyncio.run(main())


def test_a_log_probability_that_is_not_finite_stops_the_engine():
    async def main():
        engine, model = scripted_engine()
        model.nan_at = 4
        session = await engine.open(key(0))
        with pytest.raises(EngineError, match=r"log-probability nan at position 62 of test/0/t/0 under version 0"):
            await generate(session, PROMPT, 40)
        await engine.close()

    asyncio.run(main())


def test_closing_a_session_in_use_fails_its_call_only():
    async def main():
        engine, _ = scripted_engine()
        one, two = await engine.open(key(0)), await engine.open(key(1))
        running = [asyncio.ensure_future(generate(s, PROMPT, 60)) for s in (one, two)]
        await wait_until(lambda: len(one) > len(PROMPT) + 2, "tokens")
        await one.close()
        with pytest.raises(EngineError, match="closed while generating"):
            await running[0]
        assert len(await running[1]) == 60
        with pytest.raises(EngineError, match="closed"):
            one.feed([1])
        await engine.close()

    asyncio.run(main())


def test_one_call_at_a_time():
    async def main():
        engine, _ = scripted_engine()
        session = await engine.open(key(0))
        running = asyncio.ensure_future(generate(session, PROMPT, 20))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already generating"):
            await generate(session, [1], 1)
        with pytest.raises(EngineError, match="already generating"):
            session.feed([1])
        await running
        await engine.close()

    asyncio.run(main())


def test_an_idle_engine_outlives_its_event_loop():
    engine, _ = scripted_engine()

    async def once(sample: int) -> list[int]:
        session = await engine.open(key(sample))
        tokens = await generate(session, PROMPT, 5)
        await session.close()
        return tokens

    assert asyncio.run(once(0)) == asyncio.run(once(0))
    asyncio.run(engine.close())
