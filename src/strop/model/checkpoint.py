"""Hugging Face model directories: read and written so that transformers and vLLM load them unchanged.

On disk every expert has its own matrices (``mlp.experts.3.gate_proj.weight``); in memory they are fused per layer. Both are read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from strop.core.errors import CheckpointError, nearest
from strop.model.config import DecoderConfig
from strop.model.native.weights import raw_arrays, weight_names
from strop.store.checkpoint import DIGESTS, publish

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def load_checkpoint(directory: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Read a Qwen3-MoE directory; files listed in its digest table are verified first.

    Returns:
        The sizes, and float32 weights under names in memory (``lm_head.weight`` only where it isn't tied).

    Raises:
        CheckpointError: Missing or damaged file, missing, unknown or misshapen tensor; names file and tensor.
    """
    folder = Path(directory)
    if not folder.is_dir():
        siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
        raise CheckpointError(f"checkpoint directory {str(folder)!r} does not exist.{nearest(folder.name, siblings)}")
    _verify(folder)
    config = _read_config(folder / CONFIG)
    return config, _fuse(folder, config, _read_tensors(folder))


def save_checkpoint(directory: str | Path, config: DecoderConfig, weights: Mapping[str, Any], tokenizer_from: Path | None = None) -> str:
    """Write a directory atomically, with a digest of every file.

    Args:
        directory: Where; an older checkpoint there is replaced.
        config: Sizes.
        weights: Under names in memory, fused experts; written as float32.
        tokenizer_from: Directory whose tokenizer files are copied.

    Returns:
        Hex digest over all files.

    Raises:
        WeightsError: A tensor is missing, unknown or misshapen.
        CheckpointError: The disk is full, or ``tokenizer_from`` holds no tokenizer; an older checkpoint is intact.
    """
    tensors = _split(config, raw_arrays(config, weights))
    sources = [tokenizer_from / name for name in TOKENIZER_FILES if (tokenizer_from / name).is_file()] if tokenizer_from else []
    if tokenizer_from is not None and not any(path.name == "tokenizer.json" for path in sources):
        raise CheckpointError(f"{str(tokenizer_from)!r} holds no tokenizer.json to copy")

    def write(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
        for path in sources:
            shutil.copyfile(path, folder / path.name)

    return publish(directory, write)


def _verify(folder: Path) -> None:
    # Only what the table lists: a directory may have gained a model card, and foreign directories have no table.
    table = folder / DIGESTS
    if not table.is_file():
        return
    try:
        expected = json.loads(table.read_text(encoding="utf-8"))
        items = sorted(expected.items())
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint file {table} is damaged: {error}") from None
    for name, digest in items:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder}: file {name} is missing")
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        if actual != digest:
            raise CheckpointError(f"checkpoint file {path} is damaged: digest {actual}, expected {digest}{_damaged_tensor(path)}")


def _damaged_tensor(path: Path) -> str:
    """Name what can be named in a damaged weights file."""
    if path.suffix != ".safetensors":
        return ""
    try:
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not bool(torch.isfinite(file.get_tensor(name)).all()):
                    return f"; tensor {name!r} holds values that are not finite"
    except SafetensorError as error:
        return f"; {error}"
    return "; its tensors are readable, some value differs"


def _read_config(path: Path) -> DecoderConfig:
    try:
        return DecoderConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a model directory: {CONFIG} is missing") from None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint file {path} is damaged: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"checkpoint file {path} lacks the key {error}") from None


def _read_tensors(folder: Path) -> dict[str, tuple[Path, Tensor]]:
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"checkpoint file {folder / INDEX} is damaged: {error!r}") from None
    tensors = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder}: weights file {name} is missing")
        try:
            with safe_open(str(path), "pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    tensors[key] = (path, file.get_tensor(key).float())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint file {path} is damaged: {error}") from None
    return tensors


def _fuse(folder: Path, config: DecoderConfig, tensors: dict[str, tuple[Path, Tensor]]) -> dict[str, Tensor]:
    """Fuse experts and check that nothing is missing, left over or misshapen."""
    weights: dict[str, Tensor] = {}
    for name, (_, shape) in weight_names(config).items():
        if name in tensors:
            path, tensor = tensors.pop(name)
            _check_shape(path, name, tensor, shape)
            weights[name] = tensor
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = _fuse_experts(folder, config, name, shape, tensors)
        else:
            raise CheckpointError(f"checkpoint {folder}: tensor {name!r} {list(shape)} is missing")
    if config.tie_embeddings:
        tied = tensors.pop("lm_head.weight", None)
        if tied is not None and not torch.equal(tied[1], weights["model.embed_tokens.weight"]):
            raise CheckpointError(f"{tied[0]}: tensor 'lm_head.weight' differs from the embedding although config.json ties them")
    if tensors:
        name, (path, _) = next(iter(sorted(tensors.items())))
        raise CheckpointError(f"{path}: tensor {name!r} belongs to no part of this model")
    return weights


def _fuse_experts(
    folder: Path, config: DecoderConfig, name: str, shape: tuple[int, ...], tensors: dict[str, tuple[Path, Tensor]]
) -> Tensor:
    prefix, d, f = name.rpartition(".")[0], config.hidden_size, config.expert_size
    parts = [("down", (d, f))] if name.endswith("down_proj") else [("gate", (f, d)), ("up", (f, d))]
    fused = torch.empty(shape)
    for expert in range(config.num_experts):
        pieces = []
        for part, size in parts:
            single = f"{prefix}.{expert}.{part}_proj.weight"
            if single not in tensors:
                raise CheckpointError(f"checkpoint {folder}: tensor {single!r} {list(size)} is missing")
            path, tensor = tensors.pop(single)
            _check_shape(path, single, tensor, size)
            pieces.append(tensor)
        torch.cat(pieces, out=fused[expert])
    return fused


def _check_shape(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}")


def _split(config: DecoderConfig, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names on disk: one set of matrices per expert."""
    result: dict[str, Tensor] = {}
    for name, (short, _) in weight_names(config).items():
        tensor = torch.tensor(arrays[short])
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        prefix = name.rpartition(".")[0]
        for expert in range(config.num_experts):
            if name.endswith("down_proj"):
                result[f"{prefix}.{expert}.down_proj.weight"] = tensor[expert].clone()
                continue
            gate, up = tensor[expert].chunk(2)
            result[f"{prefix}.{expert}.gate_proj.weight"], result[f"{prefix}.{expert}.up_proj.weight"] = gate.clone(), up.clone()
    return result
