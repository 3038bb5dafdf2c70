"""Localisation: clean passes are silent, every planted fault names its operation and layer, and the kind of fault is told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from strop.core.errors import CheckpointError, NumericsError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, Layer, PackedTokens
from strop.numerics.canary import canary_streams
from strop.numerics.localise import compute, diagnose, load_trace, localise, operations, record, save_trace
from strop.numerics.precision import FORWARD_OPS, Emulation, Precision

SHAPE = DecoderConfig(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2, expert_size=24
)
PACKED = PackedTokens.of([torch.from_numpy(s).long() for s in canary_streams(SHAPE.vocab_size, streams=3, length=20)])


def decoder(seed: int = 0) -> Decoder:
    model = Decoder(SHAPE).requires_grad_(False)
    model.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return model


def layer(model: Decoder, index: int) -> Layer:
    return cast(Layer, model.model.layers[index])


def test_a_clean_pass_is_silent_and_leaves_no_hook_behind() -> None:
    model = decoder()
    before = model(PACKED).hidden
    trace = record(model, PACKED)
    assert list(trace) == operations(SHAPE.num_layers)
    assert localise(trace, decoder(), PACKED).operation == ""
    assert diagnose(trace, model, decoder(), PACKED).kind == "none"
    assert torch.equal(model(PACKED).hidden, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("op", [op for op in FORWARD_OPS if op not in ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("kind", ["tf32", "bf16", "fp16"])
def test_one_operation_in_low_precision_names_its_layer(op: str, index: int, kind: str) -> None:
    suspect = decoder()
    Emulation(suspect, Precision.of("fp32", overrides=[f"{op}={kind}"]), layers=[index])
    found = localise(record(suspect, PACKED), decoder(), PACKED)
    if op == "residual" and kind == "tf32":  # results of products are float32 in TF32, so there is nothing to round
        assert found.operation == ""
        return
    assert found.layer == index
    names = {"projection": "_proj", "norm": "norm", "experts": "mlp.experts", "router": "mlp.gate", "residual": "norm", "attention": ""}
    assert names[op] in found.operation


WEIGHTS = ["self_attn.q_proj.weight", "self_attn.k_norm.weight", "mlp.gate.weight", "mlp.experts.down_proj", "input_layernorm.weight"]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("index", range(3))
def test_one_unit_in_the_last_place_of_a_weight_is_named(name: str, index: int) -> None:
    suspect = decoder()
    weight = layer(suspect, index).get_parameter(name).view(-1).numpy()
    at = int(np.abs(weight).argmax())
    weight[at : at + 1].view(np.int32)[0] += 4  # a smaller one may vanish in the sums, and then it has no effect to be found
    found = diagnose(record(suspect, PACKED), suspect, decoder(), PACKED)
    assert (found.kind, found.layer, found.detail) == ("weights", index, f"model.layers.{index}.{name}")


def test_swapped_experts_and_another_eps_are_named() -> None:
    suspect = decoder()
    experts = layer(suspect, 1).mlp.experts
    experts.down_proj.copy_(experts.down_proj[[1, 0, 2, 3]])
    found = diagnose(record(suspect, PACKED), suspect, decoder(), PACKED)
    assert (found.operation, found.kind) == ("layers.1.mlp.experts", "weights")
    suspect = decoder()
    layer(suspect, 2).post_attention_layernorm.eps = 1e-5
    found = diagnose(record(suspect, PACKED), suspect, decoder(), PACKED)
    assert (found.operation, found.kind) == ("layers.2.post_attention_layernorm", "persistent")


def test_a_fault_that_happens_once_is_transient() -> None:
    suspect = decoder()
    hits = 0

    def once(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal hits
        hits += 1
        if hits > 1:
            return None
        output = output.clone()
        output[3, 2] *= 1.5
        return output

    layer(suspect, 0).self_attn.o_proj.register_forward_hook(once)
    found = diagnose(record(suspect, PACKED), suspect, decoder(), PACKED)
    assert (found.operation, found.kind) == ("layers.0.self_attn.o_proj", "transient")


def test_other_tokens_are_software_or_data() -> None:
    model = decoder()
    other = PackedTokens(PACKED.token_ids.roll(1), PACKED.positions, PACKED.lengths)
    found = diagnose(record(model, other), model, decoder(), PACKED)
    assert found.kind == "software-or-data"
    assert "every operation agrees" in found.text()


def test_a_limit_lets_noise_pass_and_a_fault_not() -> None:
    suspect = decoder()
    Emulation(suspect, Precision.of("fp32", overrides=["projection=fp16"]), layers=[1])
    trace = record(suspect, PACKED)
    assert localise(trace, decoder(), PACKED, dict.fromkeys(trace, 0.1)).operation == ""
    found = localise(trace, decoder(), PACKED, dict.fromkeys(trace, 1e-6))
    assert found.layer == 1
    assert 1e-5 < found.distance < 1e-2


def test_nan_is_beyond_every_limit() -> None:
    suspect = decoder()
    layer(suspect, 2).mlp.experts.down_proj[1, 0, 0] = float("nan")
    found = localise(record(suspect, PACKED), decoder(), PACKED, dict.fromkeys(operations(3), 0.5))
    assert (found.operation, found.distance) == ("layers.2.mlp.experts", float("inf"))


def test_a_trace_travels_as_a_file(tmp_path: Path) -> None:
    suspect = decoder()
    layer(suspect, 1).mlp.gate.weight[0, 0] += 0.01
    save_trace(tmp_path / "ranks" / "rank-2.npz", record(suspect, PACKED), PACKED)
    trace, packed = load_trace(tmp_path / "ranks" / "rank-2.npz")
    assert packed.lengths == PACKED.lengths
    assert diagnose(trace, suspect, decoder(), packed).text().startswith("layers.1.mlp.gate is off by")
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    for name in ("bad.npz", "none.npz"):
        with pytest.raises(CheckpointError, match=name):
            load_trace(tmp_path / name)
    with pytest.raises(NumericsError, match=r"layers\.9"):
        compute(suspect, "layers.9.mlp.gate", [torch.zeros(1, 32)], packed)
