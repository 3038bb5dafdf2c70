"""Emulated precision: formats hold what they can hold, plain emulation changes nothing, and the published failures come out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.core.config import SENSITIVE_OPS, NumericsConfig
from strop.core.errors import ConfigError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.numerics.formats import E2M1_LEVELS, FORMATS, round_to
from strop.numerics.precision import FORWARD_OPS, POLICY, Emulation, Precision, policy_markdown

# Every token uses every expert, so that shapes inside don't depend on batch mates and equality can be asked for bit by bit.
SHAPE = DecoderConfig(
    vocab_size=40, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=3, top_k=3, expert_size=32
)
LOW = [kind for kind in FORMATS if kind not in ("fp64", "fp32")]


def decoder(precision: Precision | None = None, shape: DecoderConfig = SHAPE) -> Decoder:
    model = Decoder(shape).requires_grad_(False)
    model.initialise(torch.Generator().manual_seed(0), std=0.3)
    if precision is not None:
        Emulation(model, precision)
    return model


@torch.no_grad()
def logits(model: Decoder, *streams: list[int]) -> list[Tensor]:
    packed = PackedTokens.of([torch.tensor(stream) for stream in streams])
    return list(model.logits(model(packed).hidden).split([len(stream) for stream in streams]))


# ---------------------------------------------------------------------------------------------------- formats


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(LOW), st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70))
def test_rounding_keeps_sign_and_size_and_is_idempotent_for_plain_types(kind: str, values: list[float]) -> None:
    x = torch.tensor([values])
    once = round_to(x, kind)
    assert (once * x >= 0).all()
    largest = float(x.abs().max())
    step = {"tf32": 2**-11, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.5 / 127, "mxfp8": 2**-3, "nvfp4": 0.26}[kind]
    assert float((once - x).abs().max()) <= step * largest * 1.01 + 1e-7
    if kind in ("tf32", "bf16", "fp16"):
        assert torch.equal(round_to(once, kind), once)


def test_tf32_has_ten_mantissa_bits() -> None:
    one = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12])
    assert round_to(one, "tf32").tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1.0]


def test_fp4_levels_and_ties_to_even() -> None:
    # A block whose largest value is 6 has the scale 1 and so the levels themselves.
    borders = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([[6.0, *borders, -0.25, -0.75, 0.3, 0.2, -5.1, 0, 0, 0]])
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, 0.5, 0.0, -6.0, 0, 0, 0]
    assert round_to(row, "nvfp4").abs().tolist()[0] == pytest.approx([abs(v) for v in expected])
    assert len({float(v) for v in round_to(torch.randn(1, 16), "nvfp4").abs().flatten()}) <= len(E2M1_LEVELS)


def test_mx_scales_are_powers_of_two_and_of_their_own_block() -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    x[:, :32] *= 1000
    rounded = round_to(x, "mxfp8")
    assert torch.equal(round_to(x * 4, "mxfp8"), rounded * 4)
    x[:, :32] = 0
    assert torch.equal(round_to(x, "mxfp8")[:, 32:], rounded[:, 32:])


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_rounded_away(kind: str, bad: float) -> None:
    x = torch.ones(2, 40)
    x[0, 3] = bad
    assert torch.equal(torch.isfinite(round_to(x, kind)[0, 3]), torch.tensor(False))
    assert round_to(torch.zeros(2, 40), kind).abs().max() == 0
    assert round_to(torch.zeros(0, 40), kind).shape == (0, 40)


# ---------------------------------------------------------------------------------------------------- the published failures

SCALED = ["mxfp8", "nvfp4"]


@pytest.mark.parametrize("kind", SCALED)
def test_per_tensor_scale_ties_a_row_to_its_batch_mates(kind: str) -> None:
    mine, calm, loud = [1, 2, 3, 4], [5, 5, 5, 5], [30, 31, 32, 33]
    for scale, is_tied in (("tensor", True), ("token", False)):
        model = decoder(Precision.of(kind, scale=scale))
        one, two = logits(model, mine, calm)[0], logits(model, mine, loud)[0]
        assert torch.equal(one, two) != is_tied, scale


@pytest.mark.parametrize("kind", SCALED)
def test_per_tensor_scale_ties_a_row_to_future_tokens(kind: str) -> None:
    """So the trainer, which sees whole episodes, can't reproduce what the rollout computed token by token."""
    for scale, is_tied in (("tensor", True), ("token", False)):
        model = decoder(Precision.of(kind, scale=scale))
        futures = [logits(model, [1, 2, 3, 4, token])[0][:4] for token in range(5, 15)]
        assert all(torch.equal(futures[0], other) for other in futures) != is_tied, scale


