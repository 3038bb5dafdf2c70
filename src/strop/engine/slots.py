"""Cache slots and who waits for one."""

from __future__ import annotations

import asyncio
from collections import deque

from strop.core.episode import EpisodeKey
from strop.core.errors import EngineError


class SlotPool:
    """Hands out slots ``0 .. count - 1``; waiting callers are served in order.

    Args:
        count: Slots.
        deadline_s: Longest wait for one.
    """

    def __init__(self, count: int, deadline_s: float) -> None:
        self._count = count
        self._deadline_s = deadline_s
        self.free: deque[int] = deque(range(count))
        self._stale: list[int] = []
        self._waiting: deque[asyncio.Future[int]] = deque()

    async def take(self, key: EpisodeKey) -> int:
        """Return a slot for ``key``, the one that was given back longest ago.

        Raises:
            EngineError: None became free in time, or ``fail`` was called.
        """
        if self.free:
            return self.free.popleft()
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(waiter.result())  # it came at the same moment as the cancellation
            if not isinstance(error, TimeoutError):
                raise
            raise EngineError(
                f"waited {self._deadline_s:g} s for a free session for {key}: all {self._count} are open (engine.max_sessions)",
                retryable=True,
                ids={"session": str(key)},
            ) from None

    def give(self, slot: int, *, is_stale: bool = False) -> None:
        """Take a slot back.

        Args:
            slot: The slot.
            is_stale: Nobody can use what its cache holds.
        """
        if is_stale:
            self._stale.append(slot)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self.free.append(slot)  # at the end, so that the prefixes in it stay to be copied as long as possible

    def make_stale(self) -> None:
        """From now on nobody can use what the free slots' caches hold."""
        self._stale += self.free

    def take_stale(self) -> list[int]:
        """Return the slots that became stale since the last call. One may have a new owner, who has computed nothing yet."""
        stale, self._stale = self._stale, []
        return stale

    def fail(self, error: EngineError) -> None:
        """Let every waiting caller fail."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(EngineError(str(error)))
        self._waiting.clear()
