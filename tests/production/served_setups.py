"""A served model whose answers follow a script, a real tiny checkpoint, and a server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from strop.agent.compact import CALL, END, SPECIAL_TOKENS, SYSTEM, TOOL
from strop.agent.render import CompactRenderer
from strop.core.config import EngineConfig
from strop.engine.embedded import EmbeddedEngine
from strop.engine.torch_model import TorchModel, TorchResult
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.production.served import ServedModel

SHAPE = DecoderConfig(
    vocab_size=272, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4, top_k=2, expert_size=16
)
MAX_TOKENS = 640


def tiny_tokenizer() -> Tokenizer:
    """Bytes, the format's special tokens, and one merge: ``21`` is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *letters, "21"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("2", "1")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


class TokenCache:
    """Remembers the tokens of each slot."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.tokens = np.full((slots, max_tokens), -1, np.int64)

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None:
        self.tokens[dst_slot, :n] = self.tokens[src_slot, :n]

    def free(self, slot: int) -> None:
        self.tokens[slot] = -1


class PolicyModel:
    """Samples what ``policy`` says: it gets the stream and returns the next token."""

    def __init__(self, policy: Callable[[list[int]], int], *, pause_s: float = 0.0) -> None:
        self.config = SHAPE
        self.policy = policy
        self.pause_s = pause_s
        self.streams: list[list[int]] = []

    def load(self, weights: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def infer(self, rows: Any, cache: TokenCache, want: np.ndarray) -> TorchResult:
        time.sleep(self.pause_s)
        cache.tokens[rows.slots, rows.positions] = rows.token_ids
        logits = np.zeros((len(want), SHAPE.vocab_size), np.float32)
        for i, at in enumerate(want):
            stream = cache.tokens[rows.slots[at], : rows.positions[at] + 1].tolist()
            self.streams.append(stream)
            logits[i, self.policy(stream)] = 40.0
        return TorchResult(logits, np.tile(np.array([0, 1], np.uint8), (len(rows.slots), SHAPE.num_layers, 1)))

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        return TorchModel.sample(self, logits, uniforms, temperature)  # type: ignore[arg-type]

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        return TorchModel.logprobs(self, logits, targets, temperature)  # type: ignore[arg-type]


class Script:
    """Calls tools when the stream has a system turn, otherwise answers in text; both by script."""

    def __init__(self, calls: list[tuple[str, dict[str, str]]], text: str = "") -> None:
        self.renderer = CompactRenderer(tiny_tokenizer())
        plain = tiny_tokenizer()
        # spelled letter by letter: not what the tokenizer would give for "21"
        self.actions = [self._letters(self.renderer.render_action(name, args), plain) for name, args in calls]
        self.text = [*plain.encode(text, add_special_tokens=False).ids, END]

    @staticmethod
    def _letters(ids: list[int], plain: Tokenizer) -> list[int]:
        two, one, both = (plain.token_to_id(token) for token in ("2", "1", "21"))
        return [token for i in ids for token in ((two, one) if i == both else (i,))]

    def __call__(self, stream: list[int]) -> int:
        start = len(stream) - stream[::-1].index(CALL) if CALL in stream else 0
        answer = self.actions[stream.count(TOOL) % len(self.actions)] if SYSTEM in stream else self.text
        said = len(stream) - start
        return answer[said] if said < len(answer) else END


def scripted_model(script: Callable[[list[int]], int], *, sessions: int = 8, pause_s: float = 0.0) -> tuple[ServedModel, PolicyModel]:
    """A served model over ``PolicyModel``."""
    model = PolicyModel(script, pause_s=pause_s)
    config = EngineConfig(max_sessions=sessions, max_tokens=MAX_TOKENS, max_batch=sessions, prefill_rows=512)
    engine = EmbeddedEngine(config, model, seed=0, make_cache=TokenCache, is_exact=False)
    tokenizer = tiny_tokenizer()
    served = ServedModel(
        name="tiny",
        engine=engine,
        renderer=CompactRenderer(tokenizer),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        max_tokens=MAX_TOKENS,
        vocab_size=SHAPE.vocab_size,
        check=engine.check_alive,
    )
    return served, model


def write_checkpoint(folder: Path) -> Path:
    """A real checkpoint with random weights."""
    from strop.model.checkpoint import save_checkpoint

    tokenizer_dir = folder / "tokenizer"
    tokenizer_dir.mkdir(parents=True)
    tiny_tokenizer().save(str(tokenizer_dir / "tokenizer.json"))
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps({"strop_chat_format": "compact"}))
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(0), std=0.3)
    target = folder / "tiny-random"
    save_checkpoint(target, SHAPE, decoder.state_dict(), tokenizer_from=tokenizer_dir)
    return target


@contextlib.contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve ``app`` on a free port of the loopback interface; yields the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start in 20 s"
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop in 20 s"
