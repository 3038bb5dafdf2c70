"""A dense checkpoint becomes an MoE with the same outputs: every expert starts as the dense feed-forward part.

With weights of the chosen experts that sum to 1, equal experts give the dense output whatever the router chooses; training then makes
experts and router differ. Source: Komatsuzaki et al., "Sparse upcycling", arXiv 2212.05055, section 2.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.core.errors import CheckpointError, ConfigError, nearest
from strop.model.checkpoint import TOKENIZER_FILES
from strop.store.checkpoint import publish

ROUTER_STD = 0.02
TARGETS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense model type -> MoE model type of the same attention and norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upcycled:
    """What was made.

    Attributes:
        layers: MoE layers.
        parameters: Of the new model.
        max_abs_diff: Largest difference of logits between dense model and MoE on a random stream.
    """

    layers: int
    parameters: int
    max_abs_diff: float


def upcycle_checkpoint(source: str, target: Path, *, experts: int, top_k: int, seed: int = 0) -> Upcycled:
    """Write an MoE with the outputs of a dense model.

    Args:
        source: Directory of a dense checkpoint in Hugging Face layout, or a GGUF file.
        target: Directory to write; must not exist.
        experts: Experts of a layer, all equal at first.
        top_k: Experts of a token.
        seed: Of the routers, which start small and random.

    Raises:
        ConfigError: Numbers that make no MoE, a target that exists, or a dense family without an MoE of the same kind.
        CheckpointError: The source can't be read.
    """
    if not 1 <= top_k <= experts or experts < 2:
        raise ConfigError(f"experts = {experts}, top_k = {top_k}: an MoE needs at least 2 experts and 1 <= top_k <= experts")
    if target.exists():
        raise ConfigError(f"{target} exists; choose another directory, nothing is overwritten")
    dense = _load_dense(source)
    moe = upcycle(dense, experts=experts, top_k=top_k, seed=seed)
    difference = logit_difference(dense, moe)

    def write(folder: Path) -> None:
        moe.save_pretrained(folder, safe_serialization=True)
        origin = Path(source) if Path(source).is_dir() else Path(source).parent
        for name in TOKENIZER_FILES:
            if (origin / name).is_file() and not (folder / name).exists():
                shutil.copyfile(origin / name, folder / name)

    publish(target, write)
    return Upcycled(layers=moe.config.num_hidden_layers, parameters=sum(p.numel() for p in moe.parameters()), max_abs_diff=difference)


def upcycle(dense: Any, *, experts: int, top_k: int, seed: int = 0) -> Any:
    """Return an MoE with the outputs of ``dense``, a transformers model of one of ``TARGETS``.

    Raises:
        ConfigError: There is no MoE of the same kind.
    """
    import transformers

    kind = dense.config.model_type
    if kind not in TARGETS:
        raise ConfigError(f"a dense {kind!r} has no MoE with the same attention here.{nearest(kind, TARGETS)}")
    values = {key: value for key, value in dense.config.to_dict().items() if key not in ("model_type", "architectures", "head_dim")}
    values |= {"num_experts_per_tok": top_k, "num_local_experts": experts, "num_experts": experts, "norm_topk_prob": True}
    values |= {"moe_intermediate_size": dense.config.intermediate_size, "sliding_window": None, "use_sliding_window": False}
    values["head_dim"] = getattr(dense.config, "head_dim", None) or dense.config.hidden_size // dense.config.num_attention_heads
    if TARGETS[kind] == "mixtral" and (getattr(dense.config, "attention_bias", False) or getattr(dense.config, "mlp_bias", False)):
        raise ConfigError(f"a dense {kind!r} with biases has no MoE with the same attention here")
    config = transformers.AutoConfig.for_model(TARGETS[kind], **values)
    with _quiet():
        moe = transformers.AutoModelForCausalLM.from_config(config)
    wanted = moe.state_dict()
    draw = torch.Generator().manual_seed(seed)
    moe.load_state_dict(_weights(dense.state_dict(), wanted, experts, draw))
    return moe.to(dense.dtype).eval()


def _weights(dense: dict[str, Tensor], wanted: dict[str, Tensor], experts: int, draw: torch.Generator) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, old in wanted.items():
        prefix, _, part = name.rpartition(".mlp.")
        if not prefix:
            if name not in dense:
                raise ConfigError(f"the dense model has no tensor {name!r}")
            weights[name] = dense[name]
        elif part == "gate.weight":
            weights[name] = (torch.randn(old.shape, generator=draw) * ROUTER_STD).to(old.dtype)
        elif part == "experts.gate_up_proj":
            both = torch.cat([dense[f"{prefix}.mlp.gate_proj.weight"], dense[f"{prefix}.mlp.up_proj.weight"]])
            weights[name] = both.expand(experts, -1, -1).clone()
        elif part == "experts.down_proj":
            weights[name] = dense[f"{prefix}.mlp.down_proj.weight"].expand(experts, -1, -1).clone()
        else:
            raise ConfigError(f"tensor {name!r} of the MoE has no counterpart in the dense model")
    return weights


@torch.no_grad()
def logit_difference(dense: Any, moe: Any, *, rows: int = 32, seed: int = 0) -> float:
    """Return the largest difference of logits of two models on a random stream."""
    ids = torch.randint(0, dense.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(seed))
    one, two = (model.eval()(input_ids=ids, use_cache=False).logits.float() for model in (dense, moe))
    return float((one - two).abs().max())


def _load_dense(source: str) -> Any:
    import transformers

    path = Path(source)
    try:
        with _quiet():
            if path.is_file() and path.suffix == ".gguf":
                return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
            if not (path / "config.json").is_file():
                raise CheckpointError(f"{source} is neither a checkpoint directory (config.json) nor a .gguf file")
            return transformers.AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"dense checkpoint {source!r} can't be read: {error}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
