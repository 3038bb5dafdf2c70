"""Conformance suite of the engine port. Ships with the package, so that authors of engines can run it on theirs.

    from strop.engine.conformance import CHECKS, run_check
    for name in CHECKS:
        asyncio.run(run_check(name, my_setup))

A check that fails raises ``AssertionError`` with one sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from strop.core.episode import Trace
from strop.core.random import generator
from strop.engine.conformance_kit import EngineSetup, endless, expect, expect_error, expect_same, key, play, prompt, sampled

DEADLINE_S = 60.0

__all__ = ["CHECKS", "EngineSetup", "run_check"]


Check = Callable[[EngineSetup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def _check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


async def run_check(name: str, setup: EngineSetup) -> None:
    """Run one check with a deadline.

    Raises:
        AssertionError: The engine does not conform; the message says how.
    """
    try:
        async with asyncio.timeout(DEADLINE_S):
            await CHECKS[name](setup)
    except TimeoutError:
        raise AssertionError(f"{name} did not finish in {DEADLINE_S:g} s: something waits for ever") from None


# ------------------------------------------------------------------------------------------------ determinism


@_check
async def results_do_not_depend_on_batch_mates(setup: EngineSetup) -> None:
    """Episodes alone, together, and in a narrow engine give the same tokens, log-probabilities and routes."""
    alone = []
    for number in range(6):
        engine = setup.make(3, 0, 8)
        alone.append(await play(engine, setup, number))
        await engine.close()
    for sessions in (8, 2):
        engine = setup.make(3, 0, sessions)
        together = await asyncio.gather(*(play(engine, setup, number) for number in range(6)))
        await engine.close()
        for number, (one, two) in enumerate(zip(alone, together, strict=True)):
            expect_same(one, two, setup, f"episode {number} alone and in an engine of {sessions} sessions")


@_check
async def results_do_not_depend_on_timing(setup: EngineSetup) -> None:
    """Random pauses between turns change nothing."""
    traces = []
    for attempt in range(2):
        rng = generator("pauses", attempt)
        engine = setup.make(3, 0, 4)
        traces.append(await asyncio.gather(*(play(engine, setup, n, delay=lambda: float(rng.uniform(0, 0.01))) for n in range(5))))  # noqa: B023
        await engine.close()
    for number, (one, two) in enumerate(zip(*traces, strict=True)):
        expect_same(one, two, setup, f"episode {number} with other pauses")


@_check
async def sampling_is_keyed_and_follows_its_probabilities(setup: EngineSetup) -> None:
    """Other keys give other tokens, as often as their log-probabilities say; another seed gives other tokens."""
    engine = setup.make(5, 0, 16)
    ids, tries = prompt(setup, 1, 12), 192

    async def first(number: int) -> tuple[int, float]:
        session = await engine.open(key(number))
        await sampled(session, ids, 1)
        trace = session.trace()
        await session.close()
        return int(trace.token_ids[-1]), float(trace.logprobs[-1])

    draws = await asyncio.gather(*(first(number) for number in range(tries)))
    await engine.close()
    chances = {token: float(np.exp(logprob)) for token, logprob in draws}
    expect(len(chances) > 1, "every key sampled the same token")
    for token, chance in chances.items():
        count = sum(drawn == token for drawn, _ in draws)
        spread = 5 * np.sqrt(tries * chance * (1 - chance)) + 1
        expect(abs(count - tries * chance) <= spread, f"token {token} of probability {chance:.3f} was sampled {count} of {tries} times")
    other = setup.make(6, 0, 16)
    engine = other
    again = await asyncio.gather(*(first(number) for number in range(24)))
    await other.close()
    expect([t for t, _ in again] != [t for t, _ in draws[:24]], "the seed has no effect on sampling")


@_check
async def greedy_takes_the_likeliest_token(setup: EngineSetup) -> None:
    """Temperature 0 ignores the key and records the log-probability of temperature 1."""
    engine = setup.make(5, 0, 8)
    sessions = [await engine.open(key(number)) for number in range(6)]
    greedy = [await sampled(session, prompt(setup, 2, 15), 4, 0.0) for session in sessions[:2]]
    expect(greedy[0] == greedy[1], "greedy tokens depend on the episode key")
    best = sessions[0].trace()
    for session in sessions[2:]:
        await sampled(session, prompt(setup, 2, 15), 1)
        trace = session.trace()
        difference = float(trace.logprobs[15] - best.logprobs[15])
        is_same = trace.token_ids[15] == best.token_ids[15]
        expect(difference <= setup.tolerance, "a sampled token is likelier than the greedy one")
        expect(not is_same or abs(difference) <= setup.tolerance, "the greedy log-probability is not that of temperature 1")
    await engine.close()


# ------------------------------------------------------------------------------------------------ sessions


@_check
async def continuation_equals_one_shot(setup: EngineSetup) -> None:
    """Stopping and going on, feeding in parts, and feeding the whole stream as one prompt all sample the same tokens."""
    ids = prompt(setup, 4, 40)
    engine = setup.make(9, 0, 8)
    sessions = [await engine.open(key(0)) for _ in range(4)]
    whole = await sampled(sessions[0], ids, 9)
    parts = await sampled(sessions[1], ids, 4)
    parts += await sampled(sessions[1], [], 5)
    sessions[2].feed(ids[:7])
    sessions[2].feed(ids[7:22])
    fed = await sampled(sessions[2], ids[22:], 9)
    tail = await sampled(sessions[3], ids + whole[:5], 4)
    expect(parts == whole, "generate twice gives other tokens than generate once")
    expect(fed == whole, "a prompt fed in parts gives other tokens than in one piece")
    expect(tail == whole[5:], "a stream given as one prompt continues differently")
    expect_same(sessions[0].trace(), sessions[1].trace(), setup, "one call and two calls")
    expect(int(sessions[3].trace().loss_mask.sum()) == 4, "tokens of a prompt are marked as sampled")
    await engine.close()


@_check
async def generation_ends_where_it_should(setup: EngineSetup) -> None:
    """A stop token is included and ends the call with ``stop``; otherwise the limit ends it with ``length``."""
    engine = setup.make(9, 0, 4)
    session = await engine.open(key(0))
    free = await session.generate(prompt(setup, 5, 20), max_new_tokens=12, stop_ids=[], temperature=1.0)
    expect(
        free.finish_reason == "length" and len(free.token_ids) == 12,
        f"without stop ids got {len(free.token_ids)} tokens, {free.finish_reason}",
    )
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    again = await engine.open(key(0))
    stopped = await again.generate(prompt(setup, 5, 20), max_new_tokens=12, stop_ids=[stop], temperature=1.0)
    expect(stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist(), "a stop id changes tokens or is not the last token")
    expect(stopped.finish_reason == "stop", f"finish reason is {stopped.finish_reason!r} after a stop token")
    last = await (await engine.open(key(0))).generate(prompt(setup, 5, 20), max_new_tokens=first + 1, stop_ids=[stop], temperature=1.0)
    expect(last.finish_reason == "stop", "a stop token at the limit is reported as length")
    await engine.close()


@_check
async def traces_hold_their_invariants(setup: EngineSetup) -> None:
    """Tokens in are tokens out; mask, log-probabilities, versions and routes fit the stream."""
    engine = setup.make(2, 0, 4)
    session = await engine.open(key(1))
    expect(len(session.trace()) == 0, "a new session is not empty")
    expected: list[int] = []
    mask: list[bool] = []
    for turn in range(3):
        ids = prompt(setup, 10 + turn, 18 if turn == 0 else 4)
        tokens = await sampled(session, ids, 5)
        expected += ids + tokens
        mask += [False] * len(ids) + [True] * 5
    before = session.trace()
    session.feed([1, 2, 3])
    trace = session.trace()
    await engine.close()
    expect(len(before) == len(expected), "a trace changes after it was taken")
    expect(trace.token_ids.tolist() == [*expected, 1, 2, 3], "the tokens of the stream are not those fed and sampled")
    expect(trace.loss_mask.tolist() == [*mask, False, False, False], "the loss mask does not mark exactly the sampled tokens")
    inside = trace.logprobs[trace.loss_mask]
    expect(bool(np.isfinite(inside).all() and (inside <= 0).all() and (inside < 0).any()), "log-probabilities are not negative numbers")
    expect(not trace.logprobs[~trace.loss_mask].any(), "log-probabilities of fed tokens are not 0")
    expect([span.version for span in trace.versions] == [0], "versions are not one span of version 0")
    if engine.capabilities.returns_routes:
        expect(before.routes is not None and bool(before.routes.valid.all()), "routes of computed tokens are missing")
        expect(trace.routes is not None and len(trace.routes) == len(trace) - 1, "routes do not have one row less than tokens")
        if trace.routes is not None:
            expect(not trace.routes.valid[len(expected) - 1 :].any(), "routes of tokens that were never computed are marked valid")
            rows = trace.routes.expert_ids[trace.routes.valid].astype(int)
            expect(bool((np.diff(rows, axis=-1) > 0).all()), "expert ids of a row are not ascending and distinct")
            expect(bool((rows != rows[:1]).any()), "all rows have the same routes")


# ------------------------------------------------------------------------------------------------ versions


@_check
async def later_tokens_carry_the_version_of_a_swap(setup: EngineSetup) -> None:
    """A swap during a long call splits its tokens into contiguous spans; a new session has the new version alone."""
    engine = setup.make(4, 0, 4)
    session = await engine.open(key(0))
    count = setup.max_tokens - 32
    running = asyncio.ensure_future(session.generate(prompt(setup, 6, 20), max_new_tokens=count, stop_ids=[], temperature=1.0))
    await asyncio.sleep(0.005)
    await engine.swap(setup.weights(1), 1)
    await running
    trace = session.trace()
    versions = [span.version for span in trace.versions]
    expect(versions in ([0], [0, 1], [1]), f"spans of a stream with one swap have the versions {versions}")
    expect(bool(engine.capabilities.swaps_in_flight) or versions != [0, 1], "a stream spans two versions without swaps_in_flight")
    later = await engine.open(key(1))
    await sampled(later, prompt(setup, 6, 20), 3)
    expect([span.version for span in later.trace().versions] == [1], "a session opened after the swap does not carry its version")
    await engine.close()


@_check
async def new_sessions_use_the_new_weights_alone(setup: EngineSetup) -> None:
    """A prompt computed before a swap is computed again after it."""
    ids = prompt(setup, 7, 48)
    engine = setup.make(4, 0, 4)
    first = await engine.open(key(0))
    await sampled(first, ids, 4)
    await engine.swap(setup.weights(1), 1)
    second = await engine.open(key(0))
    await sampled(second, ids, 4)
    fresh = setup.make(4, 1, 4)
    reference = await fresh.open(key(0))
    await sampled(reference, ids, 4)
    expect_same(second.trace(), reference.trace(), setup, "a session after a swap and one in a fresh engine")
    worst = float(np.abs(second.trace().logprobs[48] - first.trace().logprobs[48]))
    expect(worst > setup.tolerance or first.trace().token_ids[48] != second.trace().token_ids[48], "the swap changed nothing")
    await engine.close()
    await fresh.close()


# ------------------------------------------------------------------------------------------------ limits and failures


@_check
async def a_stream_that_does_not_fit_is_refused_unchanged(setup: EngineSetup) -> None:
    """Overflow and bad arguments raise ``EngineError`` before anything is fed; the session stays usable."""
    engine = setup.make(1, 0, 4)
    session = await engine.open(key(0))
    await sampled(session, prompt(setup, 8, 20), 3)
    before = session.trace()

    def generate(ids: Sequence[int], count: int, temperature: float = 1.0) -> Awaitable[Any]:
        return session.generate(ids, max_new_tokens=count, stop_ids=[], temperature=temperature)

    await expect_error(generate([1], setup.max_tokens), "too many new tokens")
    await expect_error(generate([1] * setup.max_tokens, 1), "a prompt longer than the context")
    await expect_error(generate([setup.vocab_size], 1), "a token outside the vocabulary")
    await expect_error(generate([-1], 1), "a negative token")
    await expect_error(generate([1], 0), "max_new_tokens of 0")
    await expect_error(generate([1], 1, -1.0), "a negative temperature")
    await expect_error(generate([1], 1, float("nan")), "a temperature that is not a number")
    await expect_error(generate([1], 1, 1e-40), "a temperature that no logit can be divided by")
    expect(len(session.trace()) == len(before), "a refused call fed tokens")
    await sampled(session, [1, 2], 3)
    empty = await engine.open(key(2))
    await expect_error(empty.generate([], max_new_tokens=1, stop_ids=[], temperature=1.0), "generate on an empty stream")
    await engine.close()


@_check
async def a_cancelled_call_gives_its_place_back(setup: EngineSetup) -> None:
    """With one session in the engine, the next one opens after a cancellation, and its results are right."""
    engine = setup.make(1, 0, 1)
    for delay_s in (0.003, 0.001, 0.0):  # on a busy machine the call may be over before this task runs again
        session = await engine.open(key(0))
        running = endless(session, setup)
        await asyncio.sleep(delay_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if running.cancelled():
            break
        await session.close()
    expect(running.cancelled(), "a cancelled call answered")
    waiting = asyncio.ensure_future(engine.open(key(7)))
    await asyncio.sleep(0)
    await session.close()
    await waiting
    await (await waiting).close()
    trace = await play(engine, setup, 3)
    await engine.close()
    other = setup.make(1, 0, 1)
    expect_same(trace, await play(other, setup, 3), setup, "an episode after a cancelled one")
    await other.close()


@_check
async def more_sessions_than_places_all_finish(setup: EngineSetup) -> None:
    """Forty episodes in an engine for three; also when a waiting ``open`` is cancelled."""
    engine = setup.make(1, 0, 3)
    episodes = [asyncio.ensure_future(play(engine, setup, number, turns=2)) for number in range(40)]
    await asyncio.sleep(0.002)
    for episode in episodes[20:24]:
        episode.cancel()
    results = await asyncio.gather(*episodes, return_exceptions=True)
    traces = [result for result in results if isinstance(result, Trace)]
    errors = [result for result in results if isinstance(result, Exception)]
    expect(not errors, f"an episode failed: {errors[:1]}")
    expect(len(traces) >= 36, f"{len(traces)} of 36 episodes finished")
    held = [await engine.open(key(number)) for number in range(3)]
    for session in held:
        await session.close()
        await session.close()
    await engine.close()


@_check
async def closing_the_engine_fails_running_calls(setup: EngineSetup) -> None:
    """Running, waiting and later calls get ``EngineError``; closing twice is fine; traces can still be read."""
    engine = setup.make(1, 0, 1)
    session = await engine.open(key(0))
    running = endless(session, setup)
    waiting = asyncio.ensure_future(engine.open(key(1)))
    await asyncio.sleep(0.003)
    await engine.close()
    await engine.close()
    await expect_error(running, "a running call of a closed engine")
    await expect_error(waiting, "a waiting open of a closed engine")
    await expect_error(engine.open(key(2)), "open of a closed engine")
    await expect_error(session.generate([1], max_new_tokens=1, stop_ids=[], temperature=1.0), "generate of a closed engine")
    expect(len(session.trace()) >= 20, "the trace of a session is lost when the engine closes")
    await session.close()
