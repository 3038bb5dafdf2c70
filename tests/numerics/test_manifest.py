"""Manifests and votes: every leaf counts, the odd rank is named, a tie is called a tie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import NumericsError
from strop.numerics.manifest import merkle_root, tensor_digests, vote

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def state(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    numbers = np.random.default_rng(seed)
    tensors = {str(kind): (torch.rand(5, 3, generator=draw) * 50).to(kind) for kind in KINDS}
    return {"tensors": tensors, "torch": draw, "numpy": numbers, "guard": [[1.0, 2.0], []], "none": None, "steps": 3, "empty": {}}


def test_equal_states_have_equal_manifests() -> None:
    assert tensor_digests(state()) == tensor_digests(state())
    assert {"guard/0/1", "guard/1", "empty", "none", "torch"} <= set(tensor_digests(state()))


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_of_any_type_changes_one_leaf(kind: torch.dtype) -> None:
    good = tensor_digests(state())
    for bit in range(0, torch.empty(0, dtype=kind).element_size() * 8 if kind != torch.bool else 1, 3):
        changed = state()
        raw = changed["tensors"][str(kind)].view(torch.uint8).reshape(-1)
        raw[7 * torch.empty(0, dtype=kind).element_size() + bit // 8] ^= 1 << bit % 8
        bad = tensor_digests(changed)
        assert [name for name in good if good[name] != bad[name]] == [f"tensors/{kind}"]


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_generator_that_drew_once_more_is_found(name: str) -> None:
    changed = state()
    torch.rand(1, generator=changed["torch"]) if name == "torch" else changed["numpy"].random()
    good, bad = tensor_digests(state()), tensor_digests(changed)
    assert {key.partition("/")[0] for key in good if good[key] != bad[key]} == {name}


@pytest.mark.parametrize("leaf", [object(), np.array([object()]), lambda: 0])
def test_what_cannot_be_hashed_is_refused_by_name(leaf: Any) -> None:
    with pytest.raises(NumericsError, match="a/b"):
        tensor_digests({"a": {"b": leaf}})


def test_shape_and_type_count() -> None:
    zeros = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(6, dtype=torch.int32), np.zeros(6), torch.zeros(0)]
    assert len({tensor_digests({"x": value})["x"] for value in zeros}) == len(zeros)


names = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["0", "1"]), min_size=1)


@settings(max_examples=60, deadline=None)
@given(names, st.data())
def test_root_changes_with_any_leaf(leaves: dict[str, str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(leaves)))
    assert merkle_root(leaves) == merkle_root(dict(reversed(leaves.items())))
    assert merkle_root(leaves) != merkle_root(leaves | {name: "2"})
    assert merkle_root(leaves) != merkle_root({k: v for k, v in leaves.items() if k != name})


@settings(max_examples=60, deadline=None)
@given(names, st.integers(3, 7), st.data())
def test_one_odd_rank_of_three_or_more_is_always_named(leaves: dict[str, str], ranks: int, data: st.DataObject) -> None:
    odd, name = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from(sorted(leaves)))
    fault = data.draw(st.sampled_from(["changed", "missing", "extra"]))
    manifests = [dict(leaves) for _ in range(ranks)]
    if fault == "changed":
        manifests[odd][name] = "bad"
    elif fault == "missing":
        del manifests[odd][name]
    else:
        manifests[odd]["z"] = "0"
        name = "z"
    result = vote(manifests)
    assert (result.odd, result.names, result.is_decided) == ((odd,), (name,), True)
    assert f"rank {odd} differs from the majority of {ranks} in {name}" in result.text()
    assert vote([leaves] * ranks).is_equal


def test_two_ranks_cannot_decide() -> None:
    result = vote([{"a": "0"}, {"a": "1"}])
    assert (result.odd, result.is_decided) == ((0, 1), False)
    assert "no majority" in result.text()
    with pytest.raises(ValueError, match="at least one"):
        vote([])
