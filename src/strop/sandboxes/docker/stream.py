"""The daemon's attached streams: an HTTP request that turns into two raw directions.

docker's client library hands out the bare socket and may have read ahead on it; here nothing is lost, and the event loop does the waiting.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from strop.core.errors import SandboxError

CONNECT_TIMEOUT_S = 60.0
STDOUT, STDERR = 1, 2
_MAX_FRAME_BYTES = 1 << 24


class Attached:
    """An attached stream. The daemon sends frames: a byte with the descriptor, three zeros, a length, and the data."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, socket_path: str, url: str, body: dict[str, Any] | None = None) -> Attached:
        """Send a POST request and take over its connection.

        Args:
            socket_path: The daemon's socket.
            url: Path and query, with the version.
            body: JSON to send.

        Raises:
            SandboxError: The daemon refused or can't be reached.
        """
        data = json.dumps(body).encode() if body is not None else b""
        head = (
            f"POST {url} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(socket_path, limit=1 << 20)
                try:
                    writer.write(head.encode() + data)
                    await writer.drain()
                    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    status = int(answer.split(" ", 2)[1])
                    if status not in (101, 200):
                        text = (await reader.read(2_000)).decode(errors="replace")
                        raise SandboxError(f"the docker daemon refused {url.partition('?')[0]}: {status} {text.strip()}")
                except BaseException:
                    writer.close()
                    raise
        except (OSError, EOFError, TimeoutError, ValueError, IndexError) as error:
            raise SandboxError(f"the docker daemon at {socket_path} gave no stream: {error!r}", retryable=True) from error
        return cls(reader, writer)

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Feed stdin; ``end`` closes it."""
        self._writer.write(data)
        await self._writer.drain()
        if end:
            self._writer.write_eof()

    async def frame(self) -> tuple[int, bytes]:
        """Next piece: descriptor and data; ``(0, b"")`` at the end."""
        try:
            head = await self._reader.readexactly(8)
            size = int.from_bytes(head[4:], "big")
            if head[0] not in (STDOUT, STDERR) or size > _MAX_FRAME_BYTES:
                raise SandboxError(f"the docker daemon sent a frame that begins with {head!r}")
            return head[0], await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""

    def close(self) -> None:
        """Give the connection up."""
        self._writer.close()
