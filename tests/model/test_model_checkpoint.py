"""Directories that transformers loads, damage that is named, and digests that see one bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_kit import SMALL, alone, random_streams, random_weights
from safetensors.torch import load_file, save_file

from strop.core.errors import CheckpointError, WeightsError
from strop.model.checkpoint import load_checkpoint, save_checkpoint
from strop.model.config import DecoderConfig
from strop.model.inference import InferenceModel
from strop.numerics.digest import tensor_digest, weights_digest

WEIGHTS = random_weights(SMALL)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", SMALL, WEIGHTS)
    return tmp_path / "model"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_transformers_loads_it_with_equal_log_probabilities(tmp_path: Path, is_tied: bool, norms: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = replace(SMALL, tie_embeddings=is_tied, norm_topk_prob=norms, rope_theta=5000.0)
    weights = random_weights(config)
    save_checkpoint(tmp_path / "ours", config, weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    (stream,) = random_streams(config, [50])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(stream)[None].long()).logits[0].log_softmax(-1).numpy()
    loaded, values = load_checkpoint(tmp_path / "ours")
    logits, _ = alone(InferenceModel(loaded, values, threads=1), stream)
    ours = torch.from_numpy(logits.copy()).log_softmax(-1).numpy()
    assert np.abs(ours - expected).max() < 2e-5
    assert loaded == config

    theirs.save_pretrained(tmp_path / "theirs")
    back, values = load_checkpoint(tmp_path / "theirs")
    assert back == config
    assert weights_digest(values) == weights_digest(weights)


def test_a_round_trip_keeps_every_bit_and_ties(saved: Path) -> None:
    config, weights = load_checkpoint(saved)
    assert config == SMALL
    assert "lm_head.weight" not in weights
    assert weights_digest(weights) == weights_digest(WEIGHTS)
    names = load_file(saved / "model.safetensors")
    assert names["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (24, 40)
    assert torch.equal(names["model.layers.1.mlp.experts.3.up_proj.weight"], WEIGHTS["model.layers.1.mlp.experts.gate_up_proj"][3, 24:])
    assert save_checkpoint(saved.parent / "again", SMALL, WEIGHTS) == save_checkpoint(saved, SMALL, WEIGHTS)


def test_fused_names_and_shards_are_read_too(tmp_path: Path, saved: Path) -> None:
    folder = tmp_path / "fused"
    folder.mkdir()
    (folder / "config.json").write_text((saved / "config.json").read_text())
    names = sorted(WEIGHTS)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({n: WEIGHTS[n] for n in members}, folder / shard)
    index = {"weight_map": {n: shard for shard, members in shards.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_digest(load_checkpoint(folder)[1]) == weights_digest(WEIGHTS)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights file b\.safetensors is missing"):
        load_checkpoint(folder)


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        save_checkpoint(tmp_path / "model", SMALL, WEIGHTS, tokenizer_from=source)
    assert not (tmp_path / "model").exists()
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "notes.txt").write_text("not a tokenizer")
    save_checkpoint(tmp_path / "model", SMALL, WEIGHTS, tokenizer_from=source)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "config.json",
        "digests.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    (tmp_path / "model" / "README.md").write_text("a model card added later is nobody's damage")
    load_checkpoint(tmp_path / "model")


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of a checkpoint that carries no digests."""
    (folder / "digests.json").unlink()
    tensors = load_file(folder / "model.safetensors") | {n: t for n, t in change.items() if t is not None}
    save_file({n: t for n, t in tensors.items() if n not in change or change[n] is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"model.layers.0.mlp.experts.5.down_proj.weight": None},
            r"tensor 'model\.layers\.0\.mlp\.experts\.5\.down_proj\.weight'.* is missing",
        ),
        ({"model.layers.2.self_attn.q_norm.weight": None}, r"'model\.layers\.2\.self_attn\.q_norm\.weight' \[16\] is missing"),
        ({"model.norm.weight": torch.ones(41)}, r"safetensors: tensor 'model\.norm\.weight' has shape \[41\], expected \[40\]"),
        ({"model.norm.bias": torch.ones(40)}, r"tensor 'model\.norm\.bias' belongs to no part"),
        ({"lm_head.weight": torch.ones(101, 40)}, "differs from the embedding"),
    ],
)
def test_wrong_tensors_are_named(saved: Path, change: dict[str, torch.Tensor | None], text: str) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(saved)


@pytest.mark.parametrize("offset", [3, 200, -1])
def test_one_flipped_bit_in_the_file_is_found(saved: Path, offset: int) -> None:
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: digest"):
        load_checkpoint(saved)


def test_a_truncated_file_without_digests_is_named(saved: Path) -> None:
    (saved / "digests.json").unlink()
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_checkpoint(saved)


def test_directories_that_are_no_checkpoint_are_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'model'"):
        load_checkpoint(tmp_path / "modle")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_checkpoint(tmp_path / "empty")
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"file model\.safetensors is missing"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("mlp_only_layers", [0]),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn"}),
    ],
)
def test_other_architectures_are_refused(key: str, value: object) -> None:
    data = SMALL.to_hf() | {key: value}
    if key == "rope_scaling":
        del data["rope_parameters"]
    with pytest.raises(CheckpointError, match="not supported by the embedded engine"):
        DecoderConfig.from_hf(data)


def test_a_failed_save_leaves_the_older_checkpoint(saved: Path) -> None:
    with pytest.raises(WeightsError, match="is missing"):
        save_checkpoint(saved, SMALL, {})
    assert weights_digest(load_checkpoint(saved)[1]) == weights_digest(WEIGHTS)


# --------------------------------------------------------------------------------------------------------------- digests


@pytest.mark.parametrize("bit", [0, 1, 12, 22, 23, 30, 31])
def test_the_digest_sees_every_bit_of_every_tensor(bit: int) -> None:
    before = weights_digest(WEIGHTS)
    for name in ("model.norm.weight", "model.layers.1.mlp.experts.down_proj", "model.embed_tokens.weight"):
        flipped = WEIGHTS[name].clone()
        flipped.view(torch.int32).view(-1)[-1] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert weights_digest(dict(WEIGHTS) | {name: flipped}) != before


def test_the_digest_sees_names_shapes_and_types_but_not_order_layout_or_framework() -> None:
    a = torch.arange(6, dtype=torch.float32)
    base = weights_digest({"a": a, "b": a})
    assert weights_digest({"b": a, "a": a}) == base
    assert weights_digest({"a": a.numpy(), "b": a.numpy().astype(">f4")}) == base
    assert weights_digest({"a": torch.stack([a, a], 1)[:, 0], "b": a}) == base
    assert weights_digest({"a": a, "c": a}) != base
    assert weights_digest({"a": a.view(2, 3), "b": a}) != base
    assert weights_digest({"a": a.view(torch.int32), "b": a}) != base
    assert tensor_digest(torch.tensor(1.0, dtype=torch.bfloat16)) != tensor_digest(torch.tensor(1.0, dtype=torch.float16))
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))


def test_tied_weights_have_one_digest_with_and_without_the_alias() -> None:
    embed = WEIGHTS["model.embed_tokens.weight"]
    assert weights_digest(dict(WEIGHTS) | {"lm_head.weight": embed}) == weights_digest(WEIGHTS)
    assert weights_digest(dict(WEIGHTS) | {"lm_head.weight": embed.clone()}) == weights_digest(WEIGHTS)
    assert weights_digest(dict(WEIGHTS) | {"lm_head.weight": embed + 1}) != weights_digest(WEIGHTS)
