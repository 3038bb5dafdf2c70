"""Decides which rows the next model call computes: one row of every running stream, and chunks of what was newly fed.

Pure bookkeeping over streams, no model and no clock. What a stream gets depends on who else is there, what it samples never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strop.engine.backend import RowBlock
from strop.engine.stream import BLOCK, Request, Stream


class Segment(NamedTuple):
    """Rows ``[start, start + size)`` of a step belong to ``stream``.

    Attributes:
        stream: Their owner.
        request: The request that they serve.
        start: First row.
        size: Rows.
        want: Index of the logits to sample from, -1 if more must be fed first.
    """

    stream: Stream
    request: Request
    start: int
    size: int
    want: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The first ``count`` cache rows of ``source`` go to ``stream`` before the step."""

    source: Stream
    stream: Stream
    count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        copies: Cache copies to make first.
        segments: Who owns which rows.
        rows: Input of the model call.
        want: ``int32 [W]``, rows whose logits are needed.
        uniforms: ``float64 [W]``.
        temperatures: ``float32 [W]``.
    """

    copies: tuple[Copy, ...]
    segments: tuple[Segment, ...]
    rows: RowBlock
    want: np.ndarray
    uniforms: np.ndarray
    temperatures: np.ndarray


class PrefixIndex:
    """Finds a stream whose cache already holds a prefix. Entries live until the slot is given to another stream or the weights change."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[int, Stream]] = {}  # block digest -> slot -> stream
        self._by_slot: dict[int, int] = {}  # slot -> blocks registered
        self._streams: dict[int, Stream] = {}

    def register(self, stream: Stream) -> None:
        """Offer the computed blocks of ``stream`` to others."""
        if not stream.is_shareable:
            return
        self._streams[stream.slot] = stream
        done, full = self._by_slot.get(stream.slot, 0), stream.computed // BLOCK
        for digest in stream.block_digests()[done:full]:
            self._owners.setdefault(digest, {})[stream.slot] = stream
        self._by_slot[stream.slot] = full

    def match(self, stream: Stream) -> tuple[Stream | None, int]:
        """Return the stream with the longest computed common prefix and its length; the last token is always left to compute."""
        source = None
        for digest in stream.block_digests():
            owners = self._owners.get(digest)
            if not owners:
                break
            source = next(iter(owners.values()))
        if source is None:
            return None, 0
        limit = min(stream.length - 1, source.computed)
        return source, common_prefix(stream.ids[:limit], source.ids[:limit])

    def lends(self, stream: Stream) -> bool:
        """Whether others can still copy from ``stream``."""
        return self._streams.get(stream.slot) is stream

    def drop(self, slot: int) -> None:
        """Forget what the slot held."""
        stream = self._streams.pop(slot, None)
        if stream is None:
            return
        for digest in stream.digests[: self._by_slot.pop(slot)]:
            owners = self._owners[digest]
            del owners[slot]
            if not owners:
                del self._owners[digest]

    def clear(self) -> None:
        """Forget everything (the weights changed)."""
        self._owners.clear()
        self._by_slot.clear()
        self._streams.clear()


def common_prefix(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common prefix of two arrays of equal length."""
    differ = np.flatnonzero(one != two)
    return int(differ[0]) if len(differ) else len(one)


def plan_step(
    running: Mapping[Stream, Request], index: PrefixIndex, *, max_batch: int, prefill_rows: int, allow_new: bool = True
) -> Plan | None:
    """Choose the rows of the next step.

    Streams with one pending token come first (at most ``max_batch``, those served longest ago first), then chunks of longer feeds in order
    of arrival. Where all fit, streams of one task lie next to each other, so that the blocks of their common prefix are read once. A fresh
    stream takes what the index has; if another stream is just computing most of the same prompt, it waits for that.

    Args:
        running: The running request of each stream.
        index: Prefixes in the cache.
        max_batch: Most single rows.
        prefill_rows: Most rows of longer feeds.
        allow_new: Whether requests that haven't started may start; off while a weight swap waits.

    Returns:
        The plan, or ``None`` if nothing can be computed now.
    """
    single: list[tuple[Stream, Request]] = []
    feeding: list[tuple[Stream, Request]] = []
    for stream, request in running.items():
        if allow_new or request.is_started:
            (single if stream.computed + 1 == stream.length else feeding).append((stream, request))
    if len(single) > max_batch:
        single.sort(key=lambda pair: pair[1].ticket)
        single = single[:max_batch]
    else:  # whoever is left out needs the order in which they were served
        single.sort(key=lambda pair: pair[0].place)
    chosen: list[tuple[Stream, Request, int, int]] = []
    copies: list[Copy] = []
    in_progress: dict[int, Stream] = {}
    feeding.sort(key=lambda pair: (not pair[0].is_mid_feed, pair[1].arrived))
    for stream, request in feeding:
        skip = 0
        if stream.computed == 0:
            source, skip = index.match(stream)
            if _is_coming(stream, in_progress, skip):
                continue
            if source is not None and skip and prefill_rows > 0:
                copies.append(Copy(source, stream, skip))
        count = min(stream.pending - skip, prefill_rows)
        if count <= 0:
            break
        prefill_rows -= count
        chosen.append((stream, request, skip, count))
        if stream.is_shareable:
            for digest in stream.block_digests():
                in_progress.setdefault(digest, stream)
    return _assemble(single, chosen, copies) if single or chosen else None


def _is_coming(stream: Stream, in_progress: dict[int, Stream], skip: int) -> bool:
    """Whether a stream that is being fed will soon hold at least half of this prompt, and more than the ``skip`` tokens to be had now."""
    owner = None
    for digest in stream.block_digests():
        if digest not in in_progress:
            break
        owner = in_progress[digest]
    if owner is None:
        return False
    limit = min(stream.length - 1, owner.length)
    coming = common_prefix(stream.ids[:limit], owner.ids[:limit])
    return coming > skip and 2 * coming >= stream.pending


def _assemble(single: list[tuple[Stream, Request]], chosen: list[tuple[Stream, Request, int, int]], copies: list[Copy]) -> Plan:
    at = len(single)
    total = at + sum(count for *_, count in chosen)
    token_ids, positions, slots = (np.empty(total, np.int32) for _ in range(3))
    token_ids[:at] = [stream.next_token for stream, _ in single]
    positions[:at] = [stream.computed for stream, _ in single]
    slots[:at] = [stream.slot for stream, _ in single]
    segments = [Segment(stream, request, row, 1, row) for row, (stream, request) in enumerate(single)]
    want = list(range(at))
    for stream, request, skip, count in chosen:
        first = stream.computed + skip
        token_ids[at : at + count] = stream.ids[first : first + count]
        positions[at : at + count] = range(first, first + count)
        slots[at : at + count] = stream.slot
        is_last = first + count == stream.length
        segments.append(Segment(stream, request, at, count, len(want) if is_last else -1))
        at += count
        if is_last:
            want.append(at - 1)
    sampling = [segment.request for segment in segments if segment.want >= 0]
    return Plan(
        tuple(copies),
        tuple(segments),
        RowBlock(token_ids, positions, slots),
        np.array(want, np.int32),
        np.array([request.uniforms[len(request.sampled)] for request in sampling], np.float64),
        np.array([request.temperature for request in sampling], np.float32),
    )
