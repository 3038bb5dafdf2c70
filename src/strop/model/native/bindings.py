"""ctypes view of the kernels. Callers check their arguments first: nothing here looks at values, only at layout."""

from __future__ import annotations

import ctypes as ct
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.core.errors import EngineError
from strop.model.config import DecoderConfig
from strop.model.native.build import build
from strop.model.native.weights import raw_arrays

_LAYER_FIELDS = ("q", "k", "v", "o", "q_norm", "k_norm", "input_norm", "post_norm", "router", "gate_up", "down")
MAX_EXPERTS = 1024
KEPT_SCORES_BYTES = 192 << 20
"""Vocabulary logits that a training pass keeps for its backward pass; beyond it they are computed twice."""


class _Config(ct.Structure):
    _fields_ = [
        *((name, ct.c_int32) for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "experts", "top_k", "expert_size")),
        *((name, ct.c_int32) for name in ("norm_topk", "tied", "trains")),
        ("eps", ct.c_float),
        ("kept_scores", ct.c_int64),
    ]


class _RawLayer(ct.Structure):
    _fields_ = [(name, ct.c_void_p) for name in _LAYER_FIELDS]


class _RawWeights(ct.Structure):
    _fields_ = [("embed", ct.c_void_p), ("head", ct.c_void_p), ("norm", ct.c_void_p), ("layers", ct.POINTER(_RawLayer))]


class _KvStore(ct.Structure):
    _fields_ = [("k", ct.c_void_p), ("v", ct.c_void_p), ("table", ct.c_void_p), ("width", ct.c_long), ("blocks", ct.c_long)]


class _RowBatch(ct.Structure):
    _fields_ = [
        ("rows", ct.c_long),
        ("tokens", ct.c_void_p),
        ("positions", ct.c_void_p),
        ("slots", ct.c_void_p),
        ("kv", _KvStore),
        ("wants", ct.c_long),
        ("want", ct.c_void_p),
    ]


