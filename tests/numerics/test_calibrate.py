"""Floors and prices: benign variations lie below the limits, faults above; every line of the policy has a price."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.core.errors import ConfigError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.numerics.calibrate import calibrate_decoder, calibrate_exact, decoder_canary, pack_streams, reordered, reorderings
from strop.numerics.canary import CanaryLimits, canary_streams, compare_canaries, sketch, sketch_distance
from strop.numerics.localise import localise, record
from strop.numerics.precision import POLICY, Emulation, Precision
from strop.numerics.price import fresh_decoder, price_list

SHAPE = DecoderConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, top_k=2, expert_size=24
)
STREAMS = canary_streams(SHAPE.vocab_size, streams=8, length=24)
PACKED = pack_streams(STREAMS)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    model = Decoder(SHAPE)
    model.initialise(torch.Generator().manual_seed(seed), std=0.3)
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_floors_cover_benign_variations_and_faults_lie_above_ten_times_them() -> None:
    decoder = fresh_decoder(SHAPE, weights())
    floors = calibrate_decoder(decoder, STREAMS, threads=(1, 2))
    assert 0 < floors.logprob_max_nats < 1e-5
    assert set(floors.variations) >= {"micro-batch 1", "2 threads", "k permuted", "k in two halves", "row position"}
    limits = CanaryLimits.from_floors(floors.as_json())
    base = decoder_canary(decoder, STREAMS)
    for product in reorderings().values():
        with reordered(decoder, product):
            canary = decoder_canary(decoder, STREAMS)
            assert limits.breach(compare_canaries(base, canary)) == ""
            trace = record(decoder, PACKED)
        operations = {name: 10 * value for name, value in floors.operations.items()}
        assert localise(trace, fresh_decoder(SHAPE, weights()), PACKED, operations).operation == ""
    for layer in range(2):
        suspect = fresh_decoder(SHAPE, weights())
        Emulation(suspect, Precision.of("fp32", overrides=["projection=bf16"]), layers=[layer])
        assert limits.breach(compare_canaries(base, decoder_canary(suspect, STREAMS))).startswith(f"layer {layer} is off by")


def test_exact_kernels_have_floors_of_zero() -> None:
    floors = calibrate_exact(SHAPE, weights(), STREAMS)
    assert floors.logprob_max_nats == 0
    assert set(floors.layers) == {0.0}
    assert len(floors.variations) == 10


def test_sketches_estimate_distances() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=5000)
    for size in (1e-6, 1e-3, 0.1):
        moved = x + size * draw.normal(size=5000)
        estimates = [float(sketch_distance(sketch(x)[None], sketch(moved)[None])[0])]
        assert 0.3 * size < estimates[0] < 3 * size
    single = x.astype(np.float32)
    flipped = single.copy()
    flipped[17] = np.nextafter(flipped[17], np.float32(0))
    assert (sketch(single) != sketch(flipped)).all()


def test_every_line_has_a_price() -> None:
    prices = {price.override: price for price in price_list(SHAPE, weights(), STREAMS, "bf16")}
    assert {override.partition("=")[0] for override in prices} == set(POLICY) - {"rope", "log_softmax"}
    for override, price in prices.items():
        if POLICY[override.partition("=")[0]].trained:
            assert price.update_error > 0, override
        else:
            assert price.k3_nats > 0, override
            assert price.time_ratio is not None
    assert prices["master_weights=bf16"].update_error > 0.1  # an update of 3e-4 is lost beside weights of 0.3


def test_prices_grow_with_fewer_bits_and_unknown_lines_are_refused() -> None:
    found = price_list(SHAPE, weights(), STREAMS, "bf16", ["experts=fp16", "experts=bf16", "experts=nvfp4"])
    assert found[0].k3_nats < found[1].k3_nats < found[2].k3_nats
    assert found[2].time_ratio is None
    with pytest.raises(ConfigError, match="Did you mean 'experts'"):
        price_list(SHAPE, weights(), STREAMS, "bf16", ["expert=bf16"])
