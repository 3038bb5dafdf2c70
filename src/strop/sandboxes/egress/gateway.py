"""The gateway: it stands for the whole outside in a namespace of its own, and passes on what the allow-list lets through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from strop.core.errors import SandboxError
from strop.sandboxes.egress import dns, namespace
from strop.sandboxes.egress.http import MAX_HEAD_BYTES, Request, read_request
from strop.sandboxes.egress.policy import AllowList, is_reachable_address, normal
from strop.sandboxes.egress.tls import MAX_HELLO_BYTES, NeedMore, server_name

HELLO_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 300.0
MAX_CONNECTIONS, MAX_CONNECTIONS_OF_A_BOX = 512, 64
MAX_LINKS = 1 << 14
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EgressEvent:
    """One connection that a box tried: the name it asked for (empty if none could be read), port, and why it was refused (empty if not)."""

    name: str
    port: int
    refused: str = ""
    dropped_headers: tuple[str, ...] = ()


class _Refused(Exception):
    pass


class Gateway:
    """Serves the boxes of one allow-list. Use ``open``, then ``attach`` for each box, then ``close``.

    Args:
        allowed: What may be reached.
    """

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._namespace = -1
        self._servers: list[asyncio.Server] = []
        self._names: asyncio.DatagramTransport | None = None
        self._links = 0
        self._connections: dict[asyncio.Task[None], str] = {}
        self.events: deque[EgressEvent] = deque(maxlen=1_000)
        """The last connections, newest last."""

    async def open(self) -> None:
        """Make the namespace, where every address is local, and listen there.

        Raises:
            SandboxError: It can't be made here.
        """
        try:
            self._namespace = namespace.new_namespace()
            namespace.configure(self._namespace, ["link set lo up", "route add local default dev lo"])
            # A namespace takes after the machine's, where a docker daemon may have switched forwarding on: boxes would reach each other.
            namespace.inside(self._namespace, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("0"))
            listeners = [namespace.inside(self._namespace, lambda port=port: _listen(port)) for port in self._allowed.ports]
            names = namespace.inside(self._namespace, _name_socket)
        except OSError as error:
            await self.close()
            raise SandboxError(f"the network gateway can't be made: {error}") from error
        except BaseException:
            await self.close()
            raise
        for listener in listeners:
            self._servers.append(await asyncio.start_server(self._on_connection, sock=listener, limit=MAX_HEAD_BYTES))
        loop = asyncio.get_running_loop()
        self._names, _ = await loop.create_datagram_endpoint(lambda: _Names(self._allowed), sock=names)

    def reserve(self) -> int:
        """A link for one box that will be attached.

        Raises:
            SandboxError: There were too many.
        """
        if self._links >= MAX_LINKS:
            raise SandboxError(f"one gateway serves at most {MAX_LINKS} boxes in its life; start another provider")
        self._links += 1
        return self._links - 1

    def attach(self, link: int, box: int) -> None:
        """Give a box its interface, route and address.

        Args:
            link: From ``reserve``.
            box: Descriptor of the box's network namespace.

        Raises:
            SandboxError: It can't be done.
        """
        here, there = _addresses(link)
        name = f"box{link}"
        peer = f"link add {name} type veth peer name eth0 netns /proc/self/fd/{box}"
        namespace.configure(self._namespace, [peer, f"addr add {here}/30 dev {name}", f"link set {name} up"], (box,))
        commands = ["link set lo up", f"addr add {there}/30 dev eth0", "link set eth0 up", f"route add default via {here}"]
        namespace.configure(box, commands)

    @staticmethod
    def name_server(link: int) -> str:
        """Address of the name server at the other end of a link."""
        return _addresses(link)[0]

    # ------------------------------------------------------------------------------------------------ connections

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        box = writer.get_extra_info("peername")[0]
        of_this_box = sum(other == box for other in self._connections.values())
        if len(self._connections) >= MAX_CONNECTIONS or of_this_box >= MAX_CONNECTIONS_OF_A_BOX:
            writer.close()
            return
        self._connections[task] = box
        port = writer.get_extra_info("sockname")[1]
        try:
            await self._serve(reader, writer, port)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, UnicodeError):
            pass  # either side went away, or a name can't be one: the other side sees its connection close
        finally:
            self._connections.pop(task, None)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        name, first = "", b""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await reader.readexactly(1)
                if first == b"\x16":
                    name, hello = await _read_hello(reader, first)
                    request = None
                else:
                    request = await _read_head(reader, first)
                    name, hello = request.host, request.head
            if request is not None and request.port not in (None, port):
                raise _Refused(f"Host names port {request.port} on a connection to port {port}")
            if not self._allowed.allows(name, port):
                raise _Refused("not in the allow-list")
        except (_Refused, ValueError) as error:
            self.events.append(EgressEvent(name=name, port=port, refused=str(error)))
            if first != b"\x16":
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        self.events.append(EgressEvent(name=name, port=port, dropped_headers=request.dropped if request else ()))
        out_reader, out_writer = await _connect(name, port)
        try:
            out_writer.write(hello)
            await _both_ways(_send_request(request, reader, out_writer), _copy(out_reader, writer))
        finally:
            out_writer.close()

    async def close(self) -> None:
        """Close every connection and the namespace. Idempotent."""
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._names is not None:
            self._names.close()
            self._names = None
        self._servers.clear()
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


class _Names(asyncio.DatagramProtocol):
    """The name server of the boxes."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(self._tasks) < MAX_CONNECTIONS:
            task = asyncio.get_running_loop().create_task(self._answer(data, addr))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        try:
            name, kind, cls = dns.read_question(data)
        except dns.BadQuestion:
            return
        code, addresses = 0, []
        if cls != dns.IN or not self._allowed.allows(name, None):
            code = dns.REFUSED
        elif kind == dns.A:
            try:
                addresses = [found for family, found in await _resolve(name, 0) if family == socket.AF_INET]
            except (OSError, UnicodeError):
                code = dns.SERVER_FAILURE
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(dns.answer(data, addresses, code), addr)


