"""Exactness, as a transitive argument: prefill = chunks = decode = any batch = any threads = copied prefix = trainer, bit for bit."""

from __future__ import annotations

import ctypes as ct
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_kit import SMALL, alone, configs, packed, random_streams, random_weights, rows_of, same_bits

from strop.model.config import DecoderConfig
from strop.model.inference import InferenceModel, KVCache
from strop.model.training import TrainModel

MODEL = InferenceModel(SMALL, random_weights(SMALL), threads=1)

Piece = tuple[int, int, int]


def run_schedule(model: InferenceModel, streams: list[np.ndarray], pieces: list[list[Piece]], slots: list[int]) -> list[np.ndarray]:
    """Feed streams by steps of ``(stream, start, end)`` pieces; return each stream's logits."""
    cache = KVCache(model.config, max(slots) + 1, max(len(s) for s in streams))
    logits = [np.empty((len(s), model.config.vocab_size), np.float32) for s in streams]
    for step in pieces:
        rows = rows_of([(slots[i], start, streams[i][start:end]) for i, start, end in step])
        out = model.infer(rows, cache, np.arange(len(rows.token_ids)))
        at = 0
        for i, start, end in step:
            logits[i][start:end] = out.logits[at : at + end - start]
            at += end - start
    return logits


def random_schedule(rng: np.random.Generator) -> tuple[list[int], list[list[Piece]]]:
    """Lengths of a few streams, and steps that mix their prefill chunks and decode rows at random."""
    lengths = rng.integers(1, 71, rng.integers(1, 5)).tolist()
    done, steps = [0] * len(lengths), []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = []
        for i in rng.permutation(len(lengths)).tolist():
            size = int(rng.choice([0, 1, 1, 5, 16, 33]))
            if size and done[i] < lengths[i]:
                end = min(done[i] + size, lengths[i])
                step.append((i, done[i], end))
                done[i] = end
        if step:
            steps.append(step)
    return lengths, steps


