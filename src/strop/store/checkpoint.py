"""Checkpoints: directories that appear whole or not at all, with a digest of every file.

``publish`` does it for any directory (a Hugging Face layout too); ``save_checkpoint`` writes tensors and JSON with it.
Tensors are numpy arrays or torch tensors; torch is touched only when a tensor is one of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.core.errors import CheckpointError
from strop.store.files import full_disk_is_clear, sync_directory, sync_tree, write_atomic

DIGESTS = "digests.json"
_TENSORS, _META = "tensors.safetensors", "meta.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What ``load_checkpoint`` returns.

    Attributes:
        path: Its directory.
        tensors: Name to numpy array or torch tensor, as saved.
        meta: The JSON values saved with them.
        digest: Hex digest over all files.
    """

    path: Path
    tensors: Mapping[str, Any]
    meta: Mapping[str, Any]
    digest: str


def publish(directory: str | Path, write: Callable[[Path], object]) -> str:
    """Make ``directory`` out of whatever ``write`` puts into an empty one, atomically, replacing an older one.

    Args:
        directory: Where it should be.
        write: Called with an empty temporary directory beside it.

    Returns:
        The hex digest over all files.

    Raises:
        CheckpointError: The disk is full; the older directory is intact.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with full_disk_is_clear(target, f"writing checkpoint {target.name}"):
            temporary.mkdir()
            write(temporary)
            digests = file_digests(temporary)
            write_atomic(temporary / DIGESTS, (json.dumps(digests, indent=1) + "\n").encode())
            sync_tree(temporary)
            _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _combined(digests)


def _swap_in(temporary: Path, target: Path) -> None:
    # A directory can't be renamed over a full one, so the old one steps aside; recover() undoes a crash in between.
    aside = target.with_name(f".old-{target.name}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(temporary, target)
    sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(parent: Path) -> None:
    """Undo what a crash inside ``publish`` left in ``parent``: half-written and half-replaced directories."""
    if not parent.is_dir():
        return
    for entry in parent.iterdir():
        if entry.name.startswith(".tmp-"):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name.startswith(".old-"):
            target = entry.with_name(entry.name.removeprefix(".old-"))
            if target.exists():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.rename(entry, target)


def file_digests(directory: Path) -> dict[str, str]:
    """Return the blake2b digest of every file below ``directory`` by relative path, the digest file itself left out."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(directory).as_posix(): _file_digest(path) for path in paths}


def verify(directory: str | Path) -> str:
    """Check every file of a published directory and return the digest over all.

    Raises:
        CheckpointError: No such checkpoint, a missing, damaged or added file; names it with expected and actual digest.
    """
    target = Path(directory)
    expected = _read_digests(target)
    actual = file_digests(target)
    for name, digest in expected.items():
        if name not in actual:
            raise CheckpointError(f"checkpoint {target}: file {name} is missing")
        if actual[name] != digest:
            raise CheckpointError(f"checkpoint file {target / name} is damaged: digest {actual[name]}, expected {digest}")
    added = sorted(set(actual) - set(expected))
    if added:
        raise CheckpointError(f"checkpoint {target} holds files that were not saved with it: {', '.join(added)}")
    return _combined(expected)


def _read_digests(target: Path) -> dict[str, str]:
    if not target.is_dir():
        siblings = []
        if target.parent.is_dir():
            siblings = sorted(entry.name for entry in target.parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        raise CheckpointError(f"checkpoint {target} does not exist. Checkpoints there: {', '.join(siblings) or 'none'}.")
    try:
        digests = json.loads((target / DIGESTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{target} is not a checkpoint: {DIGESTS} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint file {target / DIGESTS} is damaged: {error}") from None
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise CheckpointError(f"checkpoint file {target / DIGESTS} is damaged: not a table of digests")
    return digests


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _combined(digests: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=32).hexdigest()


def save_checkpoint(directory: str | Path, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> str:
    """Write tensors (safetensors) and JSON values as a published directory.

    Args:
        directory: Where; an older checkpoint there is replaced atomically.
        tensors: Name to numpy array or torch tensor (any device, any layout, views and ties allowed).
        meta: JSON values.

    Returns:
        The hex digest over all files.

    Raises:
        CheckpointError: The disk is full, or ``meta`` isn't JSON.
    """
    try:
        text = json.dumps({"meta": dict(meta or {}), "framework": "pt" if _has_torch(tensors) else "np"}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory}: meta is not JSON: {error}") from None

    def write(temporary: Path) -> None:
        _write_tensors(temporary / _TENSORS, tensors)
        write_atomic(temporary / _META, text.encode())

    return publish(directory, write)


def load_checkpoint(directory: str | Path, *, framework: str | None = None) -> Checkpoint:
    """Verify and read a checkpoint written by ``save_checkpoint``.

    Args:
        directory: Where it is.
        framework: ``"np"`` or ``"pt"``; by default what it was saved from.

    Raises:
        CheckpointError: Missing or damaged; names the file, expected and actual digest.
    """
    target = Path(directory)
    digest = verify(target)
    if not (target / _TENSORS).is_file() or not (target / _META).is_file():
        raise CheckpointError(f"{target} is a model directory without {_TENSORS}; load it with the model loader instead")
    record = json.loads((target / _META).read_text(encoding="utf-8"))
    tensors = _read_tensors(target / _TENSORS, framework or record["framework"])
    return Checkpoint(path=target, tensors=tensors, meta=record["meta"], digest=digest)


def _has_torch(tensors: Mapping[str, Any]) -> bool:
    return any(type(tensor).__module__.split(".")[0] == "torch" for tensor in tensors.values())


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    if not _has_torch(tensors):
        from safetensors.numpy import save_file

        save_file({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, str(path))
        return
    import torch
    from safetensors.torch import save_file as save_torch_file

    plain, seen = {}, set()
    for name, tensor in tensors.items():
        value = torch.from_numpy(np.array(tensor, order="C")) if isinstance(tensor, np.ndarray) else torch.as_tensor(tensor)
        value = value.detach().cpu().contiguous()
        pointer = value.untyped_storage().data_ptr()
        if pointer in seen:  # the format has no ties: every name gets its own bytes
            value = value.clone()
        seen.add(pointer)
        plain[name] = value
    save_torch_file(plain, str(path))


def _read_tensors(path: Path, framework: str) -> dict[str, Any]:
    if framework == "pt":
        from safetensors.torch import load_file

        return load_file(str(path))
    from safetensors.numpy import load_file as load_numpy_file

    with contextlib.suppress(AttributeError):
        return load_numpy_file(str(path))
    raise CheckpointError(f"{path} holds a number type that numpy lacks (for example bfloat16); load it with framework='pt'")