def _addresses(number: int) -> tuple[str, str]:
    """Addresses of the two ends of a link; they mean nothing outside its two namespaces."""
    first = (10 << 24) + (201 << 16) + 4 * number
    return socket.inet_ntoa((first + 1).to_bytes(4, "big")), socket.inet_ntoa((first + 2).to_bytes(4, "big"))


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen(128)
    listener.setblocking(False)
    return listener


def _name_socket() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind(("0.0.0.0", 53))
    found.setblocking(False)
    return found


async def _read_hello(reader: asyncio.StreamReader, data: bytes) -> tuple[str, bytes]:
    while True:
        try:
            return normal(server_name(data)), data
        except NeedMore:
            more = await reader.read(_PIECE)
            data += more
            if not more or len(data) > MAX_HELLO_BYTES:
                raise ValueError("a TLS connection without a whole client hello") from None


async def _read_head(reader: asyncio.StreamReader, first: bytes) -> Request:
    try:
        return read_request(first + await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        raise ValueError(f"a request head of more than {MAX_HEAD_BYTES} bytes") from None


async def _resolve(name: str, port: int) -> list[tuple[int, str]]:
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [(family, str(address[0])) for family, _, _, _, address in found if is_reachable_address(str(address[0]))]


async def _connect(name: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        error: OSError = OSError(f"{name} has no address that boxes may reach")
        for _, address in await _resolve(name, port):
            try:
                return await asyncio.open_connection(address, port)
            except OSError as failed:
                error = failed
        raise error


async def _send_request(request: Request | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What the box sends after the hello: all of it for TLS, exactly one body for HTTP."""
    if request is None:
        await _copy(reader, writer)
    elif request.body_bytes >= 0:
        await _copy(reader, writer, request.body_bytes)
    else:
        await _copy_chunks(reader, writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None = None) -> None:
    while limit is None or limit > 0:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            data = await reader.read(_PIECE if limit is None else min(_PIECE, limit))
            if not data:
                break
            limit = None if limit is None else limit - len(data)
            writer.write(data)
            await writer.drain()
    if limit is None:
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _copy_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A chunked body, read strictly; trailers aren't sent on."""
    while True:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            line = await reader.readuntil(b"\r\n")
        size = line[:-2].partition(b";")[0]
        if not 0 < len(size) <= 8 or any(digit not in b"0123456789abcdefABCDEF" for digit in size):
            raise OSError("bad chunk")
        writer.write(size + b"\r\n")
        if int(size, 16) == 0:
            writer.write(b"\r\n")
            await writer.drain()
            return
        await _copy(reader, writer, int(size, 16))
        if await reader.readexactly(2) != b"\r\n":
            raise OSError("bad chunk")
        writer.write(b"\r\n")


async def _both_ways(there: Coroutine[Any, Any, None], back: Coroutine[Any, Any, None]) -> None:
    """Copy in both directions until the answer has ended."""
    sending, receiving = asyncio.ensure_future(there), asyncio.ensure_future(back)
    try:
        await receiving
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)
