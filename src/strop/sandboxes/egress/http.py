"""One HTTP/1 request of a box: strict reading, the check's answer, and the head that goes on. Hostile bytes throughout.

Whatever two programs could read differently is refused, so that the server can't see another request than the one that was checked:
folded lines, bare line ends, white space before a colon, two Host headers, two ways to say where the body ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 1 << 16
_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) (\S+) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_SENSITIVE = re.compile(r"(^|[-_])(auth|authorization|authentication|cookie2?|token|secret|password|credentials?|api-?key|session)([-_]|$)")
_HOP_BY_HOP = frozenset(("connection", "keep-alive", "proxy-connection", "upgrade", "te", "trailer", "http2-settings"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A checked head.

    Attributes:
        host: Name from Host, without port.
        port: Port from Host, or ``None``.
        head: The bytes to send on: sensitive and hop-by-hop headers dropped, one request a connection.
        body_bytes: Length of the body, or -1 for a chunked one.
        dropped: Names of the sensitive headers that were dropped.
    """

    host: str
    port: int | None
    head: bytes
    body_bytes: int
    dropped: tuple[str, ...]


def is_sensitive(name: str) -> bool:
    """Whether a header may carry a credential: it is never sent on."""
    return bool(_SENSITIVE.search(name.lower()))


def read_request(head: bytes) -> Request:
    """Read a request head that ends with an empty line.

    Raises:
        ValueError: It isn't one, or is ambiguous; says why.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _LINE.fullmatch(first)
    if match is None:
        raise ValueError(f"bad request line {first[:80]!r}")
    method, target = match[1], match[2]
    headers = [_header(line) for line in lines]
    hosts = [value for name, value in headers if name.lower() == "host"]
    if len(hosts) != 1 or not hosts[0]:
        raise ValueError(f"{len(hosts)} Host headers, expected 1")
    path, authority = _target(method, target)
    if authority is not None and authority.lower() != hosts[0].lower():
        raise ValueError("the request line and the Host header name different hosts")
    host, port = _host(hosts[0])
    kept: list[tuple[str, str]] = []
    dropped: list[str] = []
    for name, value in headers:
        if is_sensitive(name):
            dropped.append(name.lower())
        elif name.lower() not in _HOP_BY_HOP:
            kept.append((name, value))
    text = "".join(f"{name}: {value}\r\n" for name, value in [*kept, ("Connection", "close")])
    sent = method + b" " + path + b" HTTP/1.1\r\n" + text.encode("latin-1") + b"\r\n"
    return Request(host=host, port=port, head=sent, body_bytes=_body(headers), dropped=tuple(dropped))


def _header(line: bytes) -> tuple[str, str]:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ValueError(f"bad header line {line[:80]!r}")
    return match[1].decode("ascii"), match[2].decode("latin-1")


def _target(method: bytes, target: bytes) -> tuple[bytes, str | None]:
    """Path to send, and the host that an absolute target names."""
    if method.upper() == b"CONNECT":
        raise ValueError("CONNECT isn't allowed: there is no proxy here")
    if target.startswith(b"/") or target == b"*":
        return target, None
    parts = urlsplit(target.decode("latin-1"))
    if parts.scheme.lower() != "http" or not parts.netloc:
        raise ValueError(f"bad request target {target[:80]!r}")
    if "@" in parts.netloc:
        raise ValueError("a request target with a user in it")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return path.encode("latin-1"), parts.netloc


def _host(value: str) -> tuple[str, int | None]:
    name, colon, number = value.rpartition(":")
    if not colon:
        return value, None
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ValueError(f"bad Host {value[:80]!r}")
    return name, int(number)


def _body(headers: list[tuple[str, str]]) -> int:
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    codings = [value for name, value in headers if name.lower() == "transfer-encoding"]
    if codings:
        if lengths or [value.lower() for value in codings] != ["chunked"]:
            raise ValueError("a request that says in two ways, or in an unknown one, where its body ends")
        return -1
    if not lengths:
        return 0
    if len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,15}", lengths[0]):
        raise ValueError(f"bad Content-Length {lengths!r:.80}")
    return int(lengths[0])
