"""Capped output: exact counts, whatever the chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strop.sandboxes.output import CappedBytes, CappedText


def _feed(sink, data: bytes, sizes: list[int]) -> None:
    start = 0
    for size in sizes:
        sink.feed(data[start : start + size])
        start += size
    sink.feed(data[start:])
    sink.feed(b"", final=True)


@given(st.text(max_size=400), st.lists(st.integers(1, 40)), st.integers(1, 20), st.integers(1, 20))
def test_text_keeps_head_and_tail_and_counts_the_rest(text: str, sizes: list[int], head: int, tail: int) -> None:
    sink = CappedText(head, tail)
    _feed(sink, text.encode(), sizes)
    if len(text) <= head + tail:
        assert sink.text() == text
    else:
        elided = len(text) - head - tail
        assert sink.text() == f"{text[:head]}\n[... {elided} characters elided ...]\n{text[len(text) - tail :]}"


@given(st.binary(max_size=300), st.lists(st.integers(1, 7)))
def test_any_bytes_decode_like_one_piece(data: bytes, sizes: list[int]) -> None:
    sink = CappedText(1000, 1000)
    _feed(sink, data, sizes)
    assert sink.text() == data.decode("utf-8", "replace")


@given(st.binary(max_size=100), st.integers(0, 100))
def test_bytes_are_cut_and_flagged(data: bytes, limit: int) -> None:
    sink = CappedBytes(limit)
    _feed(sink, data, [3, 5])
    assert sink.value() == data[:limit]
    assert sink.truncated == (len(data) > limit)
