"""Dense to MoE: the same outputs at step 0, whatever the router chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.core.errors import CheckpointError, ConfigError
from strop.model.routing.families import bind_routers, spec_of
from strop.model.upcycle import logit_difference, upcycle, upcycle_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def dense(family: str):
    import transformers

    torch.manual_seed(0)
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config, "mistral": transformers.MistralConfig}[family](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_moe_has_the_outputs_of_the_dense_model(family: str) -> None:
    model = dense(family)
    moe = upcycle(model, experts=4, top_k=2)
    spec = spec_of(bind_routers(moe))
    assert (spec.layers, spec.experts, spec.top_k) == ((0, 1), 4, 2)
    assert logit_difference(model, moe) < 2e-4
    with torch.no_grad():  # the check would see an expert that differs
        for name, parameter in moe.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter[0].mul_(1.5)
    assert logit_difference(model, moe) > 1e-2


def test_a_checkpoint_is_written_and_loads(tmp_path: Path) -> None:
    import transformers

    model = dense("llama")
    model.save_pretrained(tmp_path / "dense")
    result = upcycle_checkpoint(str(tmp_path / "dense"), tmp_path / "moe", experts=4, top_k=2)
    assert (result.layers, result.max_abs_diff < 2e-4) == (2, True)
    again = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "moe"))
    assert logit_difference(model, again) < 2e-4
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        upcycle_checkpoint(str(tmp_path / "dense"), tmp_path / "moe", experts=4, top_k=2)


def test_what_makes_no_moe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        upcycle_checkpoint("x", tmp_path / "y", experts=2, top_k=3)
    with pytest.raises(CheckpointError, match="neither"):
        upcycle_checkpoint(str(tmp_path), tmp_path / "y", experts=2, top_k=1)
