"""What the composition root promises about the parts that it builds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from strop.core.config import load_config
from strop.core.errors import ConfigError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.rl.loop import check_capabilities
from strop.runtime.build import Parts

SHAPE = DecoderConfig(
    vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2, expert_size=16
)


@pytest.mark.parametrize("mode", ["exact", "tolerant", "off"])
def test_an_engine_is_exact_only_in_exact_mode(mode: str) -> None:
    config = load_config(None, [f"numerics.mode={mode!r}", "model.device='cpu'", "engine.max_sessions=2", "engine.max_tokens=64"])
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(0))
    engine = Parts.engine(SimpleNamespace(config=config, decoder=SHAPE, threads=1), decoder.state_dict())  # type: ignore[arg-type]
    assert engine.capabilities.is_exact is (mode == "exact")
    check_capabilities(config, engine.capabilities)
    exact = load_config(None, ["numerics.mode='exact'"])
    if mode != "exact":
        with pytest.raises(ConfigError, match=r"numerics.mode = 'exact' needs an engine with the capability 'is_exact'"):
            check_capabilities(exact, engine.capabilities)
    asyncio.run(engine.close())
