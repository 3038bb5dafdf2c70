"""An episode as bytes: JSON header plus raw arrays, compressed, with a checksum. No pickle, nothing executable.

Layout: ``b"SEP1"``, 16 bytes blake2b of the rest, then a zstd frame of ``uint32 header length, header, arrays``.
Arrays are little-endian and follow each other in the order of ``header["arrays"]``.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from typing import Any

import numpy as np
import zstandard

from strop.core.episode import Episode, EpisodeKey, Trace, Turn, VersionSpan
from strop.core.errors import CheckpointError
from strop.core.outcome import Failed, Flag, Outcome, Scored, Ungraded
from strop.core.routes import RouteOrigin, Routes

_MAGIC = b"SEP1"
_DIGEST = 16
_MAX_BYTES = 1 << 30  # a frame that claims more than this is damage, not an episode
_DTYPES = {"int32": "<i4", "float32": "<f4", "bool": "|b1", "uint8": "|u1", "uint16": "<u2"}
_LOCAL = threading.local()  # zstd contexts are costly to make and not thread safe


def encode_episode(episode: Episode) -> bytes:
    """Return the bytes of an episode; ``decode_episode`` gives back an equal one, bit for bit."""
    arrays: list[np.ndarray] = []

    def put(array: np.ndarray) -> int:
        arrays.append(array)
        return len(arrays) - 1

    header: dict[str, Any] = {
        "key": [episode.key.phase, episode.key.step, episode.key.task_id, episode.key.sample],
        "traces": [_trace_header(trace, put) for trace in episode.traces],
        "turns": [_turn_header(turn) for turn in episode.turns],
        "stop_reason": episode.stop_reason,
        "changes": {path: None if data is None else put(np.frombuffer(data, np.uint8)) for path, data in episode.changes.items()},
        "outcome": outcome_to_json(episode.outcome),
        "costs": {key: float(value) for key, value in episode.costs.items()},
        "stats": {key: float(value) for key, value in episode.stats.items()},
    }
    header["arrays"] = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(4, "little"), text]
    parts += [np.ascontiguousarray(array, _DTYPES[array.dtype.name]).tobytes() for array in arrays]
    frame = _compressor().compress(b"".join(parts))
    return _MAGIC + _checksum(frame) + frame


def decode_episode(data: bytes, name: str = "episode") -> Episode:
    """Inverse of ``encode_episode``.

    Args:
        data: The bytes.
        name: What the message of an error calls them.

    Raises:
        CheckpointError: Damaged bytes, or another format version; names expected and actual checksum.
    """
    if data[:4] != _MAGIC:
        raise CheckpointError(f"{name}: format {data[:4]!r}, expected {_MAGIC!r}; written by another version of strop or damaged")
    expected, frame = data[4 : 4 + _DIGEST], data[4 + _DIGEST :]
    if _checksum(frame) != expected:
        raise CheckpointError(f"{name} is damaged: checksum {_checksum(frame).hex()}, expected {expected.hex()}")
    payload = _decompressor().decompress(frame, max_output_size=_MAX_BYTES)
    length = int.from_bytes(payload[:4], "little")
    header = json.loads(payload[4 : 4 + length])
    arrays, at = [], 4 + length
    for dtype_name, shape in header["arrays"]:
        dtype, count = np.dtype(_DTYPES[dtype_name]), math.prod(shape)
        array = np.frombuffer(payload, dtype, count, at).reshape(shape).astype(dtype_name)
        arrays.append(array)
        at += count * dtype.itemsize
    phase, step, task_id, sample = header["key"]
    return Episode(
        key=EpisodeKey(phase=phase, step=step, task_id=task_id, sample=sample),
        traces=tuple(_trace(item, arrays) for item in header["traces"]),
        turns=tuple(_turn(item) for item in header["turns"]),
        stop_reason=header["stop_reason"],
        changes={path: None if index is None else arrays[index].tobytes() for path, index in header["changes"].items()},
        outcome=outcome_from_json(header["outcome"]),
        costs=header["costs"],
        stats=header["stats"],
    )


def _trace_header(trace: Trace, put: Any) -> dict[str, Any]:
    routes = trace.routes
    return {
        "arrays": [put(trace.token_ids), put(trace.loss_mask), put(trace.logprobs)],
        "versions": [[span.start, span.end, span.version] for span in trace.versions],
        "routes": None if routes is None else [put(routes.expert_ids), put(routes.valid), _origin_to_json(routes.origin)],
    }


def _origin_to_json(origin: RouteOrigin | None) -> list[Any] | None:
    return (
        None if origin is None else [origin.router.hex(), origin.tokens.hex(), origin.ids.hex(), [list(span) for span in origin.versions]]
    )


def _origin(item: list[Any] | None) -> RouteOrigin | None:
    if item is None:
        return None
    router, tokens, ids = (bytes.fromhex(text) for text in item[:3])
    return RouteOrigin(router=router, tokens=tokens, ids=ids, versions=tuple((start, end, version) for start, end, version in item[3]))


def _trace(item: dict[str, Any], arrays: list[np.ndarray]) -> Trace:
    token_ids, loss_mask, logprobs = (arrays[index] for index in item["arrays"])
    routes = None
    if item["routes"] is not None:
        ids, valid, *rest = item["routes"]  # episodes stored before the field existed say nothing of their origin
        routes = Routes(expert_ids=arrays[ids], valid=arrays[valid], origin=_origin(rest[0] if rest else None))
    return Trace(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=tuple(VersionSpan(start=start, end=end, version=version) for start, end, version in item["versions"]),
        routes=routes,
    )


_TURN_FIELDS = ("trace", "start", "end", "call", "arguments", "text", "observation", "status", "generate_s", "tool_s")


def _turn_header(turn: Turn) -> list[Any]:
    values = [getattr(turn, name) for name in _TURN_FIELDS]
    values[4] = dict(turn.arguments)
    return values


def _turn(values: list[Any]) -> Turn:
    return Turn(**dict(zip(_TURN_FIELDS, values, strict=True)))


def outcome_to_json(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return an outcome as JSON values, tagged by ``kind``."""
    if outcome is None:
        return None
    if isinstance(outcome, Scored):
        flags = [[flag.rule, flag.severity, flag.evidence] for flag in outcome.flags]
        parts = {key: float(value) for key, value in outcome.parts.items()}
        fields = {"reward": float(outcome.reward), "parts": parts, "reason": outcome.reason, "flags": flags, "layers": list(outcome.layers)}
        return {"kind": "scored", **fields}
    if isinstance(outcome, Ungraded):
        return {"kind": "ungraded", "reason": outcome.reason}
    return {"kind": "failed", "error": outcome.error}


def outcome_from_json(item: dict[str, Any] | None) -> Outcome | None:
    """Inverse of ``outcome_to_json``."""
    if item is None:
        return None
    if item["kind"] == "scored":
        flags = tuple(Flag(rule=rule, severity=severity, evidence=evidence) for rule, severity, evidence in item["flags"])
        layers = tuple(item.get("layers", ()))  # episodes stored before the field existed have none
        return Scored(reward=item["reward"], parts=item["parts"], reason=item["reason"], flags=flags, layers=layers)
    return Ungraded(reason=item["reason"]) if item["kind"] == "ungraded" else Failed(error=item["error"])


def _checksum(frame: bytes) -> bytes:
    return hashlib.blake2b(frame, digest_size=_DIGEST).digest()


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_LOCAL, "compressor"):
        _LOCAL.compressor = zstandard.ZstdCompressor(level=3)
    return _LOCAL.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_LOCAL, "decompressor"):
        _LOCAL.decompressor = zstandard.ZstdDecompressor()
    return _LOCAL.decompressor
