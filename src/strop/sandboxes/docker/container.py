"""One container: started over a mounted workspace, commands in it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.sandboxes.docker.group import ContainerGroup
from strop.sandboxes.docker.profile import profile
from strop.sandboxes.docker.stream import STDERR, STDOUT, Attached
from strop.sandboxes.outer import AGENT_UID, ENVIRONMENT
from strop.sandboxes.ownership import identity
from strop.sandboxes.streams import Sink
from strop.sandboxes.worker import RunReport

LABEL = "strop.owner"
OPEN_FILES = 256
WARDEN = "/.strop-warden"
READY = b"ready\n"
_START_TIMEOUT_S = 120.0
_DRAIN_TIMEOUT_S = 60.0
_OWN_PROCESSES = 2  # the container's first process and the one that reports a command's status


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """A docker daemon on this machine: the client library's low-level interface, and the socket that it uses."""

    api: Any
    socket_path: str

    def url(self, path: str) -> str:
        """Path of a request, with the version that the client library settled on."""
        return f"/v{self.api.api_version}{path}"


class Container:
    """A running container. Made by ``start``; ``remove`` ends it, and so does the end of this process."""

    def __init__(self, daemon: Daemon, name: str, lifeline: Attached, group: ContainerGroup, init: int) -> None:
        self._daemon = daemon
        self._name = name
        self._lifeline = lifeline
        self.group = group
        self.init = init

    @classmethod
    async def start(
        cls, daemon: Daemon, image: str, workspace: Path, warden: Path, config: SandboxConfig, *, resolver: Path | None
    ) -> Container:
        """Create and start a container.

        Args:
            daemon: Where.
            image: Its image.
            workspace: Mounted workspace on this host.
            warden: The compiled warden.
            config: Limits.
            resolver: A file for /etc/resolv.conf, for a box with a way out.

        Raises:
            SandboxError: The daemon refused, for example because it has no such image.
        """
        settings = _settings(daemon.api, workspace, warden, config, resolver)
        name, lifeline = "", None
        try:
            wanted = {"Image": image, **settings}
            creating = asyncio.create_task(asyncio.to_thread(daemon.api.create_container_from_config, wanted))
            try:
                name = (await asyncio.shield(creating))["Id"]
            except asyncio.CancelledError:
                name = (await creating)["Id"]  # the daemon makes it all the same, so that it has to be removed
                raise
            # The first process lives for as long as this process holds its stdin.
            attaching = asyncio.create_task(Attached.open(daemon.socket_path, daemon.url(f"/containers/{name}/attach?stream=1&stdin=1")))
            try:
                await asyncio.to_thread(daemon.api.start, name)
            finally:
                lifeline = await attaching
            init = (await asyncio.to_thread(daemon.api.inspect_container, name))["State"]["Pid"]
            return cls(daemon, name, lifeline, ContainerGroup(init, config.memory_mb << 20), init)
        except BaseException as error:
            if lifeline is not None:
                lifeline.close()
            if name:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(daemon.api.remove_container, name, v=True, force=True)
            if isinstance(error, SandboxError) or not isinstance(error, Exception):
                raise
            raise SandboxError(f"a container of image {image!r} can't be started: {_text(error)}") from error

    async def attach_exec(self, argv: Sequence[str], *, stdin: bool) -> tuple[str, Attached]:
        """Start a command under the warden and return its id and stream.

        Raises:
            SandboxError: The daemon refused.
        """
        try:
            made = await asyncio.to_thread(self._daemon.api.exec_create, self._name, [WARDEN, "run", *argv], stdin=stdin)
        except Exception as error:
            raise SandboxError(f"a command can't be started in a container: {_text(error)}", retryable=True) from error
        url = self._daemon.url(f"/exec/{made['Id']}/start")
        return made["Id"], await Attached.open(self._daemon.socket_path, url, {"Detach": False, "Tty": False})

    async def family_of(self, exec_id: str) -> list[int]:
        """Process ids on this host of a command that waits for its stdin: its warden, and the child of that.

        Raises:
            SandboxError: It ended.
        """
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self._daemon.api.exec_inspect, exec_id)
            pid = found["Pid"]
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if pid else []
                if children:
                    return [pid, *map(int, children)]
            await asyncio.sleep(0.005)
        raise SandboxError(f"a shell didn't start within {_DRAIN_TIMEOUT_S} s", retryable=True)

    async def run(self, argv: Sequence[str], *, stdin: bytes, stdout: Sink, timeout_s: float) -> RunReport:
        """Run a command; everything that it started, but for an open shell, is dead when this returns.

        Raises:
            SandboxError: The container is gone, or the daemon failed.
        """
        before = self.group.evidence()
        _, stream = await self.attach_exec(argv, stdin=bool(stdin))
        ready = asyncio.Event()
        feeding = asyncio.create_task(_feed(stream, stdin))
        following = asyncio.create_task(_follow(stream, stdout, ready))
        try:
            await _until_ready(ready, following)
            started = time.perf_counter()
            done, _ = await asyncio.wait({following}, timeout=timeout_s)
            # The report of its status ends a command; whoever still holds its output pipe is killed now.
            timed_out = not done
            status = following.result() if done else None
            await self.group.kill_rest()
            await _drain(stream, stdout, following)
        except BaseException:
            await asyncio.shield(self._abandon(ready, following))
            raise
        finally:
            for task in (feeding, following):
                task.cancel()
            await asyncio.gather(feeding, following, return_exceptions=True)
            stream.close()
        stdout.feed(b"", final=True)
        after = self.group.evidence()
        # Without a report although time wasn't up, the warden itself was killed: by the command, which has the same user, or for memory.
        status = 9 if status is None and not timed_out else status
        spent = time.perf_counter() - started
        return RunReport(status=status, timed_out=timed_out, before=before, after=after, delta_fd=-1, duration_s=spent)

    async def _abandon(self, ready: asyncio.Event, following: asyncio.Task[int | None]) -> None:
        """Kill a command whose result nobody wants. One that the daemon has yet to start can't be killed before it has."""
        with contextlib.suppress(SandboxError):
            await _until_ready(ready, following)
        await self.group.kill_rest()

    async def remove(self) -> None:
        """Kill the container and wait until the daemon has removed it. Idempotent."""
        self._lifeline.close()
        await asyncio.to_thread(_remove, self._daemon.api, self._name)


