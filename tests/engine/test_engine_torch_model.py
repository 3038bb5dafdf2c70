"""The torch model against the decoder's own forward pass, on every device there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_setups import SHAPE, decoder_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.cli.models import model_dir
from strop.core.errors import EngineError, WeightsError
from strop.engine.backend import RowBlock
from strop.engine.torch_model import TorchModel
from strop.model.checkpoint import load_checkpoint
from strop.model.decoder import Decoder, PackedTokens, attend
from strop.model.training import TrainModel

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def rows_of(ids: np.ndarray, start: int, end: int, slot: int) -> RowBlock:
    positions = np.arange(start, end, dtype=np.int32)
    return RowBlock(ids[start:end].astype(np.int32), positions, np.full(end - start, slot, np.int32))


def join(*blocks: RowBlock) -> RowBlock:
    return RowBlock(*(np.concatenate([getattr(b, name) for b in blocks]) for name in ("token_ids", "positions", "slots")))


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_decode_rows_and_copies_agree_with_the_decoder(device):
    weights = decoder_weights(0)
    model = TorchModel(SHAPE, weights, device=device)
    decoder = Decoder(SHAPE)
    decoder.load_state_dict(weights)
    rng = np.random.default_rng(0)
    one, two = rng.integers(0, SHAPE.vocab_size, 23), rng.integers(0, SHAPE.vocab_size, 31)
    with torch.no_grad():
        out = decoder(PackedTokens.of([torch.from_numpy(one), torch.from_numpy(two)]))
        expected = decoder.logits(out.hidden).numpy()
    cache = model.make_cache(3, 40)
    first = model.infer(join(rows_of(one, 0, 9, 1), rows_of(two, 0, 30, 0)), cache, np.array([8, 38], np.int32))
    cache.copy_prefix(1, 2, 9)
    second = model.infer(join(rows_of(two, 30, 31, 0), rows_of(one, 9, 22, 2)), cache, np.array([0, 13], np.int32))
    third = model.infer(rows_of(one, 22, 23, 2), cache, np.array([0], np.int32))
    got = np.concatenate([first.logits, second.logits, third.logits])
    assert np.abs(got - expected[[8, 23 + 29, 23 + 30, 21, 22]]).max() < 1e-4
    routes = out.expert_ids.numpy()
    assert (first.expert_ids == np.concatenate([routes[:9], routes[23:53]])).mean() > 0.99
    assert first.expert_ids.dtype == np.uint8


def largest_step_difference(seed: int, tokens: int, *, is_wide: bool) -> float:
    """Largest difference between attention over a whole stream and the same rows one by one, over padded keys, with sharp scores."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, 16, generator=draw) for heads in (4, 2, 2))
    q = 8 * q
    whole = attend(q, k, v, is_wide=is_wide)
    longest = tokens + 7
    padded = [torch.nn.functional.pad(x, (0, 0, 0, longest - tokens), value=3.0) for x in (k, v)]
    largest = 0.0
    for at in range(tokens):
        mask = (torch.arange(longest) <= at)[None, None, None]
        row = attend(q[:, :, at : at + 1], *padded, mask=mask, is_wide=is_wide)
        largest = max(largest, float((row[:, :, 0] - whole[:, :, at]).abs().max()))
    return largest


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(2, 80))
def test_wide_attention_gives_the_same_rows_in_prefill_and_decode(seed: int, tokens: int) -> None:
    assert largest_step_difference(seed, tokens, is_wide=True) <= 3e-7  # one rounding to float32


def test_narrow_attention_would_not() -> None:
    assert max(largest_step_difference(seed, 80, is_wide=False) for seed in range(4)) > 1e-6


def test_rollout_and_trainer_of_the_base_sum_attention_wide_on_the_cpu_and_agree() -> None:
    config, weights = load_checkpoint(model_dir("builtin:tiny"))
    model, trainer = TorchModel(config, weights), TrainModel(config, weights, mode="tolerant")
    assert trainer._decoder is not None
    assert all(layer.self_attn.is_wide for layer in (*model._decoder.model.layers, *trainer._decoder.model.layers))
    ids, sampled, draw, cache = np.array([1, 2, 3]), [], np.random.default_rng(5), model.make_cache(1, 96)
    step = rows_of(ids, 0, 3, 0)
    for at in range(3, 96):
        found = model.infer(step, cache, np.array([len(step.slots) - 1], np.int32))
        token, logprob = model.sample(found.logits, draw.random(1), 1.0)
        sampled.append(float(logprob[0]))
        ids = np.append(ids, token)
        step = rows_of(ids, at, at + 1, 0)
    with torch.no_grad():
        packed = PackedTokens.of([torch.from_numpy(ids[:-1])])
        scored = trainer.forward(packed, want=torch.arange(2, 95), targets=torch.from_numpy(ids[3:])).logprobs.numpy()
    assert np.abs(np.array(sampled) - scored).max() <= 3e-5  # an unlikely stream; likely ones are measured by benchmarks/drift_exact.py


def test_sampling_is_the_inverse_distribution():
    model = TorchModel(SHAPE, decoder_weights(0))
    logits = np.random.default_rng(1).normal(0, 2, (1, 97)).astype(np.float32)
    grid = (np.arange(4000) + 0.5) / 4000
    ids, logprobs = model.sample(np.repeat(logits, 4000, 0), grid, 0.8)
    expected = torch.from_numpy(logits[0] / 0.8).double().softmax(0).numpy()
    assert np.abs(np.bincount(ids, minlength=97) / 4000 - expected).max() < 1e-3
    assert np.allclose(np.exp(logprobs), expected[ids], rtol=1e-4)
    assert (np.diff(ids) >= 0).all()
    again, entropy = model.logprobs(np.repeat(logits, 4000, 0), ids, 0.8)
    assert (again == logprobs).all()
    assert entropy[0] == pytest.approx(-(expected * np.log(expected)).sum(), rel=1e-5)
    greedy, at_one = model.sample(logits, np.array([0.99]), np.array([0.0], np.float32))
    assert greedy[0] == logits[0].argmax()
    assert at_one[0] == model.logprobs(logits, greedy, 1.0)[0][0]


def test_wrong_weights_and_empty_calls_are_named():
    weights = decoder_weights(0)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        TorchModel(SHAPE, {k: v for k, v in weights.items() if k != "model.norm.weight"})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        TorchModel(SHAPE, {**weights, "model.norm.weight": torch.zeros(3)})
    model = TorchModel(SHAPE, weights)
    with pytest.raises(EngineError, match="at least one row"):
        model.infer(rows_of(np.zeros(1, int), 0, 0, 0), model.make_cache(1, 4), np.zeros(0, np.int32))
