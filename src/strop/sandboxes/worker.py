"""One warm worker: an outer bubblewrap with a warm parent, driven over a socket. Runs one command at a time.

State: ``idle`` between runs; a worker that misses a deadline, loses its socket or is cancelled is killed as a whole (its process
namespace goes with it) and started again by the pool. The host never waits without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.core.errors import SandboxError
from strop.sandboxes.cgroups import Evidence, Group, Hierarchy
from strop.sandboxes.egress.gateway import Gateway
from strop.sandboxes.outer import build_command
from strop.sandboxes.streams import OutputStream, Sink, close_all, input_descriptor

START_TIMEOUT_S = 30.0
SETUP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 100_000
# bubblewrap dies with its parent only from the moment when it has said so to the kernel; before that, and between the two halves of its
# start, a host that is killed would leave it behind for ever. The shell, which leads a process group of its own, waits for the end of a
# pipe that nobody but the host holds open, then kills the group. Whichever of the two ends, the other goes with it.
_WATCH = '("$@" </dev/null; kill -9 0) & read -r line; kill -9 0'


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """How a run ended, from the kernel's side.

    Attributes:
        status: Wait status of the main process, or ``None`` if the whole tree was killed.
        timed_out: Whether this host killed it at its deadline.
        before, after: The group's counters around the run.
        delta_fd: Directory with the workspace's changes (the caller closes it), or -1.
        duration_s: From the moment the box was ready to the end of its last process.
        cpu_s: Processor seconds of its process 1 and of those that this has waited for; 0 where they aren't counted.
    """

    status: int | None
    timed_out: bool
    before: Evidence
    after: Evidence
    delta_fd: int
    duration_s: float
    cpu_s: float = 0.0

    @property
    def is_out_of_memory(self) -> bool:
        """Whether a process of the run was killed because the run had reached its own memory limit."""
        return self._was_oom_killed and self.after.limit_hits > self.before.limit_hits

    @property
    def is_host_out_of_memory(self) -> bool:
        """Whether a process of the run was killed for memory although the run was within its limit: the machine had none left."""
        return self._was_oom_killed and not self.is_out_of_memory

    @property
    def _was_oom_killed(self) -> bool:
        return self.after.oom_kills > self.before.oom_kills


class Worker:
    """A warm worker.

    Args:
        name: Unique within the process; names its control groups.
        run_dir: The provider's directory.
        hierarchies: Where control groups can be made.
        memory_bytes, processes: Limits of one run.
        gateway: What runs reach the outside through; nothing when ``None``.
    """

    def __init__(
        self,
        name: str,
        run_dir: Path,
        hierarchies: dict[str, Hierarchy],
        *,
        memory_bytes: int,
        processes: int,
        gateway: Gateway | None = None,
    ) -> None:
        self.name = name
        self._run_dir = run_dir
        self._hierarchies = hierarchies
        self._memory_bytes, self._processes = memory_bytes, processes
        self._gateway = gateway
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._control: socket.socket | None = None
        self._group: Group | None = None
        self._lifeline = -1  # open for as long as the worker may live
        self._log = run_dir / f"{name}.log"
        self._evidence = Evidence()
        self._number = 0  # of the current or last run, counted by the warm parent too

    @property
    def is_running(self) -> bool:
        """Whether the warm parent is up."""
        return self._control is not None

    @property
    def pid(self) -> int:
        """Process id of the worker's first process, which leads its process group; 0 if it isn't running."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the warm parent and wait for its greeting. It dies with this process, however that ends.

        Raises:
            SandboxError: It didn't come up; the message carries what it printed.
        """
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        watched = -1
        try:
            self._group = Group(self.name, self._hierarchies)
            # The shell puts itself into the control groups before anything else runs, so no process can be outside them.
            link = self._gateway.reserve() if self._gateway else 0
            name_server = [self._gateway.name_server(link)] if self._gateway else []
            join = "".join(f"echo $$ > '{path}' || exit 1; " for path in self._group.join_files)
            command = ["/bin/sh", "-c", f"{join}{_WATCH}", "sh", *build_command(self._run_dir, [*map(str, theirs), *name_server])]
            watched, self._lifeline = os.pipe()
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(command, stdin=watched, stdout=log, stderr=log, pass_fds=theirs, start_new_session=True)
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            self._drop_lifeline()
            raise SandboxError(f"sandbox worker {self.name} can't be started: {error}") from error
        finally:
            close_all([watched] if watched >= 0 else [])
            for _, other in pairs:
                other.close()
        (self._requests, _), (self._control, _) = pairs
        self._control.setblocking(False)
        self._requests.setblocking(False)
        self._number = 0
        self._evidence = self._group.evidence()
        try:
            message, fds = await self._receive(START_TIMEOUT_S)
            try:
                if message.get("kind") != "hello":
                    raise SandboxError(f"it greeted with {message!r}, expected hello")
                if self._gateway is not None:
                    self._gateway.attach(link, fds[0])
            finally:
                close_all(fds)
            self._group.limit(memory_bytes=self._memory_bytes, processes=self._processes)
        except (TimeoutError, OSError, SandboxError) as error:
            await self.kill()
            printed = self._log.read_text(errors="replace").strip()[-500:]
            raise SandboxError(
                f"sandbox worker {self.name} didn't start ({error or 'no answer'}): {printed or 'it printed nothing'}"
            ) from error
        except BaseException:
            await self.kill()  # cancelled: a half-started worker must not look like a running one
            raise

    async def run(self, request: Mapping[str, Any], *, stdin: bytes, stdout: Sink, stderr: Sink | None, timeout_s: float) -> RunReport:
        """Run one command.

        Args:
            request: Fields of ``warm/isolate.enter`` and ``warm/server.run_agent``.
            stdin: What the command reads.
            stdout, stderr: Where its output goes; ``stderr=None`` sends both to ``stdout`` as they come.
            timeout_s: Seconds from the moment the box is ready.

        Raises:
            SandboxError: The machinery failed. The worker is dead then.
        """
        requests, group = self._requests, self._group
        assert requests is not None, "a worker is started before it runs something"
        assert group is not None
        before = self._evidence
        payload = json.dumps(request).encode()
        if len(payload) > MAX_REQUEST_BYTES:
            raise SandboxError(f"the command line has {len(payload)} bytes, at most {MAX_REQUEST_BYTES} can be passed")
        streams = [OutputStream(stdout)] + ([OutputStream(stderr)] if stderr is not None else [])
        delta = -1
        try:
            input_fd = input_descriptor(stdin)
            try:
                socket.send_fds(requests, [payload], [input_fd, streams[0].write_fd, streams[-1].write_fd])
                self._number += 1
            finally:
                close_all([input_fd])
                for stream in streams:
                    stream.close_write()
            delta, timed_out, end, duration_s = await self._follow(timeout_s)
            for stream in streams:
                await stream.finish()
            self._evidence = group.evidence()
            return RunReport(
                status=end.get("status"),
                timed_out=timed_out,
                before=before,
                after=self._evidence,
                delta_fd=delta,
                duration_s=duration_s,
                cpu_s=float(end.get("cpu_s", 0.0)),
            )
        except _WorkerGone as gone:
            after = _last_evidence(group, before)
            close_all([delta] if delta >= 0 else [])
            await self.kill()
            report = RunReport(status=None, timed_out=False, before=before, after=after, delta_fd=-1, duration_s=gone.duration_s)
            if gone.was_ready and report.is_out_of_memory:
                return report  # the run's memory took the warm parent with it: the run's doing, by the kernel's own count
            raise SandboxError(f"sandbox worker {self.name} died: {gone}", retryable=True) from None
        except BaseException:
            close_all([delta] if delta >= 0 else [])
            await self.kill()
            raise
        finally:
            for stream in streams:
                stream.close()

    def evidence(self) -> Evidence:
        """What the kernel has counted in the worker's groups so far; the last known counts if they are gone."""
        if self._group is not None:
            self._evidence = _last_evidence(self._group, self._evidence)
        return self._evidence

    async def hold(self, request: Mapping[str, Any], fds: list[int]) -> tuple[int, int]:
        """Start a run that stays up until the worker is killed; descriptors 0 to 2 of it are ``fds``.

        Returns:
            Descriptors of the directory with the workspace's changes and of the mounted workspace; the caller closes them.

        Raises:
            SandboxError: The box could not be set up.
        """
        assert self._requests is not None, "a worker is started before it runs something"
        socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
        try:
            message, received = await self._receive(SETUP_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"sandbox worker {self.name} set up no box within {SETUP_TIMEOUT_S} s", retryable=True) from None
        if message.get("kind") != "ready" or len(received) != 2:
            close_all(received)
            raise SandboxError(f"the box could not be set up: {message.get('error', message)}")
        return received[0], received[1]

    async def _follow(self, timeout_s: float) -> tuple[int, bool, dict[str, Any], float]:
        """Wait for ``ready``, then ``done``; kill at the deadline."""
        try:
            message, fds = await self._receive(SETUP_TIMEOUT_S)
        except TimeoutError:
            raise _WorkerGone(f"no answer within {SETUP_TIMEOUT_S} s of a request") from None
        delta = fds[0] if fds else -1
        ready = message.get("kind") == "ready"
        started = time.perf_counter()
        timed_out = False
        try:
            if message.get("kind") == "done":
                raise _WorkerGone("the box's first process ended before it was ready")
            try:
                end, more = await self._receive(timeout_s if ready else SETUP_TIMEOUT_S)
            except TimeoutError:
                timed_out = ready
                with contextlib.suppress(OSError, AttributeError):
                    self._control.send(b"kill %d" % self._number)  # type: ignore[union-attr]
                try:
                    end, more = await self._receive(KILL_TIMEOUT_S)
                except TimeoutError:
                    raise _WorkerGone(f"a run could not be killed within {KILL_TIMEOUT_S} s") from None
            close_all(more)
            if not ready:
                raise SandboxError(f"the box could not be set up: {message.get('error', message)}", retryable=False)
            return delta, timed_out, end, time.perf_counter() - started
        except BaseException as error:
            close_all([delta] if delta >= 0 else [])
            if isinstance(error, _WorkerGone):
                error.was_ready, error.duration_s = ready, time.perf_counter() - started
            raise

    async def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Next message of the warm parent; ``TimeoutError`` without one."""
        # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the result.
        async with asyncio.timeout(timeout_s):
            return await self._next_message()

    async def _next_message(self) -> tuple[dict[str, Any], list[int]]:
        control = self._control
        if control is None:
            raise _WorkerGone("it was stopped")
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
            except BlockingIOError:
                await _readable(loop, control.fileno())
                continue
            except OSError as error:
                raise _WorkerGone(str(error)) from error
            if not data:
                raise _WorkerGone("its socket closed")
            return json.loads(data), fds

    async def kill(self) -> None:
        """Kill the worker and everything inside, and wait until it is gone. Idempotent."""
        control, process, group = self._control, self._process, self._group
        if self._requests is not None:
            self._requests.close()
        self._requests = self._control = self._process = self._group = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._drop_lifeline()
        if control is not None:
            await _drained(control)
            control.close()
        if group is not None:
            group.remove()

    def _drop_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class _WorkerGone(SandboxError):
    """The warm parent can't be talked to any more."""

    was_ready = False
    duration_s = 0.0


def _last_evidence(group: Group, before: Evidence) -> Evidence:
    """The counters of a worker that died; nothing new if its groups are gone already."""
    try:
        return group.evidence()
    except OSError:
        return before


async def _readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    future: asyncio.Future[None] = loop.create_future()
    done: Callable[[], None] = lambda: None if future.done() else future.set_result(None)  # noqa: E731
    loop.add_reader(fd, done)
    try:
        await future
    finally:
        loop.remove_reader(fd)


async def _drained(control: socket.socket) -> None:
    """Wait (bounded) until the other end is closed: the warm parent, and with it its process namespace, is dead."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            data, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
        except BlockingIOError:
            await asyncio.sleep(0.002)
            continue
        except OSError as error:
            if error.errno == errno.ECONNRESET:
                return
            raise
        close_all(fds)
        if not data:
            return
