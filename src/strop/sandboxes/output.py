"""Keeping the beginning and the end of a stream of any length in constant memory."""

from __future__ import annotations

import codecs

HEAD_CHARS = TAIL_CHARS = 5_000


class CappedText:
    """Decodes UTF-8 with replacement; keeps the first and the last characters and counts the rest.

    Example: with head 3 and tail 2, ``abcdefgh`` becomes ``abc\\n[... 3 characters elided ...]\\ngh``.
    """

    def __init__(self, head: int = HEAD_CHARS, tail: int = TAIL_CHARS) -> None:
        self._head_chars, self._tail_chars = head, tail
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = ""
        self._tail = ""
        self._dropped = 0

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Take the next bytes of the stream; ``final`` ends it."""
        text = self._decoder.decode(data, final)
        room = self._head_chars - len(self._head)
        if room > 0:
            self._head += text[:room]
            text = text[room:]
        self._tail += text
        if len(self._tail) > 16 * self._tail_chars:
            self._trim()

    def _trim(self) -> None:
        extra = len(self._tail) - self._tail_chars
        if extra > 0:
            self._dropped += extra
            self._tail = self._tail[extra:]

    def text(self) -> str:
        """The stream so far, with the middle elided if it is longer than head and tail together."""
        self._trim()
        if not self._dropped:
            return self._head + self._tail
        return f"{self._head}\n[... {self._dropped} characters elided ...]\n{self._tail}"


class CappedBytes:
    """Collects bytes up to a limit; ``truncated`` tells whether there was more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self.truncated = False

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Take the next bytes of the stream."""
        room = self._limit - len(self._data)
        self._data += data[:room]
        self.truncated = self.truncated or len(data) > room

    def value(self) -> bytes:
        """What was kept."""
        return bytes(self._data)
