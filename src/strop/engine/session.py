"""A session of the embedded engine: one stream, seen through the port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from strop.core.episode import Trace
from strop.core.errors import EngineError
from strop.core.random import uniforms
from strop.engine.stream import Request, Stream
from strop.ports import Generation

if TYPE_CHECKING:
    from strop.engine.embedded import EmbeddedEngine


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Between 0, which is greedy, and the first, logits divided by the temperature would overflow."""


class EmbeddedSession:
    """See ``strop.ports.Session``. A cancelled or timed-out ``generate`` closes the session: its cache goes back, ``trace`` still works.

    Args:
        engine: The engine that opened it.
        stream: Its state.
    """

    def __init__(self, engine: EmbeddedEngine, stream: Stream) -> None:
        self._engine = engine
        self._stream = stream

    @property
    def cached_tokens(self) -> int:
        """Fed tokens that were copied from another stream instead of being computed."""
        return self._stream.cached_tokens

    def __len__(self) -> int:
        return self._stream.length

    async def generate(self, new_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float) -> Generation:
        """Feed ``new_ids``, then sample until a stop id or ``max_new_tokens``.

        Raises:
            EngineError: Closed or already generating, a wrong argument, or no room in the context (nothing was fed); or nothing came in
                time, which closes the session.
        """
        stream = self._stream
        self._check(new_ids)
        if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
            raise EngineError(
                f"temperature must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got {temperature}", ids=self._ids
            )
        if max_new_tokens < 1:
            raise EngineError(f"max_new_tokens must be at least 1, got {max_new_tokens}", ids=self._ids)
        if stream.length + len(new_ids) == 0:
            raise EngineError("generate on an empty stream needs at least one new token", ids=self._ids)
        total = stream.length + len(new_ids) + max_new_tokens
        if total > len(stream.ids):
            raise EngineError(
                f"{stream.length} tokens so far + {len(new_ids)} new + {max_new_tokens} to sample = {total} do not fit the context of "
                f"{len(stream.ids)} tokens (engine.max_tokens)",
                ids=self._ids,
            )
        stream.append_fed(new_ids, self._engine.version)
        request = Request(
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(int(token) for token in stop_ids),
            temperature=float(temperature),
            uniforms=uniforms(self._engine.seed, stream.key, stream.length, max_new_tokens).tolist(),
            future=asyncio.get_running_loop().create_future(),
            arrived=self._engine.next_arrival(),
        )
        return await self._engine.run_request(stream, request)

    def feed(self, new_ids: Sequence[int]) -> None:
        """Append tokens that nothing will be sampled after; they are not computed.

        Raises:
            EngineError: Closed or generating, a token outside the vocabulary, or no room in the context; nothing was fed.
        """
        stream = self._stream
        self._check(new_ids)
        if stream.length + len(new_ids) > len(stream.ids):
            raise EngineError(
                f"{stream.length} tokens so far + {len(new_ids)} new do not fit the context of {len(stream.ids)} (engine.max_tokens)",
                ids=self._ids,
            )
        stream.append_fed(new_ids, self._engine.version)

    def trace(self) -> Trace:
        """A copy of the stream so far; rows that aren't computed have ``routes.valid = False``."""
        return self._stream.trace()

    async def close(self) -> None:
        """Give the cache back. Idempotent; ``trace`` still works."""
        self._engine.release(self._stream)

    @property
    def _ids(self) -> dict[str, str]:
        return {"session": str(self._stream.key)}

    def _check(self, new_ids: Sequence[int]) -> None:
        self._engine.check_alive()
        if self._stream.is_closed:
            raise EngineError(f"session {self._stream.key} is closed", ids=self._ids)
        if self._stream.request is not None:
            raise EngineError(f"session {self._stream.key} is already generating; one call at a time", ids=self._ids)
        vocabulary = self._engine.vocab_size
        array = np.asarray(new_ids, dtype=np.int64)
        wrong = np.flatnonzero((array < 0) | (array >= vocabulary))
        if len(wrong):
            at = int(wrong[0])
            raise EngineError(f"token id {int(array[at])} at index {at} is outside the vocabulary [0, {vocabulary})", ids=self._ids)
