"""What must be noticed: lower precision in one operation, NaN and infinity, and calls that don't fit the contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_kit import SMALL, alone, packed, random_streams, random_weights, rows_of, same_bits

from strop.core.errors import ConfigError, EngineError, NumericsError, WeightsError
from strop.model.config import DecoderConfig
from strop.model.inference import InferenceModel, KVCache, Rows
from strop.model.native.weights import weight_names
from strop.model.training import TrainModel

WEIGHTS = random_weights(SMALL)
MODEL = InferenceModel(SMALL, WEIGHTS, threads=1)
NONE = np.array([], np.int32)


@pytest.mark.parametrize("name", [n for n in weight_names(SMALL) if ".1." in n or "embed" in n or n == "model.norm.weight"])
def test_one_weight_in_bfloat16_on_one_side_is_seen(name: str) -> None:
    (stream,) = random_streams(SMALL, [60])
    other = dict(WEIGHTS) | {name: WEIGHTS[name].bfloat16().float()}
    rollout = alone(InferenceModel(SMALL, other, threads=1), stream)[0]
    targets = np.arange(60) % SMALL.vocab_size
    recorded, _ = MODEL.logprobs(rollout, targets, 1.0)
    out = TrainModel(SMALL, WEIGHTS, threads=1).forward(packed([stream]), want=torch.arange(60), targets=torch.from_numpy(targets))
    assert np.abs(out.logprobs.detach().numpy() - recorded).max() > 0


@pytest.mark.parametrize("operation", ["self_attn", "input_layernorm", "mlp.gate", "mlp.experts"])
def test_one_operation_in_bfloat16_stands_out_of_the_tolerant_noise(operation: str) -> None:
    (stream,) = random_streams(SMALL, [60])
    want, targets = torch.arange(60), torch.arange(60) % SMALL.vocab_size
    exact = TrainModel(SMALL, WEIGHTS, threads=1).forward(packed([stream]), want=want, targets=targets)
    tolerant = TrainModel(SMALL, WEIGHTS, mode="tolerant")
    routes = exact.expert_ids
    clean = tolerant.forward(packed([stream]), want=want, targets=targets, forced_routes=routes).logprobs.detach()
    assert tolerant._decoder is not None
    module = tolerant._decoder.get_submodule(f"model.layers.1.{operation}")

    def rounded(_module: object, _inputs: object, output: object) -> object:
        return (
            tuple(rounded(None, None, o) for o in output)
            if isinstance(output, tuple)
            else (output.bfloat16().float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output)
        )

    handle = module.register_forward_hook(rounded)
    faulty = tolerant.forward(packed([stream]), want=want, targets=targets, forced_routes=routes).logprobs.detach()
    handle.remove()
    noise = float((clean - exact.logprobs.detach()).abs().max())
    assert noise < 2e-5  # a few units in the last place of the largest logits, which are near 20
    assert float((faulty - exact.logprobs.detach()).abs().max()) > 10 * noise


def test_nan_stays_in_its_stream_and_behind_its_position() -> None:
    weights = dict(WEIGHTS) | {"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"].clone()}
    config = DecoderConfig(**{f: getattr(SMALL, f) for f in SMALL.__slots__} | {"tie_embeddings": False})
    weights["lm_head.weight"] = WEIGHTS["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"][7] = float("nan")
    model = InferenceModel(config, weights, threads=1)
    a, b = random_streams(SMALL, [50, 50])
    a[a == 7], b[b == 7] = 8, 8
    bad = a.copy()
    bad[20] = 7
    cache = KVCache(config, 2, 50)
    out = model.infer(rows_of([(0, 0, bad), (1, 0, b)]), cache, np.arange(100))
    assert same_bits(out.logits[:20], alone(MODEL, a)[0][:20])
    assert np.isnan(out.logits[20:50]).all()
    assert same_bits(out.logits[50:], alone(MODEL, b)[0])
    assert out.expert_ids[:, :, :].max() < SMALL.num_experts
    assert (np.diff(out.expert_ids.astype(int), axis=-1) > 0).all()
    cache.copy_prefix(1, 0, 30)
    again = model.infer(rows_of([(0, 30, b[30:])]), cache, np.arange(20))
    assert same_bits(again.logits, out.logits[80:])


def test_infinite_weights_end_in_nan_never_in_a_plausible_number() -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    broken = WEIGHTS[name].clone()
    broken[0, 0] = float("inf")
    model = InferenceModel(SMALL, dict(WEIGHTS) | {name: broken}, threads=1)
    (stream,) = random_streams(SMALL, [10])
    logits, _ = alone(model, stream)
    assert np.isnan(logits).all()
    ids, logprobs = model.sample(logits, np.full(10, 0.5), 1.0)
    assert (ids == 0).all()
    assert np.isnan(logprobs).all()


@pytest.mark.parametrize(
    ("tokens", "positions", "slots", "want", "text"),
    [
        ([101], [0], [0], [], "row 0: token id 101 is outside 0..100"),
        ([1, -1], [0, 1], [0, 0], [], "row 1: token id -1 is outside"),
        ([1], [64], [0], [], "row 0: position 64 is outside 0..63"),
        ([1], [0], [2], [], "row 0: slot 2 is outside 0..1"),
        ([1], [0], [0], [1], "want 1 is outside 0..0"),
        ([1, 2], [0, 2], [0, 0], [], "row 1: position 2 of slot 0 does not follow 0"),
        ([1, 2, 3], [0, 0, 1], [0, 1, 0], [], "rows of slot 0 do not lie together"),
        ([1], [5], [0], [], "row 0: slot 0 was never fed the positions before 5"),
        ([], [], [], [], "rows need equal, non-zero lengths"),
        ([1], [0, 1], [0], [], "rows need equal, non-zero lengths"),
    ],
)
def test_rows_outside_the_contract_are_named(tokens: list[int], positions: list[int], slots: list[int], want: list[int], text: str) -> None:
    with pytest.raises(EngineError, match=text.replace("[", r"\[")):
        MODEL.infer(Rows(np.array(tokens), np.array(positions), np.array(slots)), KVCache(SMALL, 2, 64), np.array(want))


def test_cache_calls_outside_the_contract_are_named() -> None:
    cache = KVCache(SMALL, 2, 64)
    MODEL.infer(rows_of([(0, 0, np.arange(20))]), cache, NONE)
    with pytest.raises(EngineError, match="dst_slot 2 is outside"):
        cache.copy_prefix(0, 2, 4)
    with pytest.raises(EngineError, match=r"n 33 is outside 0\.\.32"):
        cache.copy_prefix(0, 1, 33)
    with pytest.raises(EngineError, match="at least one slot"):
        KVCache(SMALL, 0, 64)


def test_blocks_come_back_when_streams_end() -> None:
    cache = KVCache(SMALL, 3, 64)
    for _ in range(20):
        MODEL.infer(rows_of([(0, 0, np.arange(60))]), cache, NONE)
        cache.copy_prefix(0, 1, 50)
        cache.copy_prefix(1, 2, 33)
        MODEL.infer(rows_of([(2, 33, np.arange(31)), (1, 50, np.arange(14))]), cache, NONE)
    for slot in range(3):
        cache.free(slot)
        cache.free(slot)
    assert cache._users.sum() == 0
    assert (cache.table == -1).all()


def test_weights_that_do_not_fit_are_named() -> None:
    missing = dict(WEIGHTS)
    del missing["model.layers.2.mlp.gate.weight"]
    with pytest.raises(WeightsError, match=r"model\.layers\.2\.mlp\.gate\.weight.* is missing"):
        MODEL.load(missing)
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' has shape \[3\], expected \[40\]"):
        MODEL.load(dict(WEIGHTS) | {"model.norm.weight": torch.ones(3)})
    with pytest.raises(WeightsError, match=r"'model\.norm\.bias' is unknown"):
        MODEL.load(dict(WEIGHTS) | {"model.norm.bias": torch.ones(3)})
    with pytest.raises(WeightsError, match="although the configuration ties them"):
        MODEL.load(dict(WEIGHTS) | {"lm_head.weight": WEIGHTS["model.embed_tokens.weight"] + 1})
    MODEL.load(dict(WEIGHTS) | {"lm_head.weight": WEIGHTS["model.embed_tokens.weight"].clone()})


def test_training_calls_outside_the_contract_are_named() -> None:
    (stream,) = random_streams(SMALL, [10])
    model = TrainModel(SMALL, WEIGHTS, threads=1)
    good = {"want": torch.arange(10), "targets": torch.zeros(10, dtype=torch.long)}
    twice = torch.zeros(10, 3, 2, dtype=torch.long)
    for change, text in (
        ({"targets": torch.full((10,), 101)}, "target 101 is outside"),
        ({"want": torch.arange(1, 11)}, "want 10 is outside"),
        ({"want": torch.arange(9)}, "equal, non-zero lengths"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"forced_routes": twice}, "an expert twice"),
        ({"forced_routes": twice[:9]}, "forced_routes must be"),
        ({"forced_routes": twice + 9}, "forced route 9 is outside"),
    ):
        with pytest.raises(NumericsError, match=text):
            model.forward(packed([stream]), **(good | change))
    with pytest.raises(ConfigError, match="exact mode runs on the CPU only"):
        TrainModel(SMALL, WEIGHTS, device="cuda")
    out = model.forward(packed([stream]), **good)
    loss = out.logprobs.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(NumericsError, match="already used for a backward pass"):
        loss.backward()
