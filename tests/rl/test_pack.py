"""Packing: nothing is lost, nothing unsampled is trained on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_toys import make_sample, make_trace

from strop.core.episode import EpisodeKey, Trace, VersionSpan
from strop.core.sample import Sample
from strop.rl.pack import num_rows, pack, plan, split_by_episode


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    out = []
    for number in range(draw(st.integers(1, 7))):
        n = draw(st.integers(1, 12))
        mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        ids = np.arange(n) + 100 * number
        routes = np.stack([np.arange(n - 1), np.arange(n - 1) + 1], -1).reshape(n - 1, 1, 2).astype(np.uint8)
        trace = make_trace(ids.tolist(), mask, logprobs=(-ids / 1000).tolist(), version=number, routes=routes)
        out.append(make_sample(trace, number + 1.0, sample=number))
    return out


@settings(max_examples=80)
@given(samples(), st.integers(1, 40))
def test_round_trip(batch: list[Sample], budget: int) -> None:
    micros = pack(batch, budget)
    seen: dict[int, list[tuple[int, float, float, int]]] = {}
    for micro in micros:
        assert sum(micro.lengths) == len(micro.token_ids) == len(micro.positions) == len(micro.routes_valid)
        assert sum(micro.lengths) <= budget or len(micro.lengths) == 1
        start = 0
        for number, length in zip(micro.samples, micro.lengths, strict=True):
            trace = batch[number].trace
            assert micro.token_ids[start : start + length].tolist() == trace.token_ids[:length].tolist()
            assert micro.positions[start : start + length].tolist() == list(range(length))
            assert micro.routes is not None
            assert trace.routes is not None
            assert micro.routes[start : start + length].tolist() == trace.routes.expert_ids[:length].tolist()
            inside = (micro.rows >= start) & (micro.rows < start + length)
            rows = micro.rows[inside] - start
            values = zip(
                (rows + 1).tolist(),
                micro.generator_logprobs[inside].tolist(),
                micro.advantage[inside].tolist(),
                micro.versions[inside],
                strict=True,
            )
            seen[number] = list(values)
            assert micro.targets[inside].tolist() == trace.token_ids[rows + 1].tolist()
            start += length
    for number, sample in enumerate(batch):
        trace = sample.trace
        positions = [p for p in np.flatnonzero(trace.loss_mask).tolist() if p > 0]
        expected = [(p, float(trace.logprobs[p]), float(sample.advantage[p]), number) for p in positions]
        assert seen.get(number, []) == expected


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 50))
def test_plan_uses_every_stream_once(lengths: list[int], budget: int) -> None:
    parts = plan(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == plan(lengths, budget)


def test_plan_refuses_no_room() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        plan([3], 0)


def test_rows_after_the_last_prediction_are_not_fed() -> None:
    assert num_rows(make_sample(make_trace([5, 6, 7, 8, 9], [0, 0, 1, 1, 0]))) == 3
    assert num_rows(make_sample(make_trace([5, 6], [0, 0]))) == 0
    assert pack([make_sample(make_trace([5, 6], [0, 0]))], 10) == []


def test_oldest_version_looks_back_over_the_stream() -> None:
    plain = make_trace([5, 6, 7, 8, 9], [0, 1, 1, 1, 1])
    spans = (VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=5, version=4))
    trace = Trace(token_ids=plain.token_ids, loss_mask=plain.loss_mask, logprobs=plain.logprobs, versions=spans)
    (micro,) = pack([make_sample(trace)], 10)
    assert micro.versions.tolist() == [3, 4, 4, 4]
    assert micro.oldest.tolist() == [3, 3, 3, 3]


def test_mini_batches_hold_whole_episodes() -> None:
    keys = [EpisodeKey(phase="rl", step=0, task_id=f"t{i // 4}", sample=i % 4) for i in range(8)]
    trace = make_trace([1, 2], [0, 1])
    batch = [Sample(key=key, trace=trace, advantage=np.array([0, 1], np.float32)) for key in keys for _ in range(2)]
    parts = split_by_episode(batch, 3)
    assert [len(part) for part in parts] == [6, 6, 4]
    assert {s.key for s in parts[0]} == {keys[0], keys[3], keys[6]}
    assert split_by_episode(batch[:2], 3) == [tuple(batch[:2])]
