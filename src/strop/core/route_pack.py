"""RoutePack: the routes of one token stream, or of a part of it, as bytes. For the wire and for disk; nothing in it is executed.

Little-endian, no padding; ``body_at`` lets a reader take the ids without knowing the rest:

    at  bytes  field
     0      4  magic ``SRP1``
     4      1  body: 0 uint8 ids, 1 uint16 ids, 2 ranks (below)
     5      1  order within a row: 0 ascending, 1 as the engine combined them
     6      1  flags: 1 has margins, 2 has a validity bitmap (without it every row is valid)
     7      1  zero
     8      4  start: row of the stream that the first row is
    12      4  rows
    16      2  layers
    18      2  top_k
    20      2  experts
    22      2  segments
    24      4  body_at
    28      4  body_bytes
    32     16  router: digest of the ``RouterSpec``
    48     16  tokens: digest of the stream's tokens ``[0, start + rows)``
    64     16  checksum: blake2b of every other byte
    80         segments, 24 bytes each: uint32 start, uint32 end, uint64 weight version, 8 bytes engine class
               validity, one bit for each row, first row in the highest bit
               margins, float16 [rows, layers]
               ids

Ranks: the ascending ids ``c_1 < ... < c_K`` of a row and layer are the number ``sum_i binomial(c_i, i)``, which takes
``ceil(log2 binomial(E, K))`` bits; the bits of all rows and layers follow each other, highest first.
Source: the combinatorial number system, Knuth, The Art of Computer Programming 4A, section 7.2.1.3, theorem L.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from strop.core.errors import CheckpointError
from strop.core.routes import Routes, id_dtype

MAGIC = b"SRP1"
_HEADER = struct.Struct("<4sBBBBIIHHHHII16s16s16s")
_SEGMENT = struct.Struct("<IIQ8s")
_SUM_AT, _SUM = 64, 16
_UINT8, _UINT16, _RANKS = 0, 1, 2
_MARGINS, _BITMAP = 1, 2
_CHUNK = 1 << 16  # ranks unpacked at once; a multiple of 8, so that chunks end at whole bytes
_ORDERS = ("ascending", "engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteSegment:
    """Rows ``[start, end)`` of a stream were computed by one version of the weights on one kind of engine.

    Attributes:
        start: First row.
        end: One past the last.
        version: Weight version.
        engine_class: 8 bytes that are equal where engines are bit-identical; zeros where nobody says.
    """

    start: int
    end: int
    version: int
    engine_class: bytes = bytes(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutePack:
    """Routes of the rows ``[start, start + rows)`` of one stream, with what they belong to.

    Example: the second turn of a stream whose first 10 rows were sent before, 4 tokens, 2 MoE layers, top-2 of 8:
    ``start = 10``, ``expert_ids.shape == (4, 2, 2)``, ``segments == (RouteSegment(start=10, end=14, version=3),)``.

    Attributes:
        start: Row of the stream that the first row is.
        experts: Experts of a layer.
        expert_ids: ``uint8`` (at most 256 experts) or ``uint16``, ``[rows, layers, top_k]``, logical ids.
        valid: ``bool [rows]``; ids of other rows are not kept and come back as 0.
        router: 16 bytes, ``RouterSpec.digest()``.
        tokens: 16 bytes, ``token_digest`` of the tokens ``[0, start + rows)``.
        segments: Contiguous, cover the rows.
        margins: ``float16 [rows, layers]`` or ``None``: K-th largest routing score less the next one.
        order: ``"ascending"``, or ``"engine"`` where the order in which the engine combined experts is kept.
    """

    start: int
    experts: int
    expert_ids: np.ndarray
    valid: np.ndarray
    router: bytes
    tokens: bytes
    segments: tuple[RouteSegment, ...]
    margins: np.ndarray | None = None
    order: Literal["ascending", "engine"] = "ascending"

    def __post_init__(self) -> None:
        ids = self.expert_ids
        if ids.ndim != 3 or ids.dtype != id_dtype(self.experts):
            raise ValueError(f"expert_ids must be {id_dtype(self.experts)} [rows, layers, top_k], got {ids.dtype} {ids.shape}")
        if self.valid.shape != ids.shape[:1] or self.valid.dtype != np.bool_:
            raise ValueError(f"valid must be bool [{len(ids)}], got {self.valid.dtype} {self.valid.shape}")
        if self.margins is not None and (self.margins.shape != ids.shape[:2] or self.margins.dtype != np.float16):
            raise ValueError(f"margins must be float16 {list(ids.shape[:2])}, got {self.margins.dtype} {self.margins.shape}")
        for name, digest in (("router", self.router), ("tokens", self.tokens)):
            if len(digest) != 16:
                raise ValueError(f"{name} must be a digest of 16 bytes, got {len(digest)}")
        at = self.start
        for segment in self.segments:
            if segment.start != at or segment.end <= segment.start:
                raise ValueError(f"segments must be contiguous from row {self.start}, got {self.segments}")
            at = segment.end
        if at != self.end:
            raise ValueError(f"segments end at row {at}, the pack at row {self.end}")
        check_ids(ids[self.valid], self.experts, ascending=self.order == "ascending")

    def __len__(self) -> int:
        return len(self.expert_ids)

    @property
    def end(self) -> int:
        """One past the last row, counted in the stream."""
        return self.start + len(self.expert_ids)

    def routes(self) -> Routes:
        """The routes of a whole stream.

        Raises:
            ValueError: The pack is a later part only, or its ids are in the engine's order.
        """
        if self.start:
            raise ValueError(f"the pack begins at row {self.start}; join it with the rows before")
        if self.order != "ascending":
            raise ValueError("Routes are ascending within a row; the pack keeps the engine's order")
        return Routes(expert_ids=self.expert_ids, valid=self.valid)

    def encode(self, *, ranked: bool = True) -> bytes:
        """Return the bytes.

        Args:
            ranked: Write sets as ranks, which is smaller; plain ids where they can't be (``order = "engine"``, more than 2^63 sets).
        """
        rows, layers, top_k = self.expert_ids.shape
        bits = rank_bits(self.experts, top_k)
        ids = np.where(self.valid[:, None, None], self.expert_ids, 0).astype(self.expert_ids.dtype)
        if ranked and bits and self.order == "ascending":
            kind, body = _RANKS, _pack_ranks(_ranks(ids, self.valid, self.experts), bits)
        else:
            kind, body = (_UINT8 if ids.dtype == np.uint8 else _UINT16), np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).tobytes()
        parts = [_SEGMENT.pack(s.start, s.end, s.version, s.engine_class) for s in self.segments]
        flags = 0
        if not self.valid.all():
            flags |= _BITMAP
            parts.append(np.packbits(self.valid).tobytes())
        if self.margins is not None:
            flags |= _MARGINS
            parts.append(np.ascontiguousarray(self.margins, "<f2").tobytes())
        body_at = _HEADER.size + sum(map(len, parts))
        fields = (self.start, rows, layers, top_k, self.experts, len(self.segments), body_at, len(body), self.router, self.tokens)
        header = _HEADER.pack(MAGIC, kind, _ORDERS.index(self.order), flags, 0, *fields, bytes(_SUM))
        data = b"".join([header, *parts, body])
        return data[:_SUM_AT] + _checksum(data) + data[_SUM_AT + _SUM :]

    @classmethod
    def decode(cls, data: bytes, name: str = "route pack") -> RoutePack:
        """Inverse of ``encode``; whatever the bytes are, the result is a valid pack or an error.

        Args:
            data: The bytes.
            name: What the message of an error calls them.

        Raises:
            CheckpointError: Another format, a wrong length, a wrong checksum, or routes that no router makes.
        """
        if data[:4] != MAGIC or len(data) < _HEADER.size:
            raise CheckpointError(
                f"{name}: format {bytes(data[:4])!r} of {len(data)} bytes, expected {MAGIC!r} and at least {_HEADER.size}"
            )
        _, kind, order, flags, zero, start, rows, layers, top_k, experts, segments, body_at, body_bytes, router, tokens, _ = (
            _HEADER.unpack_from(data)
        )
        expected, actual = data[_SUM_AT : _SUM_AT + _SUM], _checksum(data)
        if actual != expected:
            raise CheckpointError(f"{name} is damaged: checksum {actual.hex()}, expected {bytes(expected).hex()}")
        bitmap = -(-rows // 8) if flags & _BITMAP else 0
        margins = 2 * rows * layers if flags & _MARGINS else 0
        at = _HEADER.size + segments * _SEGMENT.size
        body = _body_bytes(kind, rows, layers, top_k, experts)
        if order > 1 or zero or flags > 3 or body is None:
            raise CheckpointError(f"{name}: body {kind}, order {order}, flags {flags} of {experts} experts are not known to this version")
        if (body_at, body_bytes, len(data)) != (at + bitmap + margins, body, at + bitmap + margins + body):
            raise CheckpointError(f"{name}: {len(data)} bytes don't fit its header ({rows} rows, {layers} layers, top {top_k})")
        valid = np.unpackbits(np.frombuffer(data, np.uint8, bitmap, at), count=rows).astype(np.bool_) if bitmap else np.ones(rows, np.bool_)
        at += bitmap
        spans = [_SEGMENT.unpack_from(data, _HEADER.size + i * _SEGMENT.size) for i in range(segments)]
        try:
            return cls(
                start=start,
                experts=experts,
                expert_ids=_read_body(data[body_at:], kind, (rows, layers, top_k), experts, valid),
                valid=valid,
                router=router,
                tokens=tokens,
                segments=tuple(RouteSegment(start=s, end=e, version=v, engine_class=c) for s, e, v, c in spans),
                margins=_read_margins(data[at : at + margins], rows, layers) if flags & _MARGINS else None,
                order="engine" if order else "ascending",
            )
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def part(self, start: int, end: int, tokens: bytes) -> RoutePack:
        """Return the rows ``[start, end)`` of the stream, to send only what is new.

        Args:
            start: First row.
            end: One past the last.
            tokens: ``token_digest`` of the tokens ``[0, end)``.

        Raises:
            ValueError: The rows aren't all here.
        """
        if not self.start <= start < end <= self.end:
            raise ValueError(f"rows [{start}, {end}) lie outside the pack's [{self.start}, {self.end})")
        cut = slice(start - self.start, end - self.start)
        kept = [s for s in self.segments if s.start < end and s.end > start]
        return RoutePack(
            start=start,
            experts=self.experts,
            expert_ids=self.expert_ids[cut],
            valid=self.valid[cut],
            router=self.router,
            tokens=tokens,
            segments=tuple(
                RouteSegment(start=max(s.start, start), end=min(s.end, end), version=s.version, engine_class=s.engine_class) for s in kept
            ),
            margins=None if self.margins is None else self.margins[cut],
            order=self.order,
        )


def join(parts: Sequence[RoutePack]) -> RoutePack:
    """Join the parts of one stream, in order; the result has the last part's digest of the tokens.

    Raises:
        ValueError: No part, a gap or an overlap, parts of different routers or forms.
    """
    if not parts:
        raise ValueError("no part to join")
    first, last = parts[0], parts[-1]
    segments: list[RouteSegment] = []
    at = first.start
    for part in parts:
        if part.start != at:
            raise ValueError(f"a part begins at row {part.start}, expected row {at}: parts must follow each other without gap or overlap")
        facts = (part.router, part.experts, part.order, part.expert_ids.shape[1:], part.margins is None)
        if facts != (first.router, first.experts, first.order, first.expert_ids.shape[1:], first.margins is None):
            raise ValueError(f"the part at row {part.start} belongs to another router or has another form than the first")
        at = part.end
        for segment in part.segments:
            if segments and (segments[-1].version, segments[-1].engine_class) == (segment.version, segment.engine_class):
                start = segments.pop().start
                segment = RouteSegment(start=start, end=segment.end, version=segment.version, engine_class=segment.engine_class)
            segments.append(segment)
    return RoutePack(
        start=first.start,
        experts=first.experts,
        expert_ids=np.concatenate([part.expert_ids for part in parts]),
        valid=np.concatenate([part.valid for part in parts]),
        router=first.router,
        tokens=last.tokens,
        segments=tuple(segments),
        margins=None if first.margins is None else np.concatenate([part.margins for part in parts if part.margins is not None]),
        order=first.order,
    )


def token_digest(token_ids: np.ndarray) -> bytes:
    """Return 16 bytes that name a token prefix (``[n]``, read as int32)."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=16).digest()


