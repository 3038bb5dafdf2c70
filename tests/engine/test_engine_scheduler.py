"""The planner and the engine under random traffic: every row computed once, in order, in the right slot, under the right version."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import numpy as np
from engine_setups import MAX_TOKENS, SHAPE, scripted_engine, scripted_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.episode import EpisodeKey
from strop.core.errors import EngineError
from strop.engine.scheduler import PrefixIndex, plan_step
from strop.engine.stream import BLOCK, Request, Stream, token_versions, version_spans


def stream_of(slot: int, ids: list[int], computed: int = 0, *, task: str = "s", sample: int | None = None) -> Stream:
    key = EpisodeKey(phase="test", step=0, task_id=task, sample=slot if sample is None else sample)
    stream = Stream(key, slot, max_tokens=MAX_TOKENS, moe_layers=2, top_k=2, num_experts=4)
    stream.append_fed(ids, 0)
    if computed:
        stream.mark_computed(computed, np.zeros((computed, 2, 2), np.uint8), 0)
    return stream


def request_of(arrived: int, *, is_started: bool = False) -> Request:
    return Request(
        max_new_tokens=4,
        stop_ids=frozenset(),
        temperature=1.0,
        uniforms=[0.5] * 4,
        future=None,  # type: ignore[arg-type]
        arrived=arrived,
        is_started=is_started,
    )


feeds = st.lists(st.tuples(st.integers(1, 90), st.booleans(), st.integers(0, 3)), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(feeds, st.integers(1, 6), st.integers(32, 80), st.booleans())
def test_a_plan_keeps_its_limits_and_its_layout(items, max_batch, prefill_rows, allow_new):
    index = PrefixIndex()
    running: dict[Stream, Request] = {}
    for slot, (length, is_started, family) in enumerate(items):
        ids = [(family * 31 + i) % 97 for i in range(length)]
        stream = stream_of(slot, ids, computed=length // 2 if is_started and length > 1 else 0)
        request = request_of(slot, is_started=is_started)
        stream.request = request
        running[stream] = request
    plan = plan_step(running, index, max_batch=max_batch, prefill_rows=prefill_rows, allow_new=allow_new)
    eligible = [s for s, r in running.items() if allow_new or r.is_started]
    assert (plan is None) == (not eligible)
    if plan is None:
        return
    assert sum(1 for segment in plan.segments if segment.stream.pending == 1) <= max_batch
    assert sum(segment.size for segment in plan.segments if segment.stream.pending > 1) <= prefill_rows
    owners = [segment.stream for segment in plan.segments]
    assert len(set(owners)) == len(owners)
    assert set(owners) <= set(eligible)
    at = 0
    for segment in plan.segments:
        rows = slice(segment.start, segment.start + segment.size)
        stream = segment.stream
        assert segment.start == at
        at += segment.size
        first = stream.computed + next((copy.count for copy in plan.copies if copy.stream is stream), 0)
        assert plan.rows.positions[rows].tolist() == list(range(first, first + segment.size))
        assert plan.rows.token_ids[rows].tolist() == stream.ids[first : first + segment.size].tolist()
        assert set(plan.rows.slots[rows].tolist()) == {stream.slot}
        assert (segment.want >= 0) == (first + segment.size == stream.length)
        if segment.want >= 0:
            assert plan.want[segment.want] == segment.start + segment.size - 1
    assert at == len(plan.rows.token_ids)


def test_a_prompt_that_is_being_computed_is_waited_for_only_if_most_of_it_is_shared():
    index = PrefixIndex()
    shared = list(range(64))
    streams = [stream_of(0, [*shared, 1, 2]), stream_of(1, [*shared, 3, 4, 5]), stream_of(2, shared[:20] + [9] * 60)]
    running = {stream: request_of(i) for i, stream in enumerate(streams)}
    for stream, request in running.items():
        stream.request = request
    plan = plan_step(running, index, max_batch=8, prefill_rows=512)
    assert plan is not None
    assert [segment.stream.slot for segment in plan.segments] == [0, 2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=9, unique=True), st.integers(1, 9))
def test_samples_of_a_task_lie_next_to_each_other(names, max_batch):
    running: dict[Stream, Request] = {}
    for slot, (task, sample) in enumerate(names):
        stream = stream_of(slot, [1, 2, 3], computed=2, task=task, sample=sample)
        running[stream] = stream.request = request_of(slot, is_started=True)
    plan = plan_step(running, PrefixIndex(), max_batch=max_batch, prefill_rows=32)
    assert plan is not None
    keys = [(segment.stream.key.task_id, segment.stream.key.sample) for segment in plan.segments]
    assert len(keys) == min(max_batch, len(names))
    assert keys == sorted(keys) or len(names) > max_batch
    assert plan.rows.slots.tolist() == [segment.stream.slot for segment in plan.segments]


def test_a_feed_in_progress_comes_before_new_ones_and_ends_before_a_job():
    index = PrefixIndex()
    old, new = stream_of(1, list(range(90)), computed=32), stream_of(0, [7] * 40)
    running = {new: request_of(0), old: request_of(1, is_started=True)}
    for stream, request in running.items():
        stream.request = request
    plan = plan_step(running, index, max_batch=8, prefill_rows=32)
    assert plan is not None
    assert [segment.stream for segment in plan.segments] == [old]
    plan = plan_step(running, index, max_batch=8, prefill_rows=512, allow_new=False)
    assert plan is not None
    assert [segment.stream for segment in plan.segments] == [old]


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=6), tokens, st.data())
def test_the_index_finds_real_common_prefixes_only(known, wanted, data):
    index = PrefixIndex()
    streams = [stream_of(slot, ids, computed=data.draw(st.integers(0, len(ids)))) for slot, ids in enumerate(known)]
    for stream in streams:
        index.register(stream)
    dropped = data.draw(st.sets(st.integers(0, len(known) - 1)))
    for slot in dropped:
        index.drop(slot)
        index.drop(slot)
    source, count = index.match(stream_of(99, wanted))
    best = 0
    for stream in streams:
        if stream.slot in dropped:
            continue
        limit = min(len(wanted) - 1, stream.computed)
        common = next((i for i in range(limit) if stream.ids[i] != wanted[i]), limit)
        best = max(best, common if stream.computed >= BLOCK and common >= BLOCK else 0)
    if source is not None:
        assert source.slot not in dropped
        assert count <= min(len(wanted) - 1, source.computed)
        assert source.ids[:count].tolist() == wanted[:count]
    # blocks are found in full; tokens beyond the last common block only of the stream that was found
    assert count // BLOCK >= (best // BLOCK if best // BLOCK * BLOCK <= len(wanted) - 1 else 0) or count == len(wanted) - 1
    index.clear()
    assert index.match(stream_of(99, wanted)) == (None, 0)


@given(st.lists(st.integers(0, 3), max_size=20))
def test_version_spans_round_trip(versions):
    spans = version_spans(np.array(versions, np.int64))
    assert [span.version for span in spans for _ in range(span.start, span.end)] == versions
    assert all(a.end == b.start and a.version != b.version for a, b in pairwise(spans))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_random_traffic_leaves_every_cache_row_right(seed, offload):
    """Sessions open, talk, pause, are cancelled and closed while weights change; the scripted cache knows what each row should hold."""
    rng = random.Random(seed)
    engine, model = scripted_engine(seed=seed, max_sessions=3, max_batch=rng.choice([1, 2, 4]), prefill_rows=32, offload=offload)
    shared = [rng.randrange(SHAPE.vocab_size) for _ in range(60)]

    async def episode(number: int) -> None:
        session = await engine.open(EpisodeKey(phase="test", step=0, task_id="r", sample=number))
        try:
            for turn in range(rng.randrange(1, 4)):
                cut = rng.randrange(60)
                ids = [*shared[:cut], number] if turn == 0 else [rng.randrange(SHAPE.vocab_size) for _ in range(rng.randrange(8))]
                if rng.random() < 0.2:
                    session.feed(ids[:2])
                    ids = ids[2:]
                if not len(session) + len(ids):
                    continue
                await session.generate(ids, max_new_tokens=rng.randrange(1, 9), stop_ids=[number % 7], temperature=rng.choice([0.0, 1.0]))
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            check(session)
        finally:
            await session.close()

    def check(session) -> None:
        stream = session._stream
        trace = session.trace()
        count = stream.computed
        cache = model.caches[0]
        assert cache.tokens[stream.slot, :count].tolist() == trace.token_ids[:count].tolist()
        rows = min(count, len(trace) - 1)
        assert cache.versions[stream.slot, :rows].tolist() == token_versions(trace)[1 : rows + 1].tolist()
        assert trace.routes is not None
        assert trace.routes.valid.sum() == rows

    async def main() -> None:
        running = [asyncio.ensure_future(episode(n)) for n in range(9)]
        for version in range(1, 4):
            await asyncio.sleep(rng.random() * 0.004)
            rng.choice(running).cancel()
            await engine.swap(scripted_weights(version), version, drain=rng.random() < 0.3)
        results = await asyncio.gather(*running, return_exceptions=True)
        bad = [r for r in results if isinstance(r, Exception) and not isinstance(r, EngineError)]
        assert not bad, bad
        assert not [r for r in results if isinstance(r, EngineError)], results
        assert sorted(engine._slots.free) == [0, 1, 2]
        await engine.close()

    asyncio.run(main())
