"""Decides which rows the next model call computes: one row of every running stream, and chunks of what was newly fed.

Pure bookkeeping over streams, no model and no clock. What a stream gets depends on who else is there, what it samples never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from strop.engine.backend import RowBlock
from strop.engine.stream import BLOCK, Stream


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, start + count)`` of a step belong to ``stream``; ``want`` is the index of its logits, -1 if more must be fed first."""

    stream: Stream
    start: int
    count: int
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


def plan_step(streams: Iterable[Stream], index: PrefixIndex, *, max_batch: int, prefill_rows: int, allow_new: bool = True) -> Plan | None:
    """Choose the rows of the next step.

    Streams with one pending token come first (at most ``max_batch``, those served longest ago first), then chunks of longer feeds in order
    of arrival. A fresh stream takes what the index has; if another stream is just computing most of the same prompt, it waits for that.

    Args:
        streams: Those with a running request.
        index: Prefixes in the cache.
        max_batch: Most single rows.
        prefill_rows: Most rows of longer feeds.
        allow_new: Whether requests that haven't started may start; off while a weight swap waits.

    Returns:
        The plan, or ``None`` if nothing can be computed now.
    """
    single: list[Stream] = []
    feeding: list[Stream] = []
    for stream in streams:
        request = stream.request
        if request is not None and (allow_new or request.is_started):
            (single if stream.pending == 1 else feeding).append(stream)
    if len(single) > max_batch:
        single.sort(key=lambda s: s.request.last_step if s.request else 0)
        single = single[:max_batch]
    chosen = [(stream, 0, 1) for stream in single]
    copies: list[Copy] = []
    in_progress: dict[int, Stream] = {}
    feeding.sort(key=lambda s: (not s.is_mid_feed, s.request.arrived if s.request else 0))
    for stream in feeding:
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
        chosen.append((stream, skip, count))
        if stream.is_shareable:
            for digest in stream.block_digests():
                in_progress.setdefault(digest, stream)
    return _assemble(chosen, copies) if chosen else None


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


def _assemble(chosen: list[tuple[Stream, int, int]], copies: list[Copy]) -> Plan:
    total = sum(count for _, _, count in chosen)
    token_ids, positions, slots = (np.empty(total, np.int32) for _ in range(3))
    segments: list[Segment] = []
    want: list[int] = []
    uniforms: list[float] = []
    temperatures: list[float] = []
    at = 0
    for stream, skip, count in chosen:
        request = stream.request
        assert request is not None
        first = stream.computed + skip
        token_ids[at : at + count] = stream.ids[first : first + count]
        positions[at : at + count] = range(first, first + count)
        slots[at : at + count] = stream.slot
        is_last = first + count == stream.length
        segments.append(Segment(stream, at, count, len(want) if is_last else -1))
        at += count
        if is_last:
            want.append(at - 1)
            uniforms.append(request.uniforms[len(request.sampled)])
            temperatures.append(request.temperature)
    return Plan(
        tuple(copies),
        tuple(segments),
        RowBlock(token_ids, positions, slots),
        np.array(want, np.int32),
        np.array(uniforms, np.float64),
        np.array(temperatures, np.float32),
    )
