"""What the conformance checks share: the registry, the arena they work in, and how they say that something is wrong."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from strop.core.config import SandboxConfig
from strop.ports import ExecResult, Sandbox, SandboxProvider

SECRET_NAME = "STROP_CONFORMANCE_SECRET"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A named check; ``needs`` are keys of ``SandboxCapabilities.missing`` any of which excuses it; a heavy one uses the machine up."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[Arena], Awaitable[None]]
    is_heavy: bool = False


class Arena:
    """What a check works with: a provider, a base tree, and helpers."""

    def __init__(self, provider: SandboxProvider, base: Path, spec: str, config: SandboxConfig) -> None:
        self.provider = provider
        self.base = base
        self.spec = spec
        self.config = config
        self.marker = f"{secrets.randbelow(10**9):09d}"
        self.secret = os.environ[SECRET_NAME]

    async def box(self) -> Sandbox:
        """A fresh box over the base tree."""
        return await self.provider.start(str(self.base))

    async def python(self, code: str, *, box: Sandbox | None = None, timeout_s: float = 30.0) -> ExecResult:
        """Run code in a box (a fresh one by default) with the warm runner."""
        mine = box or await self.box()
        try:
            return await mine.run_python(["-c", code], timeout_s=timeout_s)
        finally:
            if box is None:
                await mine.stop()

    async def shell(self, script: str, *, box: Sandbox, timeout_s: float = 30.0, stdin: bytes = b"") -> ExecResult:
        """Run a shell script in a box."""
        return await box.exec(["sh", "-c", script], timeout_s=timeout_s, stdin=stdin)

    def sleeper(self) -> str:
        """A command that sleeps for longer than any check and can be found from the host by ``survivors``."""
        return f"sleep 3600.{self.marker}"

    async def is_running(self) -> bool:
        """Whether a ``sleeper`` runs somewhere on this host."""
        return bool(find_processes(self.marker))

    async def survivors(self, wait_s: float = 3.0) -> list[int]:
        """Processes on this host that still run ``sleeper``, after giving the kernel a moment."""
        for _ in range(int(wait_s / 0.02)):
            found = find_processes(self.marker)
            if not found:
                return []
            await asyncio.sleep(0.02)
        return find_processes(self.marker)


def find_processes(marker: str) -> list[int]:
    """Processes of this machine with ``marker`` in an argument that belongs to ``sleep``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if len(arguments) > 1 and arguments[0].endswith(b"sleep") and marker.encode() in arguments[1]:
                found.append(int(entry.name))
    return found


CHECKS: list[Check] = []


def check(*needs: str, heavy: bool = False) -> Callable[[Callable[[Arena], Awaitable[None]]], Callable[[Arena], Awaitable[None]]]:
    """Register a check under its function's name; ``needs`` are capabilities whose declared absence excuses it."""

    def register(function: Callable[[Arena], Awaitable[None]]) -> Callable[[Arena], Awaitable[None]]:
        CHECKS.append(Check(name=function.__name__, needs=needs, run=function, is_heavy=heavy))
        return function

    return register


def expect(condition: bool, message: object) -> None:
    """Fail the check with ``message`` unless ``condition``."""
    if not condition:
        raise AssertionError(str(message)[:500])


def refused(action: Callable[[], object], *errors: type[Exception]) -> None:
    """Fail the check unless ``action`` raises one of ``errors``."""
    try:
        result = action()
    except errors:
        return
    raise AssertionError(f"expected one of {[e.__name__ for e in errors]}, got {result!r:.200}")


def box_directory(arena: Arena) -> str:
    """Where the back end keeps files on this host, empty if it doesn't say."""
    return str(getattr(arena.provider, "directory", ""))
