"""Answers to the boxes' questions for names: addresses of allowed names, "refused" for every other. One question a message.

Names outside the allow-list are never asked for, so a question can't carry anything out.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

A, AAAA, IN = 1, 28, 1
REFUSED, SERVER_FAILURE = 5, 2
_TTL_S = 30


class BadQuestion(ValueError):
    """A message that isn't one plain question."""


def read_question(message: bytes) -> tuple[str, int, int]:
    """Name, type and class of the question.

    Raises:
        BadQuestion: Not one plain question.
    """
    if len(message) < 12:
        raise BadQuestion("shorter than a header")
    _, flags, questions = struct.unpack("!HHH", message[:6])
    if flags & 0x8000 or questions != 1:
        raise BadQuestion("not one question")
    labels, offset = [], 12
    while True:
        if offset >= len(message):
            raise BadQuestion("the name has no end")
        size = message[offset]
        if size == 0:
            break
        if size > 63 or offset + 1 + size > len(message) or len(labels) > 127:
            raise BadQuestion("bad label")
        try:
            labels.append(message[offset + 1 : offset + 1 + size].decode("ascii"))
        except UnicodeDecodeError:
            raise BadQuestion("bad label") from None
        offset += 1 + size
    if offset + 5 > len(message):
        raise BadQuestion("the question has no end")
    kind, cls = struct.unpack("!HH", message[offset + 1 : offset + 5])
    return ".".join(labels), kind, cls


def answer(message: bytes, addresses: Sequence[str], code: int = 0) -> bytes:
    """Answer to a message that ``read_question`` could read.

    Args:
        message: The question.
        addresses: IPv4 addresses, for a question of type A.
        code: Error code; no addresses go with one.
    """
    number, flags = struct.unpack("!HH", message[:4])
    end = 12
    while message[end]:
        end += 1 + message[end]
    question = message[12 : end + 5]
    found = [ipaddress.IPv4Address(address).packed for address in addresses][:16] if code == 0 else []
    head = struct.pack("!HHHHHH", number, 0x8080 | flags & 0x0100 | code, 1, len(found), 0, 0)
    return head + question + b"".join(struct.pack("!HHHIH", 0xC00C, A, IN, _TTL_S, 4) + packed for packed in found)
