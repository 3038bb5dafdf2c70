"""Checkpoints appear whole or not at all; damage is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import CheckpointError
from strop.store import checkpoint as module
from strop.store.checkpoint import load_checkpoint, publish, recover, save_checkpoint, verify
from strop.store.state import flatten, unflatten

TENSORS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(3, dtype=np.int64), "view": np.arange(10)[::2]}


def test_tensors_and_meta_come_back(tmp_path: Path):
    digest = save_checkpoint(tmp_path / "c", TENSORS, {"step": 3, "note": "é"})
    found = load_checkpoint(tmp_path / "c")
    assert found.digest == digest == verify(tmp_path / "c")
    assert found.meta == {"step": 3, "note": "é"}
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.tensors.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in TENSORS.items()
    }


def test_torch_tensors_come_back_with_ties_views_and_bfloat16(tmp_path: Path):
    torch = pytest.importorskip("torch")
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": base, "tied": base, "transposed": base.T, "half": base.to(torch.bfloat16), "grad": torch.nn.Parameter(base)}
    save_checkpoint(tmp_path / "c", tensors)
    found = load_checkpoint(tmp_path / "c").tensors
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())


def test_the_same_content_has_the_same_digest(tmp_path: Path):
    assert save_checkpoint(tmp_path / "a", TENSORS, {"x": 1}) == save_checkpoint(tmp_path / "b", TENSORS, {"x": 1})
    assert save_checkpoint(tmp_path / "c", TENSORS, {"x": 2}) != save_checkpoint(tmp_path / "b", TENSORS, {"x": 1})


@pytest.mark.parametrize("name", ["tensors.safetensors", "meta.json"])
def test_a_flipped_bit_is_named_with_both_digests(tmp_path: Path, name: str):
    save_checkpoint(tmp_path / "c", TENSORS)
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: digest [0-9a-f]{{64}}, expected [0-9a-f]{{64}}"):
        load_checkpoint(tmp_path / "c")


def test_missing_added_and_cut_files_are_named(tmp_path: Path):
    for damage, message in (("missing", "tensors.safetensors is missing"), ("added", "not saved with it: extra"), ("cut", "damaged")):
        target = tmp_path / damage
        save_checkpoint(target, TENSORS)
        if damage == "missing":
            (target / "tensors.safetensors").unlink()
        elif damage == "added":
            (target / "extra").write_text("x")
        else:
            (target / "digests.json").write_text("{")
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(target)


def test_a_name_that_does_not_exist_lists_those_that_do(tmp_path: Path):
    save_checkpoint(tmp_path / "mid", TENSORS)
    with pytest.raises(CheckpointError, match=r"does not exist. Checkpoints there: mid"):
        load_checkpoint(tmp_path / "rl")


def test_a_crash_while_replacing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_checkpoint(tmp_path / "c", TENSORS, {"version": 1})

    def crash(source, target):
        if Path(source).name.startswith(".tmp-"):
            raise KeyboardInterrupt
        os.replace(source, target)

    monkeypatch.setattr(module.os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "c", TENSORS, {"version": 2})
    monkeypatch.undo()
    assert not (tmp_path / "c").exists()  # the crash fell into the gap
    recover(tmp_path)
    assert load_checkpoint(tmp_path / "c").meta == {"version": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_failing_writer_leaves_nothing(tmp_path: Path):
    def write(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("model can't be saved")

    with pytest.raises(RuntimeError, match="can't be saved"):
        publish(tmp_path / "c", write)
    assert list(tmp_path.iterdir()) == []


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(tree=TREES)
def test_nested_state_comes_back(tree):
    tensors, skeleton = flatten({"tree": tree, 1: np.arange(3), "1": np.arange(4)})
    again = unflatten(tensors, json.loads(json.dumps(skeleton)))
    assert again["tree"] == tree
    assert type(again["tree"]) is type(tree)
    assert (len(again[1]), len(again["1"])) == (3, 4)


def test_state_that_is_no_data_is_named():
    with pytest.raises(CheckpointError, match="'optimizer/fn' is a function"):
        flatten({"optimizer": {"fn": flatten}})
