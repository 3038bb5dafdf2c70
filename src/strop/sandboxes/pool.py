"""A bounded set of warm workers that many boxes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from strop.core.errors import SandboxError
from strop.sandboxes.worker import Worker


class WorkerPool:
    """Lends workers, one run each; starts them when first needed and again after they died.

    Args:
        workers: Not yet started workers.
        wait_s: Longest wait for a free worker.
    """

    def __init__(self, workers: list[Worker], wait_s: float = 600.0) -> None:
        self._workers = workers
        self._wait_s = wait_s
        self._free: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in reversed(workers):
            self._free.put_nowait(worker)
        self._closed = False

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        """A running worker for one run.

        Raises:
            SandboxError: No worker became free in time, it didn't start, or the pool is closed.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        try:
            worker = self._free.get_nowait()
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(self._wait_s):
                    worker = await self._free.get()
            except TimeoutError:
                raise SandboxError(
                    f"none of {len(self._workers)} sandbox workers became free within {self._wait_s} s; raise sandbox.workers",
                    retryable=True,
                ) from None
        try:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if not worker.is_running:
                await worker.start()
            yield worker
        finally:
            self._free.put_nowait(worker)

    async def warm(self) -> None:
        """Start every worker that isn't in use and not yet up."""
        idle = [self._free.get_nowait() for _ in range(self._free.qsize())]
        try:
            await asyncio.gather(*(worker.start() for worker in idle if not worker.is_running))
        finally:
            for worker in reversed(idle):
                self._free.put_nowait(worker)

    async def close(self) -> None:
        """Kill every worker; runs in progress end with ``SandboxError``. Idempotent."""
        self._closed = True
        for worker in self._workers:
            await worker.kill()