async def _feed(stream: Attached, data: bytes) -> None:
    if data:
        with contextlib.suppress(OSError):
            await stream.send(data, end=True)


async def _until_ready(ready: asyncio.Event, following: asyncio.Task[int | None]) -> None:
    """Wait until a command runs, or its stream has ended: the daemon answers long before it has started anything."""
    waiting = asyncio.create_task(ready.wait())
    try:
        done, _ = await asyncio.wait({waiting, following}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if not done:
        raise SandboxError(f"the daemon didn't start a command within {_START_TIMEOUT_S} s", retryable=True)


async def _follow(stream: Attached, stdout: Sink, ready: asyncio.Event) -> int | None:
    """Read frames until the warden reports; return the wait status, or ``None`` if the stream ended without."""
    report = b""
    while True:
        source, data = await stream.frame()
        if source == STDOUT:
            stdout.feed(data)
        elif source == STDERR:
            report += data[:64]
            if report.startswith(READY):
                ready.set()
            if (status := status_of(report)) is not None:
                return status
        else:
            return None


def status_of(report: bytes) -> int | None:
    """The wait status in what a warden has said so far, or ``None``."""
    text = report.removeprefix(READY)
    return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None


async def _drain(stream: Attached, stdout: Sink, following: asyncio.Task[int | None]) -> None:
    """What is still in the pipes; all writers are dead."""
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            if not following.done():
                await following
            while True:
                source, data = await stream.frame()
                if source == STDOUT:
                    stdout.feed(data)
                elif source == 0:
                    return
    except TimeoutError:
        raise SandboxError(f"the daemon didn't end the output of a dead command within {_DRAIN_TIMEOUT_S} s", retryable=True) from None


def _remove(api: Any, name: str) -> None:
    import docker.errors

    for _ in range(200):
        try:
            api.remove_container(name, v=True, force=True)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code != 409:  # the daemon is removing it already, since its first process has ended
                raise SandboxError(f"a container can't be removed: {_text(error)}") from error
        time.sleep(0.01)


def _settings(api: Any, workspace: Path, warden: Path, config: SandboxConfig, resolver: Path | None) -> dict[str, Any]:
    mounts = [
        {"Type": "bind", "Source": str(workspace), "Target": "/workspace", "BindOptions": {"Propagation": "rprivate"}},
        {"Type": "bind", "Source": str(warden), "Target": WARDEN, "ReadOnly": True},
    ]
    if resolver is not None:
        mounts.append({"Type": "bind", "Source": str(resolver), "Target": "/etc/resolv.conf", "ReadOnly": True})
    memory, disk = config.memory_mb << 20, config.disk_mb << 20
    limits = {"nofile": OPEN_FILES, "core": 0, "fsize": disk, "memlock": 1 << 20}
    host = api.create_host_config(
        auto_remove=True,
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", f"seccomp={profile()}"],
        read_only=True,
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=config.processes + _OWN_PROCESSES,
        ulimits=[{"Name": name, "Soft": value, "Hard": value} for name, value in limits.items()],
        tmpfs={"/tmp": f"rw,nosuid,nodev,mode=1777,size={disk}"},
        shm_size=disk,
        ipc_mode="private",
        log_config={"Type": "none"},
    )
    host["Mounts"] = mounts
    return {
        "HostConfig": host,
        "Entrypoint": [WARDEN, "init"],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "User": f"{AGENT_UID}:{AGENT_UID}",
        "WorkingDir": "/workspace",
        "Hostname": "box",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "Labels": {LABEL: identity()},
        "StopSignal": "SIGKILL",
    }


def _text(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error)
