"""Engines under test: a scripted model that checks the cache it is given, the torch model, and the native model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from strop.core.config import EngineConfig
from strop.core.episode import EpisodeKey
from strop.engine.conformance import EngineSetup
from strop.engine.embedded import EmbeddedEngine
from strop.engine.torch_model import TorchModel, TorchResult
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.ports import Session

SHAPE = DecoderConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4, top_k=2, expert_size=16
)
MAX_TOKENS = 160
PROMPT = np.random.default_rng(0).integers(0, SHAPE.vocab_size, 60).tolist()


def key(sample: int, task: str = "t") -> EpisodeKey:
    """A key of the tests."""
    return EpisodeKey(phase="test", step=0, task_id=task, sample=sample)


async def generate(session: Session, ids: Sequence[int], count: int, temperature: float = 1.0, stop: Sequence[int] = ()) -> list[int]:
    """The sampled tokens of one call."""
    result = await session.generate(ids, max_new_tokens=count, stop_ids=stop, temperature=temperature)
    return result.token_ids.tolist()


async def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for at most ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.001)


def decoder_weights(version: int) -> dict[str, Any]:
    """Weights that differ clearly between versions."""
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(version), std=0.3)
    return decoder.state_dict()


def torch_engine(seed: int, version: int, max_sessions: int) -> EmbeddedEngine:
    """An engine over ``TorchModel``."""
    torch.set_num_threads(1)
    model = TorchModel(SHAPE, decoder_weights(version))
    config = EngineConfig(max_sessions=max_sessions, max_tokens=MAX_TOKENS, max_batch=5, prefill_rows=32)
    return EmbeddedEngine(config, model, seed=seed, version=version, make_cache=model.make_cache, is_exact=False)


def torch_setup() -> EngineSetup:
    """For the conformance suite. Two float32 paths of this size agree to about 1e-6; 1e-4 leaves room."""
    return EngineSetup(
        make=lambda seed, version, sessions: torch_engine(seed, version, sessions),
        weights=decoder_weights,
        vocab_size=SHAPE.vocab_size,
        max_tokens=MAX_TOKENS,
        tolerance=1e-4,
    )


@dataclass
class RecordingCache:
    """Holds, for each slot and position, the token that was fed and the weights' version that computed it."""

    slots: int
    max_tokens: int
    tokens: np.ndarray = field(init=False)
    versions: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.full((self.slots, self.max_tokens), -1, np.int64)
        self.versions = np.full((self.slots, self.max_tokens), -1, np.int64)

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        assert src_slot != dst_slot
        assert (self.tokens[src_slot, :n] >= 0).all(), "copied a prefix that was never computed"
        self.tokens[dst_slot, :n] = self.tokens[src_slot, :n]
        self.versions[dst_slot, :n] = self.versions[src_slot, :n]

    def free(self, slot: int) -> None:
        self.tokens[slot] = self.versions[slot] = -1


def scripted_weights(version: int) -> dict[str, Any]:
    """Weights of ``ScriptedModel``: their version."""
    return {"version": np.array(version)}


class ScriptedModel:
    """A model without arithmetic: the logits after a row depend on all tokens of the cache up to it and on their versions.

    Exact by construction, so any difference between two runs is the engine's own. Weights: ``scripted_weights``.
    """

    def __init__(self, version: int = 0, shape: DecoderConfig = SHAPE) -> None:
        self.config = shape
        self.version = version
        self.calls: list[tuple[int, int]] = []  # (rows, wanted) of each call
        self.caches: list[RecordingCache] = []
        self.fail_at: int | None = None
        self.nan_at: int | None = None

    def make_cache(self, slots: int, max_tokens: int) -> RecordingCache:
        self.caches.append(RecordingCache(slots, max_tokens))
        return self.caches[-1]

    def load(self, weights: Mapping[str, Any]) -> None:
        self.version = int(weights["version"])

    def infer(self, rows: Any, cache: RecordingCache, want: np.ndarray) -> TorchResult:
        self.calls.append((len(rows.slots), len(want)))
        if self.fail_at == len(self.calls):
            raise RuntimeError("planted failure of the model")
        assert len(set(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True))) == len(rows.slots)
        for token, position, slot in zip(rows.token_ids, rows.positions, rows.slots, strict=True):
            cache.tokens[slot, position] = token
            cache.versions[slot, position] = self.version
        states = [self._state(cache, int(slot), int(position)) for position, slot in zip(rows.positions, rows.slots, strict=True)]
        logits = (
            np.stack([np.random.default_rng(states[at]).normal(0, 1.5, self.config.vocab_size) for at in want])
            if len(want)
            else np.zeros((0, self.config.vocab_size))
        )
        routes = np.array([[self._experts(state, layer) for layer in range(self.config.num_layers)] for state in states], np.uint8)
        if self.nan_at == len(self.calls) and len(want):
            logits[0] = np.nan
        return TorchResult(logits.astype(np.float32), routes)

    def _state(self, cache: RecordingCache, slot: int, position: int) -> int:
        tokens, versions = cache.tokens[slot, : position + 1], cache.versions[slot, : position + 1]
        assert (tokens >= 0).all(), f"row at position {position} of slot {slot} has a hole below it"
        return int.from_bytes(__import__("hashlib").blake2b(tokens.tobytes() + versions.tobytes(), digest_size=7).digest(), "little")

    def _experts(self, state: int, layer: int) -> list[int]:
        first = (state >> (4 * layer)) % self.config.num_experts
        return sorted([first, (first + 1 + (state >> 20) % (self.config.num_experts - 1)) % self.config.num_experts])

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        return TorchModel.sample(self, logits, uniforms, temperature)  # type: ignore[arg-type]

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        return TorchModel.logprobs(self, logits, targets, temperature)  # type: ignore[arg-type]


def scripted_engine(
    seed: int = 0, version: int = 0, max_sessions: int = 4, *, max_batch: int = 4, prefill_rows: int = 32, **options: Any
) -> tuple[EmbeddedEngine, ScriptedModel]:
    """An engine over ``ScriptedModel`` and the model."""
    model = ScriptedModel(version)
    config = EngineConfig(max_sessions=max_sessions, max_tokens=MAX_TOKENS, max_batch=max_batch, prefill_rows=prefill_rows)
    return EmbeddedEngine(config, model, seed=seed, version=version, make_cache=model.make_cache, **options), model


def scripted_setup(*, offload: bool = True) -> EngineSetup:
    """Exact, for the conformance suite."""
    return EngineSetup(
        make=lambda seed, version, sessions: scripted_engine(seed, version, sessions, offload=offload)[0],
        weights=scripted_weights,
        vocab_size=SHAPE.vocab_size,
        max_tokens=MAX_TOKENS,
    )


def native_setup() -> EngineSetup:
    """The exact engine as it is used."""
    from strop.model.inference import InferenceModel

    config = {"max_tokens": MAX_TOKENS, "max_batch": 5, "prefill_rows": 32}
    return EngineSetup(
        make=lambda seed, version, sessions: EmbeddedEngine(
            EngineConfig(max_sessions=sessions, **config),
            InferenceModel(SHAPE, decoder_weights(version), threads=1),
            seed=seed,
            version=version,
        ),
        weights=decoder_weights,
        vocab_size=SHAPE.vocab_size,
        max_tokens=MAX_TOKENS,
    )


SETUPS = {
    "scripted": scripted_setup,
    "torch": torch_setup,
    "scripted-inline": lambda: scripted_setup(offload=False),
    "native": native_setup,
}
