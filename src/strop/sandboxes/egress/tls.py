"""The server name in the first bytes of a TLS connection. Hostile bytes: every length is checked, nothing is trusted."""

from __future__ import annotations

MAX_HELLO_BYTES = 1 << 16
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D


class NeedMore(Exception):
    """The bytes so far are a beginning of a client hello."""


def server_name(data: bytes) -> str:
    """The name that a client asks for.

    Args:
        data: The connection's first bytes.

    Raises:
        NeedMore: More bytes are needed.
        ValueError: Not a client hello, one without exactly one name, or one whose true name is encrypted.
    """
    hello = _Bytes(_handshake(data))
    hello.take(2 + 32)
    for size in (1, 2, 1):  # session id, cipher suites, compression methods
        hello.vector(size)
    extensions = _Bytes(hello.vector(2)) if hello.left else _Bytes(b"")
    names: list[str] = []
    while extensions.left:
        kind, body = extensions.number(2), _Bytes(extensions.vector(2))
        if kind == _ENCRYPTED_HELLO:
            raise ValueError("the client hello hides its true name")
        if kind == _SERVER_NAME:
            entries = _Bytes(body.vector(2))
            while entries.left:
                name_kind, name = entries.number(1), entries.vector(2)
                if name_kind != 0:
                    raise ValueError("a server name of unknown kind")
                names.append(name.decode("ascii"))
    if len(names) != 1:
        raise ValueError(f"{len(names)} server names, expected 1")
    return names[0]


def _handshake(data: bytes) -> bytes:
    """The body of the first handshake message, which may span several records."""
    body = b""
    while True:
        if len(data) < 5:
            raise NeedMore
        if data[0] != _HANDSHAKE or data[1] != 3:
            raise ValueError("not a TLS handshake")
        size = int.from_bytes(data[3:5], "big")
        if not 0 < size <= 1 << 14:
            raise ValueError(f"a TLS record of {size} bytes")
        if len(data) < 5 + size:
            raise NeedMore
        body += data[5 : 5 + size]
        data = data[5 + size :]
        if len(body) >= 4:
            if body[0] != _CLIENT_HELLO:
                raise ValueError("not a client hello")
            wanted = int.from_bytes(body[1:4], "big")
            if wanted > MAX_HELLO_BYTES:
                raise ValueError(f"a client hello of {wanted} bytes")
            if len(body) >= 4 + wanted:
                return body[4 : 4 + wanted]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def take(self, size: int) -> bytes:
        if size > len(self._data):
            raise ValueError("a length points past the end")
        found, self._data = self._data[:size], self._data[size:]
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))
