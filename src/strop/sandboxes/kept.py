"""A bubblewrap box that stays up between commands, on a worker of its own: what a persistent shell needs.

Every command, the shell among them, is forked by the box's keeper (``warm/keeper.py``) into a process namespace of its own over the same
mounted workspace, so that a one-shot command beside the shell sees its files and still dies as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strop.core.errors import SandboxError
from strop.sandboxes.cgroups import Evidence
from strop.sandboxes.streams import OutputStream, Sink, close_all, input_descriptor
from strop.sandboxes.worker import KILL_TIMEOUT_S, MAX_REQUEST_BYTES, RunReport, Worker


class KeptRun:
    """One box that is up. Made by ``start``; ``close`` kills all of it.

    Attributes:
        upper: Descriptor of the directory with the workspace's changes.
        merged: Descriptor of the mounted workspace.
    """

    def __init__(self, worker: Worker, channel: socket.socket, upper: int, merged: int) -> None:
        self._worker = worker
        self._channel = channel
        self.upper, self.merged = upper, merged
        self._runs: dict[int, asyncio.Future[int | None]] = {}
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno(), self._on_message)
        self._evidence = worker.evidence()

    @classmethod
    async def start(cls, worker: Worker, request: Mapping[str, Any]) -> KeptRun:
        """Start the worker and the box on it.

        Args:
            worker: Not yet started; it belongs to this object from now on.
            request: As for ``Worker.run``, of kind ``keep``.

        Raises:
            SandboxError: The machinery failed; nothing is left.
        """
        await worker.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with open(os.devnull, "r+b") as null:
                upper, merged = await worker.hold(request, [theirs.fileno(), null.fileno(), null.fileno()])
        except BaseException:
            ours.close()
            await worker.kill()
            raise
        finally:
            theirs.close()
        return cls(worker, ours, upper, merged)

    def _on_message(self) -> None:
        try:
            data = self._channel.recv(1 << 12)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._channel.fileno())
            for ended in self._runs.values():
                if not ended.done():
                    ended.set_result(None)
            return
        message = json.loads(data)
        ended = self._runs.get(message["id"])
        if ended is not None and not ended.done():
            ended.set_result(message["status"])

    def begin(self, kind: str, argv: Sequence[str], fds: list[int]) -> int:
        """Start a command with the given descriptors for 0, 1 and 2 and return its number.

        Raises:
            SandboxError: The command line is too long, or the box is gone.
        """
        payload = json.dumps({"id": self._next + 1, "kind_of_run": kind, "argv": list(argv)}).encode()
        if len(payload) > MAX_REQUEST_BYTES:
            raise SandboxError(f"the command line has {len(payload)} bytes, at most {MAX_REQUEST_BYTES} can be passed")
        self._next += 1
        self._runs[self._next] = self._loop.create_future()
        try:
            socket.send_fds(self._channel, [payload], fds)
        except OSError as error:
            self._runs.pop(self._next)
            raise SandboxError(f"the box of an open shell is gone: {error}", retryable=True) from error
        return self._next

    async def end(self, number: int, timeout_s: float | None, *, kill: bool = False) -> tuple[int | None, bool]:
        """Wait until a command and all its processes are dead; kill them after ``timeout_s``, or now.

        Returns:
            Its wait status, ``None`` if it was killed from outside, and whether the time was up.

        Raises:
            SandboxError: It can't be killed.
        """
        ended = self._runs[number]
        timed_out = False
        try:
            if not kill:
                try:
                    async with asyncio.timeout(timeout_s):
                        return await asyncio.shield(ended), False
                except TimeoutError:
                    timed_out = True
            with contextlib.suppress(OSError):
                self._channel.send(json.dumps({"kill": number}).encode())
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    return await asyncio.shield(ended), timed_out
            except TimeoutError:
                raise SandboxError(f"a command beside an open shell could not be killed within {KILL_TIMEOUT_S} s") from None
        finally:
            if ended.done():
                self._runs.pop(number, None)

    async def run(self, kind: str, argv: Sequence[str], *, stdin: bytes, stdout: Sink, timeout_s: float) -> RunReport:
        """Run a one-shot command in the box that is up; as ``Worker.run``."""
        before, started = self._worker.evidence(), time.perf_counter()
        stream = OutputStream(stdout)
        number = 0
        try:
            given = input_descriptor(stdin)
            try:
                number = self.begin(kind, argv, [given, stream.write_fd, stream.write_fd])
            finally:
                close_all([given])
                stream.close_write()
            status, timed_out = await self.end(number, timeout_s)
            await stream.finish()
        except BaseException:
            if number in self._runs:
                await self.end(number, None, kill=True)
            raise
        finally:
            stream.close()
        after = self._worker.evidence()
        spent = time.perf_counter() - started
        return RunReport(status=status, timed_out=timed_out, before=before, after=after, delta_fd=-1, duration_s=spent)

    def since_last(self) -> tuple[Evidence, Evidence]:
        """The kernel's counters at the last call and now."""
        before, self._evidence = self._evidence, self._worker.evidence()
        return before, self._evidence

    async def close(self) -> None:
        """Kill everything in the box and wait until it is dead; the descriptors stay with the caller. Idempotent."""
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
        await self._worker.kill()


class KeptShell:
    """The stream of a shell in a kept box (see ``shell.ShellStream``)."""

    def __init__(self, kept: KeptRun, argv: Sequence[str]) -> None:
        self._kept = kept
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        try:
            self._number = kept.begin("exec", argv, [theirs.fileno()] * 3)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def write(self, data: bytes) -> None:
        """Feed the shell's stdin."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._loop.sock_sendall(self._socket, data)

    async def read(self) -> bytes:
        """Next piece of output."""
        try:
            return await self._loop.sock_recv(self._socket, 1 << 18)
        except ConnectionResetError:
            return b""

    async def kill(self) -> None:
        """Kill the shell and everything that it started."""
        if self._socket.fileno() < 0:
            return
        try:
            await self._kept.end(self._number, None, kill=True)
        finally:
            self._socket.close()
