"""An engine that repeats a recorded run's weight swaps at the token positions where they fell.

With ``rl.max_staleness > 0`` swaps land in the middle of streams, at positions that depend on timing. The record has the version of every
token. ``ForcedEngine`` holds each session at the position where its version changes until the engine has that version, and holds each swap
back until no session needs the older weights any more. Everything else is the wrapped engine's.

No deadlock: a session that needs version ``v`` was admitted while ``v`` or an older version was loaded, in the record and here (the window
depends on versions only), and sessions start in the order of dispatch in both.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from strop.core.episode import EpisodeKey, Trace
from strop.core.errors import EngineError
from strop.ports import Engine, EngineCapabilities, Generation, Session

FORCE_DEADLINE_S = 600.0


class ForcedEngine:
    """Wraps an engine; see the module's text.

    Args:
        engine: Does the work.
        versions: Recorded version of every token of an episode, ``int64 [L]``, or ``None`` for one that has no record.
        users: Keys of the recorded episodes that have a token older than the given version.
        deadline_s: Longest wait for a version or a session.
    """

    def __init__(
        self,
        engine: Engine,
        versions: Callable[[EpisodeKey], np.ndarray | None],
        users: Callable[[int], Sequence[EpisodeKey]],
        *,
        deadline_s: float = FORCE_DEADLINE_S,
    ) -> None:
        self.inner = engine
        self.versions = versions
        self.users = users
        self.deadline_s = deadline_s
        self.version = -1
        self._waits_for: dict[EpisodeKey, float] = {}  # version a session is held for; infinity once it is closed
        self._changed = asyncio.Condition()

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those of the wrapped engine."""
        return self.inner.capabilities

    async def open(self, key: EpisodeKey) -> Session:
        """Open a session whose version changes are forced."""
        needed = self.versions(key)
        if needed is not None and len(needed):
            await self.wait_for(key, int(needed[0]))
        return ForcedSession(self, await self.inner.open(key), key, needed)

    def metrics(self) -> Mapping[str, float]:
        """Those of the wrapped engine."""
        return self.inner.metrics()

    async def swap(self, weights: Mapping[str, Any], version: int) -> None:
        """Swap once every recorded session is past its last token of an older version."""
        users = self.users(version)

        def late() -> list[EpisodeKey]:
            return [key for key in users if self._waits_for.get(key, -1) < version]

        async with self._changed:
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._changed.wait_for(lambda: not late())
            except TimeoutError:
                raise EngineError(
                    f"replay: the swap to version {version} waited {self.deadline_s:g} s for {len(late())} sessions, first {late()[0]}"
                ) from None
            await self.inner.swap(weights, version)
            self.version = version
            self._changed.notify_all()

    async def close(self) -> None:
        """Close the wrapped engine."""
        await self.inner.close()

    async def wait_for(self, key: EpisodeKey, version: int) -> None:
        """Hold a session until the engine has ``version``."""
        async with self._changed:
            self._waits_for[key] = version
            self._changed.notify_all()
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._changed.wait_for(lambda: self.version >= version)
            except TimeoutError:
                raise EngineError(f"replay: session {key} waited {self.deadline_s:g} s for version {version}") from None

    async def release(self, key: EpisodeKey) -> None:
        """A session needs nothing any more."""
        async with self._changed:
            self._waits_for[key] = math.inf
            self._changed.notify_all()


class ForcedSession:
    """One stream whose ``generate`` calls are cut where the record changes version."""

    def __init__(self, engine: ForcedEngine, inner: Session, key: EpisodeKey, needed: np.ndarray | None) -> None:
        self._engine, self._inner, self._key = engine, inner, key
        self._needed = needed if needed is not None else np.zeros(0, np.int64)
        self._length = 0

    async def generate(self, new_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float) -> Generation:
        """As the wrapped session's; the sampled tokens are the same as in one piece, since sampling is keyed by position."""
        pieces: list[np.ndarray] = []
        left = max_new_tokens
        fed = list(new_ids)
        while True:
            await self._hold()
            first = self._length + len(fed)
            count = min(left, self._same_version(first))
            part = await self._inner.generate(fed, max_new_tokens=count, stop_ids=stop_ids, temperature=temperature)
            pieces.append(part.token_ids)
            self._length = first + len(part.token_ids)
            left -= len(part.token_ids)
            fed = []
            if part.finish_reason == "stop" or left == 0:
                return Generation(token_ids=np.concatenate(pieces), finish_reason=part.finish_reason)

    def feed(self, new_ids: Sequence[int]) -> None:
        """As the wrapped session's."""
        self._inner.feed(new_ids)
        self._length += len(new_ids)

    def trace(self) -> Trace:
        """As the wrapped session's."""
        return self._inner.trace()

    async def close(self) -> None:
        """As the wrapped session's; lets swaps go on."""
        await self._inner.close()
        await self._engine.release(self._key)

    async def _hold(self) -> None:
        # What is fed and the token sampled after it belong to one step of the engine, so the next token's version decides.
        if self._length < len(self._needed):
            await self._engine.wait_for(self._key, int(self._needed[self._length]))

    def _same_version(self, start: int) -> int:
        """Tokens from ``start`` on that the record has under one version; past the record (a difference that will be found): many."""
        rest = self._needed[start:]
        if not len(rest):
            return 1 << 30
        other = np.flatnonzero(rest != rest[0])
        return int(other[0]) if len(other) else 1 << 30
