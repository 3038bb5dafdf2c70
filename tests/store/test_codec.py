"""Episodes survive their encoding bit for bit, and damage never passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from strop.core.episode import Episode, EpisodeKey, Trace, Turn, VersionSpan
from strop.core.errors import CheckpointError
from strop.core.outcome import Failed, Scored, Ungraded
from strop.core.routes import RouteOrigin, Routes
from strop.store.codec import decode_episode, encode_episode

TEXT = st.text(max_size=40)
NUMBER = st.floats(allow_nan=False)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    length = draw(st.integers(0, 12))
    cut = draw(st.integers(1, length - 1)) if length > 1 else length
    spans = [(0, cut), (cut, length)] if 0 < cut < length else ([(0, length)] if length else [])
    experts = draw(st.sampled_from([np.uint8, np.uint16]))
    shape = (max(length - 1, 0), draw(st.integers(0, 3)), draw(st.integers(1, 2)))
    digest = st.binary(min_size=16, max_size=16)
    span = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**40))
    origin = st.builds(RouteOrigin, router=digest, tokens=digest, ids=digest, versions=st.lists(span, max_size=3).map(tuple))
    routes = Routes(expert_ids=draw(arrays(experts, shape)), valid=draw(arrays(np.bool_, shape[:1])), origin=draw(st.none() | origin))
    return Trace(
        token_ids=draw(arrays(np.int32, length)),
        loss_mask=draw(arrays(np.bool_, length)),
        logprobs=draw(arrays(np.float32, length, elements=st.floats(width=32))),
        versions=tuple(VersionSpan(start=a, end=b, version=draw(st.integers(0, 9))) for a, b in spans),
        routes=routes if draw(st.booleans()) else None,
    )


OUTCOMES = st.one_of(
    st.none(),
    st.builds(Ungraded, reason=TEXT),
    st.builds(Failed, error=TEXT),
    st.builds(Scored, reward=NUMBER, parts=st.dictionaries(TEXT, NUMBER, max_size=2), reason=TEXT),
)
TURNS = st.builds(
    Turn,
    trace=st.just(0),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
    call=TEXT,
    arguments=st.dictionaries(TEXT, TEXT, max_size=2),
    text=TEXT,
    observation=TEXT,
    status=st.sampled_from(["ok", "tool_error", "malformed"]),
    generate_s=NUMBER,
    tool_s=NUMBER,
)
EPISODES = st.builds(
    Episode,
    key=st.builds(EpisodeKey, phase=TEXT, step=st.integers(0, 99), task_id=TEXT, sample=st.integers(0, 99)),
    traces=st.lists(traces(), max_size=2).map(tuple),
    turns=st.lists(TURNS, max_size=2).map(tuple),
    stop_reason=TEXT,
    changes=st.dictionaries(TEXT, st.one_of(st.none(), st.binary(max_size=20)), max_size=3),
    outcome=OUTCOMES,
    costs=st.dictionaries(TEXT, NUMBER, max_size=2),
    stats=st.dictionaries(TEXT, NUMBER, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(value=EPISODES)
def test_every_episode_comes_back_bit_for_bit(value, is_same):
    again = decode_episode(encode_episode(value))
    assert is_same(value, again)
    assert encode_episode(again) == encode_episode(value)


@settings(max_examples=80, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_is_found(place, bit, episode):
    data = bytearray(encode_episode(episode()))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(CheckpointError, match=r"checksum|format"):
        decode_episode(bytes(data))


@pytest.mark.parametrize("cut", [0, 3, 12, 40, -1])
def test_a_cut_episode_is_found(cut, episode):
    with pytest.raises(CheckpointError):
        decode_episode(encode_episode(episode())[:cut])


def test_the_message_names_both_checksums(episode):
    data = bytearray(encode_episode(episode()))
    data[-1] ^= 1
    with pytest.raises(CheckpointError, match=r"rl/0 is damaged: checksum [0-9a-f]{32}, expected [0-9a-f]{32}"):
        decode_episode(bytes(data), "rl/0")


def test_decoded_arrays_can_not_be_changed(episode):
    trace = decode_episode(encode_episode(episode())).traces[0]
    with pytest.raises(ValueError, match="read-only"):
        trace.token_ids[0] = 1
