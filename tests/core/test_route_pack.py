"""The format of routes: round trips, sizes, parts, and no damage that goes unseen."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import CheckpointError
from strop.core.route_pack import RoutePack, RouteSegment, check_ids, join, rank_bits, token_digest
from strop.core.routes import RouterSpec, id_dtype

SPEC = RouterSpec(layers=(1, 2, 3), experts=8, top_k=2)


def random_ids(rng: np.random.Generator, rows: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    order = rng.random((rows, layers, experts)).argsort(-1)[..., :top_k]
    return np.sort(order, -1).astype(id_dtype(experts))


def make_pack(
    rows: int = 11, layers: int = 3, experts: int = 8, top_k: int = 2, *, start: int = 0, seed: int = 0, holes: bool = True, **changes
) -> RoutePack:
    rng = np.random.default_rng(seed)
    valid = rng.random(rows) > 0.3 if holes else np.ones(rows, np.bool_)
    ids = random_ids(rng, rows, layers, experts, top_k)
    ids[~valid] = 0
    middle = start + rows // 2
    segments = [(start, middle, 4), (middle, start + rows, 5)] if rows > 1 else [(start, start + rows, 4)] * (rows > 0)
    fields = {
        "start": start,
        "experts": experts,
        "expert_ids": ids,
        "valid": valid,
        "router": SPEC.digest(),
        "tokens": token_digest(np.arange(start + rows)),
        "segments": tuple(RouteSegment(start=s, end=e, version=v, engine_class=b"class--1") for s, e, v in segments),
        "margins": rng.random((rows, layers)).astype(np.float16),
    }
    return RoutePack(**(fields | changes))


def same(one: RoutePack, two: RoutePack) -> bool:
    plain = all(getattr(one, n) == getattr(two, n) for n in ("start", "experts", "router", "tokens", "segments", "order"))
    margins = (one.margins is None) == (two.margins is None) and (one.margins is None or np.array_equal(one.margins, two.margins))
    return plain and margins and np.array_equal(one.expert_ids, two.expert_ids) and np.array_equal(one.valid, two.valid)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 400), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 99))
def test_round_trip(rows: int, layers: int, experts: int, top_k: int, ranked: bool, margins: bool, seed: int) -> None:
    pack = make_pack(rows, layers, experts, min(top_k, experts), seed=seed, **({} if margins else {"margins": None}))
    back = RoutePack.decode(pack.encode(ranked=ranked))
    assert same(pack, back)
    assert back.expert_ids.dtype == id_dtype(experts)


def test_many_chunks_round_trip() -> None:
    pack = make_pack(70_001, 1, 128, 8, holes=False, margins=None)
    assert same(pack, RoutePack.decode(pack.encode()))


def test_plain_ids_are_read_in_three_lines() -> None:
    pack = make_pack(holes=False)
    data = pack.encode(ranked=False)
    rows, layers, top_k, _, _, body_at = struct.unpack_from("<I4HI", data, 12)
    ids = np.frombuffer(data, np.uint8, rows * layers * top_k, body_at).reshape(rows, layers, top_k)
    assert np.array_equal(ids, pack.expert_ids)


@pytest.mark.parametrize(
    ("experts", "top_k", "layers", "bits"), [(8, 2, 32, 5), (64, 8, 16, 33), (128, 8, 48, 41), (256, 8, 58, 49), (128, 4, 36, 24)]
)
def test_sizes(experts: int, top_k: int, layers: int, bits: int) -> None:
    pack = make_pack(500, layers, experts, top_k, holes=False, margins=None)
    assert rank_bits(experts, top_k) == bits
    ids = pack.expert_ids.size
    assert len(pack.encode(ranked=False)) == ids + 80 + 2 * 24
    assert len(pack.encode()) == -(-500 * layers * bits // 8) + 80 + 2 * 24


def test_the_engines_order_is_kept() -> None:
    ids = make_pack(holes=False).expert_ids[..., ::-1].copy()
    pack = make_pack(holes=False, expert_ids=ids, order="engine")
    assert np.array_equal(RoutePack.decode(pack.encode()).expert_ids, ids)
    with pytest.raises(ValueError, match="engine's order"):
        pack.routes()


@pytest.mark.parametrize("ranked", [True, False])
def test_every_flipped_bit_is_seen(ranked: bool) -> None:
    data = make_pack().encode(ranked=ranked)
    for at in range(len(data) * 8):
        broken = bytearray(data)
        broken[at // 8] ^= 1 << at % 8
        with pytest.raises(CheckpointError):
            RoutePack.decode(bytes(broken))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_an_error_never_a_crash_or_a_wrong_pack(data: st.DataObject) -> None:
    good = make_pack().encode(ranked=data.draw(st.booleans()))
    cut = data.draw(st.integers(0, len(good)))
    junk = data.draw(st.binary(max_size=90))
    bad = data.draw(st.sampled_from([good[:cut], good[:cut] + junk, junk, good + junk, good[:4] + junk]))
    if bad == good:
        return
    with pytest.raises(CheckpointError):
        RoutePack.decode(bad)


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 63), st.integers(0, 255), st.booleans())
def test_a_forged_header_with_a_right_checksum_gives_a_valid_pack_or_an_error(at: int, value: int, ranked: bool) -> None:
    from strop.core.route_pack import _checksum

    forged = bytearray(make_pack().encode(ranked=ranked))
    forged[at] = value
    forged[64:80] = _checksum(bytes(forged))
    try:
        pack = RoutePack.decode(bytes(forged))
    except CheckpointError:
        return
    check_ids(pack.expert_ids[pack.valid], pack.experts, ascending=pack.order == "ascending")


def test_a_rank_beyond_the_last_set_is_refused() -> None:
    from strop.core.route_pack import _checksum

    forged = bytearray(make_pack(8, 1, 8, 2, holes=False, margins=None).encode())
    forged[-1] |= 0x1F  # rank 31 of 28 sets
    forged[64:80] = _checksum(bytes(forged))
    with pytest.raises(CheckpointError, match=r"names expert 8 of 8"):
        RoutePack.decode(bytes(forged))


@given(st.integers(1, 10), st.integers(0, 5))
def test_parts_join_to_the_whole(cut: int, seed: int) -> None:
    whole = make_pack(seed=seed)
    parts = [whole.part(0, cut, token_digest(np.arange(cut))), whole.part(cut, 11, whole.tokens)]
    assert [len(part) for part in parts] == [cut, 11 - cut]
    assert same(join([RoutePack.decode(part.encode()) for part in parts]), whole)


def test_gaps_overlaps_and_strangers_do_not_join() -> None:
    whole = make_pack()
    first, second = whole.part(0, 5, bytes(16)), whole.part(5, 11, bytes(16))
    for parts in ([first, whole.part(6, 11, bytes(16))], [first, whole.part(4, 11, bytes(16))], [second, first], []):
        with pytest.raises(ValueError, match="part"):
            join(parts)
    stranger = make_pack(6, start=5, router=bytes(16))
    with pytest.raises(ValueError, match="another router"):
        join([first, stranger])


def test_what_no_router_makes_is_refused() -> None:
    good = make_pack(holes=False)
    for change in ({"expert_ids": np.zeros_like(good.expert_ids)}, {"expert_ids": good.expert_ids + np.uint8(8)}):
        with pytest.raises(ValueError, match="row 0 names"):
            make_pack(holes=False, **change)
    with pytest.raises(ValueError, match="segments"):
        make_pack(segments=(RouteSegment(start=0, end=10, version=0),))
    with pytest.raises(ValueError, match="contiguous"):
        make_pack(segments=(RouteSegment(start=1, end=11, version=0),))
    with pytest.raises(ValueError, match="uint8"):
        make_pack(expert_ids=good.expert_ids.astype(np.uint16))


def test_the_router_is_named_by_everything_that_gives_ids_a_meaning() -> None:
    changes = [{"layers": (0, 1, 2)}, {"experts": 9}, {"top_k": 1}, {"scoring": "sigmoid"}, {"normalised": False}, {"has_bias": True}]
    plain = {"layers": (1, 2, 3), "experts": 8, "top_k": 2}
    digests = {RouterSpec(**(plain | change)).digest() for change in [{}, *changes]}  # type: ignore[arg-type]
    assert len(digests) == 7