@given(config=configs(), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_shape_any_schedule_and_the_trainer_agree_bit_for_bit(config: DecoderConfig, seed: int) -> None:
    lengths, steps = random_schedule(np.random.default_rng(seed))
    weights = random_weights(config, seed)
    model = InferenceModel(config, weights, threads=1)
    streams = random_streams(config, lengths, seed)
    whole = [alone(model, s) for s in streams]
    mixed = run_schedule(model, streams, steps, slots=list(range(len(streams)))[::-1])
    for (logits, _), other in zip(whole, mixed, strict=True):
        assert same_bits(logits, other)

    trainer = TrainModel(config, weights, threads=1)
    rows = sum(lengths)
    targets = np.random.default_rng(seed).integers(0, config.vocab_size, rows)
    out = trainer.forward(packed(streams), want=torch.arange(rows), targets=torch.from_numpy(targets), temperature=0.8)
    logprobs, entropy = model.logprobs(np.concatenate([logits for logits, _ in whole]), targets, 0.8)
    assert same_bits(out.logprobs.detach().numpy(), logprobs)
    assert same_bits(out.entropy.detach().numpy(), entropy)
    assert np.array_equal(out.expert_ids.numpy(), np.concatenate([ids for _, ids in whole]))


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6, 7, 13, 31, 47, 48, 49, 96, 127, 128])
def test_decode_does_not_depend_on_the_batch(batch: int) -> None:
    streams = random_streams(SMALL, [12 + i % 9 for i in range(128)])
    cache = KVCache(SMALL, batch, 32)
    MODEL.infer(rows_of([(i, 0, s[:-1]) for i, s in enumerate(streams[:batch])]), cache, np.array([], np.int32))
    out = MODEL.infer(rows_of([(i, len(s) - 1, s[-1:]) for i, s in enumerate(streams[:batch])]), cache, np.arange(batch))
    for i in {0, batch // 2, batch - 1}:
        logits, ids = alone(MODEL, streams[i])
        assert same_bits(out.logits[i], logits[-1])
        assert same_bits(out.expert_ids[i], ids[-1])


def test_threads_do_not_matter() -> None:
    streams = random_streams(SMALL, [70, 33, 5, 64, 50, 1])
    results = []
    for threads in (1, 2, 3):
        model, cache = InferenceModel(SMALL, random_weights(SMALL), threads=threads), KVCache(SMALL, 6, 80)
        prefill = model.infer(rows_of([(i, 0, s) for i, s in enumerate(streams)]), cache, np.arange(223))
        decode = model.infer(rows_of([(i, len(s), s[:1]) for i, s in enumerate(streams)]), cache, np.arange(6))
        sampled = model.sample(decode.logits, np.linspace(0, 0.9, 6), 1.0)
        results.append((prefill.logits, decode.logits, *sampled))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_copied_prefix_is_the_prefix_even_when_its_source_moves_on() -> None:
    a, b = random_streams(SMALL, [60, 60])
    for n in (1, 15, 16, 17, 32, 47):
        cache = KVCache(SMALL, 3, 64)
        MODEL.infer(rows_of([(0, 0, a[:50])]), cache, np.array([], np.int32))
        cache.copy_prefix(0, 2, n)
        MODEL.infer(rows_of([(0, 0, b[:40])]), cache, np.array([], np.int32))
        joined = np.concatenate([a[:n], b[n:]])
        out = MODEL.infer(rows_of([(2, n, joined[n:])]), cache, np.arange(60 - n))
        assert same_bits(out.logits, alone(MODEL, joined)[0][n:])
        out = MODEL.infer(rows_of([(0, 40, b[40:])]), cache, np.arange(20))
        assert same_bits(out.logits, alone(MODEL, b)[0][40:])


def test_rewriting_a_shared_position_leaves_the_sharer_alone() -> None:
    a, b = random_streams(SMALL, [48, 48])
    cache = KVCache(SMALL, 2, 48)
    MODEL.infer(rows_of([(0, 0, a[:47])]), cache, np.array([], np.int32))
    cache.copy_prefix(0, 1, 47)
    out = MODEL.infer(rows_of([(0, 20, b[20:])]), cache, np.arange(28))
    assert same_bits(out.logits, alone(MODEL, np.concatenate([a[:20], b[20:]]))[0][20:])
    out = MODEL.infer(rows_of([(1, 47, a[47:])]), cache, np.arange(1))
    assert same_bits(out.logits[0], alone(MODEL, a)[0][-1])


def test_rows_that_are_not_wanted_change_nothing() -> None:
    (stream,) = random_streams(SMALL, [50])
    cache = KVCache(SMALL, 1, 50)
    want = np.array([49, 3, 3, 17])
    out = MODEL.infer(rows_of([(0, 0, stream)]), cache, want)
    logits, ids = alone(MODEL, stream)
    assert same_bits(out.logits, logits[want])
    assert same_bits(out.expert_ids, ids)


def test_a_swap_of_weights_continues_on_the_old_cache() -> None:
    (stream,) = random_streams(SMALL, [30])
    old, new = random_weights(SMALL, 0), random_weights(SMALL, 5)
    model = InferenceModel(SMALL, old, threads=1)
    results = []
    for cut in ([30], [7, 23]):
        model.load(old)
        cache = KVCache(SMALL, 1, 40)
        at = 0
        for size in (10, *cut):
            if at == 10:
                model.load(new)
            size = min(size, 30 - at)
            out = model.infer(rows_of([(0, at, stream[at : at + size])]), cache, np.arange(size))
            at += size
        results.append(out.logits[-1])
    assert same_bits(results[0], results[1])
    assert not same_bits(results[0], alone(MODEL, stream)[0][-1])


def test_gradients_have_the_same_bits_for_one_and_two_threads_and_on_repetition() -> None:
    streams = random_streams(SMALL, [70, 9, 33, 64])
    want = torch.arange(0, 176, 2)
    targets = torch.arange(88) % SMALL.vocab_size
    results = []
    for threads in (1, 2, 2):
        model = TrainModel(SMALL, random_weights(SMALL), threads=threads)
        out = model.forward(packed(streams), want=want, targets=targets)
        (out.logprobs.sum() + 0.1 * out.entropy.sum() + out.router_logits[1].square().mean()).backward()
        results.append({name: p.grad.numpy().copy() for name, p in model.parameters.items() if p.grad is not None})
    for name, gradient in results[0].items():
        assert same_bits(gradient, results[1][name]), name
        assert same_bits(gradient, results[2][name]), name
    assert len(results[0]) == len(model.parameters)


def test_the_micro_batch_does_not_change_a_log_probability() -> None:
    streams = random_streams(SMALL, [40, 21, 55])
    model = TrainModel(SMALL, random_weights(SMALL), threads=1)
    whole = model.forward(packed(streams), want=torch.arange(116), targets=torch.zeros(116, dtype=torch.long)).logprobs.detach()
    at = 0
    for stream in streams:
        n = len(stream)
        part = model.forward(packed([stream]), want=torch.arange(n), targets=torch.zeros(n, dtype=torch.long)).logprobs.detach()
        assert same_bits(part.numpy(), whole[at : at + n].numpy())
        at += n


def test_a_small_pass_between_large_ones_changes_no_bit_and_gives_no_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TrainModel(SMALL, random_weights(SMALL), threads=1)
    assert model._net is not None
    forward, sizes = model._net.train_forward, []

    def watched(*arguments: Any) -> Any:
        made = forward(*arguments)
        sizes.append(ct.c_size_t.from_address(made[0].handle).value)  # the first field of a tape is its size in bytes
        return made

    monkeypatch.setattr(model._net, "train_forward", watched)
    results = []
    for lengths in ([40] * 6, [5], [40] * 6):
        rows = packed(random_streams(SMALL, lengths))
        with torch.no_grad():
            results.append(model.forward(rows, want=torch.arange(len(rows.token_ids)), targets=rows.token_ids).logprobs.numpy())
    assert same_bits(results[0], results[2])
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_the_callers_rounding_flags_do_not_matter() -> None:
    (stream,) = random_streams(SMALL, [40])
    weights = random_weights(SMALL, scale=1e-3)
    model = InferenceModel(SMALL, weights, threads=2)
    before = alone(model, stream)[0]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush denormals")
    try:
        assert same_bits(alone(model, stream)[0], before)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_the_same_without_the_threads() -> None:
    (stream,) = random_streams(SMALL, [40])
    model = InferenceModel(SMALL, random_weights(SMALL), threads=2)
    before = alone(model, stream)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if same_bits(alone(model, stream)[0], before) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
