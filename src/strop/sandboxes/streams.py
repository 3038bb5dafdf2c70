"""The pipes of a run: output drained into a sink by the event loop, input from memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from typing import Protocol

FINISH_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 18
_PIPE_BYTES = 1 << 18


class Sink(Protocol):
    """Receives a stream."""

    def feed(self, data: bytes, *, final: bool = False) -> None: ...


class OutputStream:
    """A pipe whose read end is drained into a sink by the event loop."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.add_reader(self._read_fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return
        self._sink.feed(data, final=not data)
        if not data:
            self._loop.remove_reader(self._read_fd)
            if not self._ended.done():
                self._ended.set_result(None)

    async def finish(self) -> None:
        """Wait for the end of the stream; its writers are dead, so only what is in the pipe is left."""
        async with asyncio.timeout(FINISH_TIMEOUT_S):
            await self._ended

    def close_write(self) -> None:
        """Close this process's copy of the write end."""
        close_all([self.write_fd])
        self.write_fd = -1

    def close(self) -> None:
        """Stop reading."""
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
        if self.write_fd >= 0:
            self.close_write()


def input_descriptor(data: bytes) -> int:
    """A descriptor to read ``data`` from; the null device if it is empty, so that nothing is ever inherited."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    writable = os.memfd_create("stdin")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(writable, view) :]
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