def check_ids(ids: np.ndarray, experts: int, *, ascending: bool) -> None:
    """Refuse rows that no router makes: ids outside ``0..experts - 1``, or an expert twice in one row and layer.

    Args:
        ids: ``[rows, layers, top_k]``.
        experts: Experts of a layer.
        ascending: Whether ids must rise within a row.

    Raises:
        ValueError: Names the first such row.
    """
    if not ids.size:
        return
    if int(ids.max()) >= experts:
        row = int(np.flatnonzero((ids >= experts).any((1, 2)))[0])
        raise ValueError(f"row {row} names expert {int(ids[row].max())} of {experts}")
    ordered = ids if ascending else np.sort(ids, axis=-1)
    bad = (ordered[..., 1:] <= ordered[..., :-1]).any((1, 2))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"row {row} names an expert twice{' or not in ascending order' if ascending else ''}: {ids[row].tolist()}")


def rank_bits(experts: int, top_k: int) -> int:
    """Return the bits of a set of ``top_k`` of ``experts``; 0 where ranks don't fit 63 bits."""
    sets = math.comb(experts, top_k)
    return max(1, (sets - 1).bit_length()) if 0 < sets < 1 << 63 else 0


def _checksum(data: bytes) -> bytes:
    digest = hashlib.blake2b(data[:_SUM_AT], digest_size=_SUM)
    digest.update(data[_SUM_AT + _SUM :])
    return digest.digest()