@pytest.mark.parametrize("kind", ["bf16", "fp16", "tf32", "int8"])
def test_types_without_activation_scales_tie_nothing(kind: str) -> None:
    model = decoder(Precision.of(kind, scale="tensor"))
    assert torch.equal(logits(model, [1, 2, 3, 4], [5, 5, 5, 5])[0], logits(model, [1, 2, 3, 4], [30, 31, 32, 33])[0])
    assert torch.equal(logits(model, [1, 2, 3, 4, 5])[0][:4], logits(model, [1, 2, 3, 4, 9])[0][:4])


# ---------------------------------------------------------------------------------------------------- the policy


def test_plain_emulation_changes_no_bit_and_low_ones_do() -> None:
    plain = logits(decoder(), list(range(20)))[0]
    assert torch.equal(logits(decoder(Precision.of("fp32")), list(range(20)))[0], plain)
    sizes = {kind: float((logits(decoder(Precision.of(kind)), list(range(20)))[0] - plain).abs().mean()) for kind in LOW}
    assert 0 < sizes["fp16"] < sizes["bf16"] < sizes["mxfp8"] < sizes["nvfp4"]
    assert 0 < sizes["tf32"] < sizes["bf16"] < sizes["int8"]


@pytest.mark.parametrize("op", FORWARD_OPS)
def test_each_line_can_be_overridden_and_has_an_effect(op: str) -> None:
    plain = logits(decoder(), list(range(20)))[0]
    alone = logits(decoder(Precision.of("fp32", overrides=[f"{op}=bf16"])), list(range(20)))[0]
    assert not torch.equal(alone, plain)
    assert float((alone - plain).abs().max()) < 3.0


@pytest.mark.parametrize("kind", LOW)
def test_sensitive_lines_stay_float32_unless_told_otherwise(kind: str) -> None:
    usual, without = Precision.of(kind), Precision.of(kind, keep=())
    assert {name for name in FORWARD_OPS if usual.dtypes[name] == "fp32"} >= set(SENSITIVE_OPS)
    assert {name: kept for name, kept in usual.dtypes.items() if name not in SENSITIVE_OPS} == {
        name: kept for name, kept in without.dtypes.items() if name not in SENSITIVE_OPS
    }
    assert all(without.dtypes[name] != "fp32" for name in ("router", "lm_head"))
    assert Precision.of(kind, overrides=["router=bf16"]).dtypes["router"] == "bf16"


def test_what_is_kept_brings_a_rollout_closer_to_a_float32_trainer() -> None:
    plain = logits(decoder(), list(range(20)))[0]
    usual, without = (logits(decoder(Precision.of("bf16", keep=keep)), list(range(20)))[0] for keep in (SENSITIVE_OPS, ()))
    assert float((usual - plain).abs().mean()) < 0.95 * float((without - plain).abs().mean())


def test_a_configuration_says_what_is_kept() -> None:
    for changes, expected in (({}, "fp32"), ({"rollout_keep": []}, "bf16"), ({"precision": ["norm=bf16"]}, "bf16")):
        config = NumericsConfig.model_validate({"rollout_precision": "bf16"} | changes)
        assert Precision.of_config(config).dtypes["norm"] == expected
    with pytest.raises(ConfigError, match="Did you mean 'router'"):
        Precision.of_config(NumericsConfig.model_validate({"rollout_keep": ["rooter"]}))


def test_one_layer_alone() -> None:
    model = decoder()
    plain = logits(model, [1, 2, 3])[0]
    emulation = Emulation(model, Precision.of("bf16"), layers=[1])
    assert not torch.equal(logits(model, [1, 2, 3])[0], plain)
    emulation.remove()
    rounded = logits(model, [1, 2, 3])[0]
    assert not torch.equal(rounded, plain)  # the layer's weights stay rounded
    assert torch.equal(model.model.layers[0].mlp.gate.weight, decoder().model.layers[0].mlp.gate.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [("bf61", [], "Did you mean 'bf16'"), ("bf16", ["rooter=fp32"], "Did you mean 'router'"), ("bf16", ["router=fp23"], "router=fp23")],
)
def test_wrong_names_are_named(kind: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision.of(kind, overrides=overrides)


def test_the_table_is_complete() -> None:
    text = policy_markdown()
    assert all(f"`{name}`" in text and rule.why for name, rule in POLICY.items())
    assert np.count_nonzero([rule.trained for rule in POLICY.values()]) == 5
