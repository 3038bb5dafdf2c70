"""Digests of weights: equality of every bit, in one hex string. torch is touched only when a tensor is one of its own."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.core.errors import NumericsError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensor_digest(tensor: Any) -> str:
    """Return the sha256 over element type, shape and little-endian bytes of one tensor."""
    kind, shape, data = _contents(tensor)
    digest = hashlib.sha256(f"{kind} {list(shape)}\0".encode())
    digest.update(data)
    return digest.hexdigest()


def weights_digest(weights: Mapping[str, Any]) -> str:
    """Return one hex digest over all weights: names in sorted order, element types, shapes and bytes.

    A head that equals the embedding bit for bit is left out, so that tied weights have one digest whether or not the alias is listed.

    Args:
        weights: Name to torch tensor or numpy array, on any device.

    Raises:
        NumericsError: A value isn't a tensor.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        if name == HEAD and EMBEDDING in weights and _is_same(weights[HEAD], weights[EMBEDDING]):
            continue
        try:
            value = tensor_digest(weights[name])
        except (AttributeError, TypeError) as error:
            raise NumericsError(f"weight {name!r} can't be hashed: {error}") from None
        digest.update(f"{name}\0{value}\n".encode())
    return digest.hexdigest()


def _contents(tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Element type, shape, and a flat buffer of bytes."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        return str(tensor.dtype.newbyteorder("=")), tensor.shape, array.reshape(-1).view(np.uint8).data
    torch = sys.modules["torch"]
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, tensor.element_size())[:, ::-1]
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), np.ascontiguousarray(data).data


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    first, second = _contents(a), _contents(b)
    return first[:2] == second[:2] and bytes(first[2]) == bytes(second[2])
