"""Persistent shells: the protocol over a shell's stdin and output, the same for every back end.

A command goes in as one quoted argument of ``eval`` with an empty stdin, followed by a line that prints a random word and ``$?``. Output up
to that word is the command's. A command that prints the word itself fools only the transcript of its own session: nothing is decided
from it, and causes of death come from the kernel as everywhere.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from strop.core.errors import SandboxError
from strop.ports import ExecResult
from strop.sandboxes.output import CappedText

SHELL_ARGV = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash --norc --noprofile; exec sh")
"""bash where there is one: a syntax error doesn't end it."""
_MAX_COMMAND_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 10.0


class ShellStream(Protocol):
    """The two ends of a running shell, as a back end offers them."""

    async def write(self, data: bytes) -> None:
        """Feed the shell's stdin."""
        ...

    async def read(self) -> bytes:
        """Next piece of output; ``b""`` when the shell and everything that holds its output are gone."""
        ...

    async def kill(self) -> None:
        """Kill everything in the session and wait until it is dead. Idempotent."""
        ...


class ShellSession:
    """See ``ports.Shell``.

    Args:
        stream: The running shell.
        cause: Called with whether the time was up; says what limit was reached since the last call, from the kernel's evidence.
        on_command: Called after every command.
        on_end: Called once, when the session is over and everything in it is dead.
    """

    def __init__(
        self,
        stream: ShellStream,
        cause: Callable[[bool], str],
        *,
        on_command: Callable[[], None],
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._cause = cause
        self._on_command, self._on_end = on_command, on_end
        self._busy = asyncio.Lock()
        self._ended = ""

    @property
    def is_open(self) -> bool:
        """Whether commands can still be run."""
        return not self._ended

    @property
    def is_busy(self) -> bool:
        """Whether a command is running."""
        return self._busy.locked()

    async def run(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run one command line; see ``ports.Shell.run``."""
        if "\0" in command or len(command.encode(errors="surrogatepass")) > _MAX_COMMAND_BYTES:
            raise SandboxError(f"a shell command must be text without NUL of at most {_MAX_COMMAND_BYTES} bytes, got {command[:100]!r}")
        async with self._busy:
            if self._ended:
                raise SandboxError(f"the shell has ended: {self._ended}")
            word = secrets.token_hex(16)
            output = _UntilWord(word)
            started = time.perf_counter()
            timed_out = False
            try:
                async with asyncio.timeout(timeout_s):
                    quoted = shlex.quote(command)
                    await self._stream.write(f"eval {quoted} </dev/null\nprintf '\\n{word} %d\\n' \"$?\"\n".encode(errors="replace"))
                    while output.exit_code is None and (data := await self._stream.read()):
                        output.feed(data)
            except TimeoutError:
                timed_out = True
            except BaseException:
                await self._end("its command was cancelled or its stream failed")
                raise
            killed_by = self._cause(timed_out)  # before the end of the session takes the counters away
            if output.exit_code is None:
                await self._end("its command ran out of time" if timed_out else "its command ended it")
            self._on_command()
            return ExecResult(
                exit_code=output.exit_code,
                output=output.text(),
                duration_s=time.perf_counter() - started,
                killed_by="timeout" if timed_out else killed_by if output.exit_code != 0 else "",
            )

    async def close(self) -> None:
        """Kill everything in the session; see ``ports.Shell.close``."""
        if not self._ended:
            await self._end("it was closed")

    async def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = why
        await self._stream.kill()
        await self._on_end()


class _UntilWord:
    """Output up to a line with the word and an exit code, which may arrive in pieces."""

    def __init__(self, word: str) -> None:
        self._end = re.compile(rb"\n" + word.encode() + rb" (\d+)\n")
        self._held = b""
        self._longest = len(word) + 8
        self._text = CappedText()
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        data = self._held + data
        match = self._end.search(data)
        if match:
            self.exit_code = int(match[1])
            self._text.feed(data[: match.start()], final=True)
            self._held = b""
            return
        keep = min(len(data), self._longest)
        self._text.feed(data[: len(data) - keep])
        self._held = data[len(data) - keep :]

    def text(self) -> str:
        """What the command printed."""
        if self._held:
            self._text.feed(self._held, final=True)
            self._held = b""
        return self._text.text()
