"""The torch model against the decoder's own forward pass, on every device there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_setups import SHAPE, decoder_weights

from strop.core.errors import EngineError, WeightsError
from strop.engine.backend import RowBlock
from strop.engine.torch_model import TorchModel
from strop.model.decoder import Decoder, PackedTokens

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
