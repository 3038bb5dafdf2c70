"""What the composition root promises about the parts that it builds."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from strop.cli.models import model_dir, pool_dir
from strop.cli.registry import ENGINES, SANDBOXES
from strop.cli.run import check_run
from strop.core.config import SandboxConfig, load_config
from strop.core.errors import ConfigError
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.rl.loop import check_capabilities
from strop.runtime.build import Parts, build_parts
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.domain import VariedProvider
from strop.sandboxes.reuse import ReusingProvider

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


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (["backend='mine'"], lambda: Mine),
        (["backend='bubblewrap'"], lambda: ReusingProvider),
        (["backend='bubblewrap'", "reuse_runs=false"], lambda: BubblewrapProvider),
        (
            ["backend='bubblewrap'", "domain=['hostname']"],
            lambda: VariedProvider,
        ),  # boxes that differ may answer differently: nothing is reused
        (["backend='mine'", "domain=['latency_ms']"], lambda: VariedProvider),
    ],
)
def test_agents_work_in_the_boxes_of_the_recipe_and_verdicts_stay_in_bubblewrap(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], kind: Callable[[], type]
) -> None:
    monkeypatch.setitem(cast("dict[str, str]", SANDBOXES.builtins), "mine", f"{__name__}:Mine")
    config = load_config(None, [*(f"sandbox.{setting}" for setting in settings), "sandbox.memory_mb=99"])
    parts = build_parts(config, model_dir("builtin:tiny"), pool_dir("builtin:repair"))
    try:
        assert type(parts.sandbox_provider) is kind()
        assert type(parts.grading_provider) is BubblewrapProvider
    finally:
        asyncio.run(parts.close())
    if isinstance(parts.sandbox_provider, Mine):
        assert parts.sandbox_provider.config.memory_mb == 99
        assert parts.sandbox_provider.is_closed


class Mine:
    """A third party's back end: nothing but what a run needs to build and close it."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def test_a_run_refuses_an_engine_that_it_would_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, str]", ENGINES.builtins), "mine", f"{__name__}:Mine")
    with pytest.raises(ConfigError, match=r"engine.backend = 'mine': a run generates with 'embedded'"):
        check_run(load_config(None, ["engine.backend='mine'"]))


def test_what_would_break_in_the_middle_of_a_run_is_refused_when_it_is_built(tmp_path: Path) -> None:
    pool = pool_dir("builtin:repair")
    with pytest.raises(ConfigError, match=r"engine.max_tokens = 512, but tasks of builtin:repair allow episodes of \d+ tokens"):
        build_parts(load_config(None, ["engine.max_tokens=512"]), model_dir("builtin:tiny"), pool)
    other = tmp_path / "hermes"
    shutil.copytree(model_dir("builtin:tiny"), other)
    (other / "digests.json").unlink()
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"strop_chat_format": "hermes"}))
    with pytest.raises(ConfigError, match=r"mid-training writes the compact chat format.*midtrain.enabled = false"):
        build_parts(load_config(None), other, pool)
