"""The protocol of persistent shells, over a real local shell; the contract itself is in the conformance suite."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import SandboxError
from strop.sandboxes.shell import SHELL_ARGV, ShellSession, _UntilWord


class LocalStream:
    """A shell of this machine; the commands of these tests are ours."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.kills = 0

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(3)  # the smallest pieces: the end word arrives in many

    async def kill(self) -> None:
        self.kills += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


async def open_session() -> tuple[ShellSession, LocalStream, list[str]]:
    process = await asyncio.create_subprocess_exec(
        *SHELL_ARGV,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    stream, seen = LocalStream(process), []

    async def over() -> None:
        seen.append("over")

    return ShellSession(stream, lambda timed_out: "", on_command=lambda: seen.append("command"), on_end=over), stream, seen


def test_commands_share_state_and_end_where_they_end() -> None:
    async def work() -> None:
        session, stream, seen = await open_session()
        assert (await session.run("x=1; cd /; printf 'a\\nb'", timeout_s=60)).output == "a\nb"
        result = await session.run("echo $x $PWD; cat; false", timeout_s=60)
        assert (result.exit_code, result.output) == (1, "1 /\n")
        assert (await session.run("", timeout_s=60)).exit_code == 0
        assert (await session.run("if", timeout_s=60)).exit_code != 0
        assert session.is_open
        await session.close()
        assert (stream.kills, seen) == (1, ["command"] * 4 + ["over"])
        with pytest.raises(SandboxError, match="has ended: it was closed"):
            await session.run("true", timeout_s=60)

    asyncio.run(work())


def test_a_command_that_ends_the_shell_or_takes_too_long() -> None:
    async def work() -> None:
        session, stream, _ = await open_session()
        result = await session.run("echo last; exit 4", timeout_s=60)
        assert (result.exit_code, result.output, result.killed_by, stream.kills) == (None, "last\n", "", 1)
        session, stream, _ = await open_session()
        result = await session.run("echo begun; sleep 100", timeout_s=1.0)
        assert (result.exit_code, result.output, result.killed_by, stream.kills) == (None, "begun\n", "timeout", 1)
        with pytest.raises(SandboxError, match="ran out of time"):
            await session.run("true", timeout_s=60)

    asyncio.run(work())


@pytest.mark.parametrize("command", ["a\0b", "x" * ((1 << 20) + 1)])
def test_what_is_not_a_command_is_refused(command: str) -> None:
    async def work() -> None:
        session, _, _ = await open_session()
        with pytest.raises(SandboxError, match="must be text without NUL"):
            await session.run(command, timeout_s=60)
        await session.close()

    asyncio.run(work())


@settings(max_examples=100, deadline=None)
@given(output=st.binary(max_size=200), code=st.integers(0, 255), cuts=st.lists(st.integers(0, 300), max_size=20))
def test_the_end_is_found_wherever_the_pieces_are_cut(output: bytes, code: int, cuts: list[int]) -> None:
    word = "0123456789abcdef" * 2
    data = output + f"\n{word} {code}\n".encode()
    found = _UntilWord(word)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        assert found.exit_code is None
        found.feed(data[start:end])
    assert found.exit_code == code
    assert found.text() == output.decode("utf-8", "replace")