class _TrainBatch(ct.Structure):
    _fields_ = [
        *((name, ct.c_int64) for name in ("rows", "streams", "wants")),
        *((name, ct.c_void_p) for name in ("tokens", "lengths", "want", "targets", "forced")),
        ("temperature", ct.c_float),
    ]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Rows of one inference step: contiguous int32 arrays; keys, values and block table ``[slots, width]`` as laid out by ``KVCache``."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    want: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TrainArrays:
    """Rows of one training pass.

    Attributes:
        tokens: ``int32 [R]``.
        lengths: ``int64 [streams]``.
        want: ``int32 [W]``.
        targets: ``int64 [W]``.
        forced: ``int64 [R, L, K]``, ascending, or ``None``.
        temperature: Above 0.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    want: np.ndarray
    targets: np.ndarray
    forced: np.ndarray | None
    temperature: float


@functools.cache
def library() -> ct.CDLL:
    """Compile if needed and load.

    Raises:
        EngineError: No compiler, or the library doesn't load.
    """
    path = build()
    try:
        lib = ct.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"the compiled kernels {path} don't load: {error}; delete the file to compile them again") from None
    pointer = ct.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "strop_net_new": (pointer, [ct.POINTER(_Config), ct.c_int]),
        "strop_net_free": (None, [pointer]),
        "strop_net_load": (ct.c_int, [pointer, ct.POINTER(_RawWeights)]),
        "strop_net_rope": (ct.c_int, [pointer, pointer, pointer, ct.c_long]),
        "strop_infer": (ct.c_int, [pointer, ct.POINTER(_RowBatch), pointer, pointer]),
        "strop_sample": (ct.c_int, [pointer, pointer, ct.c_long, ct.c_long, pointer, pointer, pointer, pointer]),
        "strop_score": (ct.c_int, [pointer, pointer, ct.c_long, ct.c_long, pointer, pointer, pointer, pointer]),
        "strop_train_forward": (pointer, [pointer, ct.POINTER(_TrainBatch), pointer, pointer, pointer, pointer, pointer]),
        "strop_train_backward": (ct.c_int, [pointer, pointer, pointer, pointer, pointer, ct.POINTER(_RawWeights)]),
        "strop_tape_release": (None, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def padded(size: int) -> int:
    """Round up to the 16 lanes of the kernels."""
    return (size + 15) // 16 * 16


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _raw_weights(config: DecoderConfig, arrays: Mapping[str, np.ndarray]) -> _RawWeights:
    layers = (_RawLayer * config.num_layers)()
    for index in range(config.num_layers):
        for name in _LAYER_FIELDS:
            setattr(layers[index], name, _address(arrays[f"{index}.{name}"]))
    return _RawWeights(_address(arrays["embed"]), _address(arrays.get("head")), _address(arrays["norm"]), layers)


class Tape:
    """What one training pass keeps for its backward pass. Its memory goes back when it is released or collected."""

    def __init__(self, net: Net, handle: int, wants: int) -> None:
        self._net, self.handle, self.wants = net, handle, wants

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        if self.handle:
            handle, self.handle = self.handle, 0
            library().strop_tape_release(self._net.handle, handle)

    def __del__(self) -> None:
        self.release()


class Net:
    """One network with its packed weights and its own threads. One call at a time.

    Args:
        config: Sizes.
        threads: CPU threads; 0 means all cores that this process may use.
        trains: Whether backward passes are needed (keeps a second packing of the weights).

    Raises:
        EngineError: No compiler, out of memory, or sizes that the kernels don't support.
    """

    def __init__(self, config: DecoderConfig, *, threads: int = 0, trains: bool = False) -> None:
        self.handle = 0
        _check_sizes(config)
        self.config, self.threads, self._positions = config, threads or usable_cores(), 0
        record = _Config(
            config.vocab_size,
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_experts,
            config.top_k,
            config.expert_size,
            int(config.norm_topk_prob),
            int(config.tie_embeddings),
            int(trains),
            config.rms_norm_eps,
            KEPT_SCORES_BYTES,
        )
        self.handle = library().strop_net_new(ct.byref(record), self.threads) or 0
        self._must(bool(self.handle), "the packed weights")

    def __del__(self) -> None:
        if self.handle:
            library().strop_net_free(self.handle)

    @staticmethod
    def _must(is_ok: bool, what: str) -> None:
        if not is_ok:
            raise EngineError(f"out of memory while allocating {what}")

    def load(self, weights: Mapping[str, Any]) -> None:
        """Pack weights (Hugging Face names, fused experts). ``WeightsError`` names a missing or misshapen tensor."""
        arrays = raw_arrays(self.config, weights)
        record = _raw_weights(self.config, arrays)
        self._must(library().strop_net_load(self.handle, ct.byref(record)) == 0, "scratch for packing")

    def reserve_positions(self, positions: int) -> None:
        """Make rotation tables for positions below ``positions``."""
        if positions <= self._positions:
            return
        count = max(positions, 2 * self._positions, 256)
        half = self.config.head_dim // 2
        exponents = np.arange(0, self.config.head_dim, 2, dtype=np.float32) / np.float32(self.config.head_dim)
        frequencies = (1.0 / np.float64(self.config.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)
        angles = (np.arange(count, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        cosine, sine = (np.ascontiguousarray(f(angles), dtype=np.float32) for f in (np.cos, np.sin))
        assert cosine.shape == (count, half)
        self._must(library().strop_net_rope(self.handle, _address(cosine), _address(sine), count) == 0, "rotation tables")
        self._positions = count

    def infer(self, rows: RowArrays) -> tuple[np.ndarray, np.ndarray]:
        """Return logits float32 [W, V] (a view of padded rows) and expert ids int32 [R, L, K]."""
        c = self.config
        self.reserve_positions(int(rows.positions.max()) + 1)
        logits = np.empty((len(rows.want), padded(c.vocab_size)), np.float32)
        chosen = np.empty((len(rows.tokens), c.num_layers, c.top_k), np.int32)
        kv = _KvStore(_address(rows.keys), _address(rows.values), _address(rows.table), rows.table.shape[1], rows.num_blocks)
        batch = _RowBatch(
            len(rows.tokens), _address(rows.tokens), _address(rows.positions), _address(rows.slots), kv, len(rows.want), _address(rows.want)
        )
        self._must(library().strop_infer(self.handle, ct.byref(batch), _address(logits), _address(chosen)) == 0, f"{len(rows.tokens)} rows")
        return logits[:, : c.vocab_size], chosen

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 [W] and log-probabilities float32 [W]."""
        ids, logprobs = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
        out = _address(ids), _address(logprobs)
        stride = logits.strides[0] // 4
        status = library().strop_sample(self.handle, _address(logits), stride, len(logits), _address(uniforms), _address(temperature), *out)
        self._must(status == 0, "scratch for sampling")
        return ids, logprobs

    def score(self, logits: np.ndarray, targets: np.ndarray, temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities of the targets and entropies, float32 [W] each."""
        logprobs, entropy = np.empty(len(logits), np.float32), np.empty(len(logits), np.float32)
        out = _address(logprobs), _address(entropy)
        stride = logits.strides[0] // 4
        library().strop_score(self.handle, _address(logits), stride, len(logits), _address(targets), _address(temperature), *out)
        return logprobs, entropy

    def train_forward(
        self, batch: TrainArrays, logprobs: np.ndarray, entropy: np.ndarray, router: np.ndarray
    ) -> tuple[Tape, np.ndarray, np.ndarray]:
        """Fill logprobs [W], entropy [W] and router logits [L, R, E]; return the tape, routes used and natural routes (int32 [R, L, K])."""
        c = self.config
        self.reserve_positions(int(batch.lengths.max()))
        chosen = np.empty((len(batch.tokens), c.num_layers, c.top_k), np.int32)
        natural = np.empty_like(chosen)
        record = _TrainBatch(
            len(batch.tokens),
            len(batch.lengths),
            len(batch.want),
            _address(batch.tokens),
            _address(batch.lengths),
            _address(batch.want),
            _address(batch.targets),
            _address(batch.forced),
            batch.temperature,
        )
        handle = library().strop_train_forward(
            self.handle, ct.byref(record), _address(logprobs), _address(entropy), _address(router), _address(chosen), _address(natural)
        )
        self._must(bool(handle), f"a training pass of {len(batch.tokens)} rows")
        return Tape(self, handle, len(batch.want)), chosen, natural

    def train_backward(
        self, tape: Tape, g_logprobs: np.ndarray, g_entropy: np.ndarray, g_router: np.ndarray | None, grads: Mapping[str, np.ndarray]
    ) -> None:
        """Write the gradients of every weight into ``grads`` (keys of ``raw_arrays``), and use up the tape."""
        record = _raw_weights(self.config, grads)
        status = library().strop_train_backward(
            self.handle, tape.handle, _address(g_logprobs), _address(g_entropy), _address(g_router), ct.byref(record)
        )
        tape.release()
        self._must(status == 0, "a backward pass")


def _check_sizes(config: DecoderConfig) -> None:
    c = config
    if c.head_dim % 2 or c.num_heads % c.num_kv_heads:
        raise EngineError(f"head_dim {c.head_dim} must be even and num_heads {c.num_heads} a multiple of num_kv_heads {c.num_kv_heads}")
    if not 1 <= c.top_k <= c.num_experts <= MAX_EXPERTS:
        raise EngineError(f"experts per token {c.top_k} must be 1 to num_experts {c.num_experts}, at most {MAX_EXPERTS}")
