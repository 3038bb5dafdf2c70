"""The embedded engine beyond the port: sharing, swaps, draining, recomputation, counters."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_setups import (
    MAX_TOKENS,
    PROMPT,
    SHAPE,
    decoder_weights,
    generate,
    key,
    scripted_engine,
    scripted_weights,
    wait_until,
)

from strop.core.config import EngineConfig
from strop.core.errors import WeightsError
from strop.core.metrics import validate
from strop.engine.embedded import EmbeddedEngine
from strop.engine.stream import token_versions

# ------------------------------------------------------------------------------------------------ sharing


def test_a_group_computes_its_prompt_once():
    async def main():
        engine, _model = scripted_engine(max_sessions=8, max_batch=8)
        sessions = [await engine.open(key(i)) for i in range(8)]
        await asyncio.gather(*(generate(s, PROMPT, 4) for s in sessions))
        counters = engine.counters
        assert counters.cached_tokens == 7 * (len(PROMPT) - 1)
        assert counters.prefill_tokens == len(PROMPT) + 7  # the others compute only the last token
        assert [s.cached_tokens for s in sessions] == [0] + [len(PROMPT) - 1] * 7
        traces = [s.trace() for s in sessions]
        for trace in traces:
            assert trace.routes.valid.all()
            assert (trace.routes.expert_ids[: len(PROMPT)] == traces[0].routes.expert_ids[: len(PROMPT)]).all()
        assert len({tuple(t.token_ids) for t in traces}) > 1
        await engine.close()

    asyncio.run(main())


def test_a_closed_session_still_lends_its_prefix_until_its_slot_is_taken():
    async def main():
        engine, _ = scripted_engine(max_sessions=2)
        first = await engine.open(key(0))
        answer = await generate(first, PROMPT, 4)
        await first.close()
        second = await engine.open(key(1))  # takes the other slot
        await generate(second, PROMPT + answer + [1, 2], 2)
        # sampled rows are lent like fed ones; the last sampled token was never computed
        assert second.cached_tokens == len(PROMPT) + 3
        third = await engine.open(key(2))  # takes the first one's slot: now only the second lends
        await generate(third, PROMPT, 2)
        assert third.cached_tokens == len(PROMPT) - 1
        await engine.close()

    asyncio.run(main())


def test_the_cache_of_a_closed_session_is_freed_as_soon_as_nobody_can_borrow_from_it():
    async def main():
        engine, model = scripted_engine(max_sessions=3)
        lender, other = await engine.open(key(0)), await engine.open(key(1))
        await generate(lender, PROMPT, 4)
        await lender.close()
        await generate(other, [5, 6, 7], 2)
        held = model.caches[0].tokens[0]
        assert held[: len(PROMPT)].tolist() == PROMPT  # still lent to whoever comes next
        await engine.swap(scripted_weights(1), 1)
        await generate(other, [8], 2)
        assert (held == -1).all()  # nobody may use what older weights computed
        short = await engine.open(key(2))  # takes the third slot; its stream is computed with the new weights
        await generate(short, PROMPT, 3)
        await engine.swap(scripted_weights(2), 2)
        await short.close()
        await generate(other, [9], 2)
        assert (model.caches[0].tokens[2] == -1).all()
        assert (model.caches[0].tokens[1] >= 0).sum() == len(other) - 1  # an open session keeps its own
        again = await engine.open(key(3))  # a freed slot in use again
        await generate(again, PROMPT, 3)
        assert again.cached_tokens == 0
        await engine.close()

    asyncio.run(main())


def test_prefix_of_another_length_is_shared_to_the_token():
    async def main():
        engine, _model = scripted_engine(max_sessions=4)
        one, two, three = [await engine.open(key(i)) for i in range(3)]
        await generate(one, PROMPT, 2)
        await generate(two, [*PROMPT[:37], 5, 6, 7], 2)
        await generate(three, [*PROMPT[:10], 9], 2)
        assert (two.cached_tokens, three.cached_tokens) in ((37, 0), (37 + (PROMPT[37] == 5), 0))  # 10 tokens are less than a block
        await engine.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ swaps


def test_a_swap_in_flight_splits_a_running_stream_and_recompute_reproduces_it():
    async def main():
        engine, model = scripted_engine(seed=3)
        session = await engine.open(key(0))
        running = asyncio.ensure_future(generate(session, PROMPT, 80))
        await wait_until(lambda: len(session) > len(PROMPT) + 10, "tokens of version 0")
        await engine.swap(scripted_weights(1), 1)
        await running
        await generate(session, [4, 5, 6], 5)
        trace = session.trace()
        assert [span.version for span in trace.versions] == [0, 1]
        start = trace.versions[1].start
        assert len(PROMPT) < start < len(PROMPT) + 80
        # the cache keeps what older weights computed, and row i belongs to the version of token i + 1
        cache = model.caches[0].versions[0, : len(trace) - 1]
        assert (cache == token_versions(trace)[1:]).all()
        replayed = await engine.recompute(trace, key=key(0), weights_for=scripted_weights)
        assert replayed.token_ids.tolist() == trace.token_ids.tolist()
        assert replayed.logprobs.tolist() == trace.logprobs.tolist()
        assert (replayed.routes.expert_ids == trace.routes.expert_ids).all()
        assert replayed.versions == trace.versions
        assert model.version == 1
        other = await engine.recompute(trace)
        assert np.abs(other.logprobs - trace.logprobs)[len(PROMPT) : start].max() > 0.01
        assert other.token_ids.tolist() == trace.token_ids.tolist()
        assert engine.counters.swaps_in_flight == 1
        await engine.close()

    asyncio.run(main())


def test_a_drained_swap_lets_running_calls_finish_and_holds_new_ones_back():
    async def main():
        engine, _ = scripted_engine()
        old, new = await engine.open(key(0)), await engine.open(key(1))
        running = asyncio.ensure_future(generate(old, PROMPT, 60))
        await wait_until(lambda: len(old) > len(PROMPT), "the first token")
        swap = asyncio.ensure_future(engine.swap(scripted_weights(1), 1, drain=True))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(generate(new, PROMPT, 3))
        await swap
        assert running.done()
        await late
        assert [span.version for span in old.trace().versions] == [0]
        assert [span.version for span in new.trace().versions] == [1]
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [33, 64, 65, 130])  # the last chunk has 1, 32, 1 and 2 rows
def test_a_swap_never_splits_what_is_being_fed(length):
    async def main():
        engine, model = scripted_engine(prefill_rows=32)
        session = await engine.open(key(0))
        ids = (PROMPT * 3)[:length]
        running = asyncio.ensure_future(generate(session, ids, 5))
        await wait_until(lambda: len(model.calls) >= 1, "the first chunk")
        await engine.swap(scripted_weights(1), 1)
        await running
        versions = token_versions(session.trace())
        assert len(set(versions[:length].tolist())) == 1
        assert (model.caches[0].versions[0, : length + 4] == versions[1:]).all()
        await engine.close()

    asyncio.run(main())


def test_wrong_digest_and_wrong_weights_leave_the_engine_as_it_was():
    async def main():
        from strop.model.inference import InferenceModel
        from strop.numerics.digest import weights_digest
        from strop.weights.export import check_weights, export_weights, send_weights

        zero, one = decoder_weights(0), decoder_weights(1)
        config = EngineConfig(max_sessions=2, max_tokens=MAX_TOKENS, max_batch=2, prefill_rows=32)
        engine = EmbeddedEngine(config, InferenceModel(SHAPE, zero, threads=1), seed=0)
        session = await engine.open(key(0))
        await generate(session, PROMPT, 2)
        ref, frozen = export_weights(one, 1)
        assert ref.digest == weights_digest(one)
        frozen["model.norm.weight"][3] += 1e-3  # damaged on the way
        with pytest.raises(WeightsError, match="changed on the way"):
            await engine.swap(frozen, 1, digest=ref.digest)
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            await engine.swap({k: v for k, v in one.items() if k != "model.norm.weight"}, 1)
        assert engine.version == 0
        await generate(session, [1], 2)
        sent = await send_weights(engine, one, 1)
        assert sent == ref
        assert engine.version == 1
        before = {name: tensor.clone() for name, tensor in one.items()}
        _, frozen = export_weights(one, 1)
        for tensor in one.values():
            tensor.mul_(2.0)
        check_weights(frozen, ref)  # the snapshot doesn't follow the trainer
        assert all((frozen[name] == before[name]).all() for name in before)
        if "lm_head.weight" in frozen:
            assert frozen["lm_head.weight"].data_ptr() == frozen["model.embed_tokens.weight"].data_ptr()
        await engine.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ recomputation, counters, scheduling


def test_recompute_goes_on_beside_running_sessions_and_changes_nothing():
    async def main():
        engine, _ = scripted_engine(seed=1)
        session = await engine.open(key(0))
        await generate(session, PROMPT, 10)
        session.feed([3, 4])
        trace = session.trace()
        other = await engine.open(key(1))
        running = asyncio.ensure_future(generate(other, PROMPT[::-1], 60))
        fresh = await engine.recompute(trace, key=key(0))
        wrong_key = await engine.recompute(trace, key=key(9))
        tokens = await running
        assert fresh.token_ids.tolist() == trace.token_ids.tolist()
        assert fresh.logprobs.tolist() == trace.logprobs.tolist()
        assert (fresh.routes.expert_ids == trace.routes.expert_ids)[trace.routes.valid].all()
        assert fresh.routes.valid.all()
        assert not trace.routes.valid[-2:].any()
        assert wrong_key.token_ids.tolist() != trace.token_ids.tolist()
        assert wrong_key.token_ids[: len(PROMPT)].tolist() == PROMPT
        empty = (await engine.open(key(3))).trace()
        assert len(await engine.recompute(empty)) == 0
        await engine.close()
        alone, _ = scripted_engine(seed=1)
        again = await alone.open(key(1))
        assert await generate(again, PROMPT[::-1], 60) == tokens
        await alone.close()

    asyncio.run(main())


def test_greedy_recompute_matches():
    async def main():
        engine, _ = scripted_engine()
        session = await engine.open(key(0))
        await generate(session, PROMPT, 10, temperature=0.0)
        trace = session.trace()
        for options in ({"key": key(4)}, {}):
            fresh = await engine.recompute(trace, temperature=0.0, **options)
            assert fresh.token_ids.tolist() == trace.token_ids.tolist()
            assert fresh.logprobs.tolist() == trace.logprobs.tolist()
        await engine.close()

    asyncio.run(main())


def test_counters_add_up():
    async def main():
        engine, model = scripted_engine(max_sessions=3, max_batch=3)
        before = engine.counters.snapshot()
        sessions = [await engine.open(key(i)) for i in range(3)]
        for session in sessions:
            await generate(session, PROMPT, 5)
            await generate(session, [1, 2], 3)
        done = engine.counters - before
        assert done.decode_tokens == 3 * 8
        assert done.prefill_tokens + done.cached_tokens == 3 * (len(PROMPT) + 2)
        assert done.rows == sum(rows for rows, _ in model.calls)
        assert done.steps == len(model.calls)
        assert done.decode_rows == done.decode_tokens
        assert done.busy_s > 0
        assert before.steps == 0
        validate(done.metrics())
        assert engine.metrics() == done.metrics()
        assert not any(engine.metrics().values())  # nothing since
        await engine.close()

    asyncio.run(main())


def test_more_streams_than_batch_rows_are_served_in_turn():
    async def main():
        engine, model = scripted_engine(max_sessions=7, max_batch=3)
        sessions = [await engine.open(key(i)) for i in range(7)]
        running = [asyncio.ensure_future(generate(s, [i, i + 1], 30)) for i, s in enumerate(sessions)]
        await wait_until(lambda: min(len(s) for s in sessions) >= 12, "every stream to advance")
        lengths = [len(s) for s in sessions]
        assert max(lengths) - min(lengths) <= 3
        await asyncio.gather(*running)
        assert max(wanted for _, wanted in model.calls) <= 3 + 7
        await engine.close()

    asyncio.run(main())