def _body_bytes(kind: int, rows: int, layers: int, top_k: int, experts: int) -> int | None:
    """Bytes of a body, or ``None`` where there can't be such a body."""
    if kind == _RANKS:
        bits = rank_bits(experts, top_k) if top_k <= 64 else 0
        return -(-rows * layers * bits // 8) if bits else None
    if kind not in (_UINT8, _UINT16) or (kind == _UINT8) != (experts <= 256) or not 0 < top_k <= experts:
        return None
    return rows * layers * top_k * (1 if kind == _UINT8 else 2)


def _read_body(body: bytes, kind: int, shape: tuple[int, int, int], experts: int, valid: np.ndarray) -> np.ndarray:
    if kind == _RANKS:
        bits = rank_bits(experts, shape[2])
        ids = _unrank(_unpack_ranks(body, shape[0] * shape[1], bits), experts, shape[2]).reshape(shape)
        ids[~valid] = 0
        return ids
    return np.frombuffer(body, "|u1" if kind == _UINT8 else "<u2").reshape(shape).astype(id_dtype(experts))


def _read_margins(data: bytes, rows: int, layers: int) -> np.ndarray:
    return np.frombuffer(data, "<f2").reshape(rows, layers).astype(np.float16)


def _binomials(experts: int, top_k: int) -> np.ndarray:
    """``uint64 [top_k, experts + 1]``, ``binomial(c, i + 1)``; needs ``rank_bits`` above 0."""
    return np.array([[min(math.comb(c, i + 1), 1 << 63) for c in range(experts + 1)] for i in range(top_k)], np.uint64)


def _ranks(ids: np.ndarray, valid: np.ndarray, experts: int) -> np.ndarray:
    table = _binomials(experts, ids.shape[-1])
    ranks = np.zeros(ids.shape[:2], np.uint64)
    for column in range(ids.shape[-1]):
        ranks += table[column][ids[..., column]]
    ranks[~valid] = 0
    return ranks.reshape(-1)


def _unrank(ranks: np.ndarray, experts: int, top_k: int) -> np.ndarray:
    table = _binomials(experts, top_k)
    ids = np.empty((len(ranks), top_k), np.int64)
    rest = ranks.copy()
    for column in range(top_k - 1, -1, -1):
        ids[:, column] = np.searchsorted(table[column], rest, side="right") - 1
        rest -= table[column][ids[:, column]]
    if ids.size and int(ids.max()) >= experts:
        row = int(np.flatnonzero((ids >= experts).any(-1))[0])
        raise ValueError(f"rank {int(ranks[row])} names expert {int(ids[row].max())} of {experts}")
    return ids.astype(id_dtype(experts))


def _pack_ranks(ranks: np.ndarray, bits: int) -> bytes:
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    chunks = (ranks[at : at + _CHUNK] for at in range(0, len(ranks), _CHUNK))
    return b"".join(np.packbits(((chunk[:, None] >> shifts) & np.uint64(1)).astype(np.uint8)).tobytes() for chunk in chunks)


def _unpack_ranks(body: bytes, count: int, bits: int) -> np.ndarray:
    weights = np.uint64(1) << np.arange(bits - 1, -1, -1, dtype=np.uint64)
    ranks = np.empty(count, np.uint64)
    for at in range(0, count, _CHUNK):
        size = min(_CHUNK, count - at)
        flat = np.unpackbits(np.frombuffer(body, np.uint8, -(-size * bits // 8), at * bits // 8), count=size * bits)
        ranks[at : at + size] = (flat.reshape(size, bits).astype(np.uint64) * weights).sum(1)
    return ranks
