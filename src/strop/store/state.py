"""Nested training state as flat tensors plus JSON, and back.

Example: ``{"version": 3, "optimizer": {0: {"exp_avg": T}}}`` becomes tensors ``{"optimizer/0/exp_avg": T}`` and a JSON tree in
which ``T`` is ``{"tensor": "optimizer/0/exp_avg"}``. Keys keep their types, tuples stay tuples, bytes stay bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.core.errors import CheckpointError


def flatten(state: Any) -> tuple[dict[str, Any], Any]:
    """Split a nested state into named tensors and a JSON tree.

    Raises:
        CheckpointError: A leaf that is neither tensor, number, text, bytes, boolean nor ``None``; names its place.
    """
    tensors: dict[str, Any] = {}
    return tensors, _encode(state, (), tensors)


def _encode(node: Any, place: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node.item() if isinstance(node, np.generic) else node}
    if isinstance(node, bytes):
        return {"bytes": base64.b64encode(node).decode()}
    if isinstance(node, np.generic):
        return {"value": node.item()}
    if isinstance(node, np.ndarray) or type(node).__module__.split(".")[0] == "torch":
        if not hasattr(node, "shape"):
            raise CheckpointError(f"state {'/'.join(place)!r} is a {type(node).__name__}; only tensors can be saved")
        name = "/".join(place) or "tensor"
        while name in tensors:  # keys 1 and "1" look alike as text
            name += "'"
        tensors[name] = node
        return {"tensor": name}
    if isinstance(node, Mapping):
        pairs = []
        for key, value in node.items():
            if not isinstance(key, (str, int)):
                raise CheckpointError(f"state {'/'.join(place)!r} has the key {key!r}; only text and integers can be saved")
            pairs.append([key, _encode(value, (*place, str(key)), tensors)])
        return {"map": pairs}
    if isinstance(node, (list, tuple)):
        items = [_encode(value, (*place, str(index)), tensors) for index, value in enumerate(node)]
        return {"tuple" if isinstance(node, tuple) else "list": items}
    raise CheckpointError(f"state {'/'.join(place)!r} is a {type(node).__name__}; only tensors and JSON values can be saved")


def unflatten(tensors: Mapping[str, Any], tree: Any) -> Any:
    """Inverse of ``flatten``."""
    ((kind, body),) = tree.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "map":
        return {key: unflatten(tensors, value) for key, value in body}
    if kind == "list":
        return [unflatten(tensors, value) for value in body]
    if kind == "tuple":
        return tuple(unflatten(tensors, value) for value in body)
    return base64.b64decode(body) if kind == "bytes" else body
