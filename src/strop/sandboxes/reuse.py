"""A provider whose boxes don't run the same program on the same files twice.

Episodes of a group try the same edits, and an agent tests again what it tested before: of the test runs of a repair run fewer than half
are on files that weren't tested in the same state. A verdict never comes from here: graders have boxes of their own.

A result is kept only of a run that left the workspace as it was and that nothing stopped, or the time limit did after the run itself had
used up a good part of it; it is given only under the same limit, to a box whose whole content is equal, links, modes and directories
included. So all that an agent can do to the answers of another one is to have had
the same files. Programs that answer differently each time answer here as they did the first time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from strop.ports import Egress, ExecResult, Sandbox, SandboxCapabilities, SandboxProvider, Shell, has_worked
from strop.sandboxes.archive import content_digest
from strop.sandboxes.wrapped import WrappedBox

Key = tuple[str, bytes, tuple[str, ...], float]


@dataclass(slots=True)
class _Memory:
    """Results by base, content, arguments and time limit; the least recently used go first."""

    capacity: int
    results: OrderedDict[Key, ExecResult] = field(default_factory=OrderedDict)
    running: dict[Key, asyncio.Lock] = field(default_factory=dict)

    def get(self, key: Key) -> ExecResult | None:
        result = self.results.get(key)
        if result is not None:
            self.results.move_to_end(key)
        return result

    def put(self, key: Key, result: ExecResult) -> None:
        self.results[key] = result
        while len(self.results) > self.capacity:
            self.results.popitem(last=False)


class ReusingProvider:
    """Starts boxes that share the results of ``run_python``.

    Args:
        provider: What starts the real boxes. A run in them must find nothing of earlier runs but the files of the workspace (no
            processes, no temporary files, no clock that stands still): bubblewrap's are so, a container that lives on isn't.
        capacity: Results that are kept.
    """

    def __init__(self, provider: SandboxProvider, *, capacity: int = 4096) -> None:
        self._provider = provider
        self._memory = _Memory(capacity)

    @property
    def capabilities(self) -> SandboxCapabilities:
        """Those of the real provider."""
        return self._provider.capabilities

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> Sandbox:
        """Start a box; one that can reach something outside is never answered from memory."""
        box = await self._provider.start(base, snapshot=snapshot, egress=egress)
        return box if egress is not None else ReusingBox(box, base, self._memory)

    async def close(self) -> None:
        """Close the real provider."""
        await self._provider.close()


class ReusingBox(WrappedBox):
    """A box that asks the memory before it runs a program.

    Args:
        box: The real one.
        base: Its base directory.
        memory: Shared results.
    """

    def __init__(self, box: Sandbox, base: str, memory: _Memory) -> None:
        super().__init__(box)
        self._base = base
        self._memory = memory
        self._has_shell = False

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run ``python argv...``, or return what it printed on equal files, with a duration of 0 seconds."""
        if self._has_shell:  # its processes may change files at any time
            return await self._box.run_python(argv, timeout_s=timeout_s)
        before = content_digest(await self._box.snapshot())
        key = (self._base, before, tuple(argv), timeout_s)
        lock = self._memory.running.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                known = self._memory.get(key)
                if known is not None:
                    return replace(known, duration_s=0.0)
                result = await self._box.run_python(argv, timeout_s=timeout_s)
                if _is_own_doing(result, timeout_s) and content_digest(await self._box.snapshot()) == before:
                    self._memory.put(key, result)
                return result
        finally:
            if not lock.locked():
                self._memory.running.pop(key, None)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command, always."""
        return await self._box.exec(argv, timeout_s=timeout_s, stdin=stdin)

    async def open_shell(self) -> Shell:
        """Start a shell; from then on nothing is reused in this box."""
        self._has_shell = True
        return await self._box.open_shell()

    async def fork(self) -> Sandbox:
        """A new box with the same content."""
        return ReusingBox(await self._box.fork(), self._base, self._memory)


def _is_own_doing(result: ExecResult, timeout_s: float) -> bool:
    """Whether the program, not the machine, decided how the run ended."""
    if result.killed_by == "timeout":
        return has_worked(result.cpu_s, timeout_s)
    return not result.killed_by and result.exit_code is not None
