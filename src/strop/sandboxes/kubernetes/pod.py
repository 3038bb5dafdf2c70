"""One pod: started, commands in it, and its end. Every method blocks; callers use threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.core.errors import SandboxError
from strop.sandboxes.cgroups import Evidence
from strop.sandboxes.docker.container import status_of
from strop.sandboxes.kubernetes.manifests import WARDEN
from strop.sandboxes.output import CappedBytes
from strop.sandboxes.streams import Sink

START_TIMEOUT_S = 300.0
HELPER_TIMEOUT_S = 120.0
_HEARTBEAT_S = 60.0
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_PIECE = 1 << 16
_HOPELESS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster's API and the namespace that boxes live in; ``stream`` is the client library's function of that name."""

    api: Any
    namespace: str
    stream: Callable[..., Any]


class Pod:
    """A running pod. Made by ``start``; it ends with ``delete``, and when this process is gone."""

    def __init__(self, cluster: Cluster, name: str, lifeline: Any) -> None:
        self._cluster = cluster
        self.name = name
        self._lifeline = lifeline
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._keep_alive, daemon=True)
        self._beat.start()

    @classmethod
    def start(cls, cluster: Cluster, manifest: dict[str, Any]) -> Pod:
        """Create a pod and wait until it runs.

        Raises:
            SandboxError: The cluster refused, or it didn't come up in time; nothing is left.
        """
        name = manifest["metadata"]["name"]
        try:
            cluster.api.create_namespaced_pod(cluster.namespace, manifest)
            try:
                _wait_until_running(cluster, name)
                lifeline = cluster.stream(
                    cluster.api.connect_get_namespaced_pod_attach,
                    name,
                    cluster.namespace,
                    container="box",
                    stdin=True,
                    stdout=False,
                    stderr=False,
                    tty=False,
                    _preload_content=False,
                )
            except BaseException:
                with contextlib.suppress(Exception):
                    cluster.api.delete_namespaced_pod(name, cluster.namespace, grace_period_seconds=0)
                raise
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxError(f"pod {name} can't be started: {error}", retryable=True, ids={"pod": name}) from error
        return cls(cluster, name, lifeline)

    def _keep_alive(self) -> None:
        # A node closes streams that stay silent for hours; the pod's first process throws the bytes away.
        while not self._ended.wait(_HEARTBEAT_S):
            with contextlib.suppress(Exception):
                self._lifeline.write_stdin("\n")

    def run(self, argv: Sequence[str], *, stdin: bytes, stdout: Sink, timeout_s: float) -> tuple[int | None, bool]:
        """Run a command under the warden; what is left of it is killed before this returns.

        Returns:
            Its wait status (``None`` if it never reported one), and whether the time was up.

        Raises:
            SandboxError: The cluster failed.
        """
        report, timed_out = self._exec([WARDEN, "run", *argv], stdin=stdin, stdout=stdout, timeout_s=timeout_s)
        self._exec([WARDEN, "sweep"], stdin=b"", stdout=CappedBytes(0), timeout_s=HELPER_TIMEOUT_S)
        return status_of(report), timed_out

    def helper(self, argv: Sequence[str], *, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        """Run a program of the image for strop's own ends and return what it prints.

        Raises:
            SandboxError: It failed, or printed more than ``limit`` bytes.
        """
        kept = CappedBytes(limit)
        report, timed_out = self._exec([WARDEN, "run", *argv], stdin=stdin, stdout=kept, timeout_s=HELPER_TIMEOUT_S)
        if timed_out or status_of(report) != 0 or kept.truncated:
            what = "ran out of time" if timed_out else f"ended with wait status {status_of(report)}"
            raise SandboxError(f"{argv[0]} in pod {self.name} {what}: {kept.value()[-300:]!r}", retryable=True, ids={"pod": self.name})
        return kept.value()

    def evidence(self) -> Evidence:
        """The kernel's counters of the pod's control group (version 2), as the kernel shows them inside."""
        counters = {}
        for line in self.helper(["cat", "/sys/fs/cgroup/memory.events"]).decode(errors="replace").splitlines():
            name, _, value = line.partition(" ")
            counters[name] = int(value) if value.isdigit() else 0
        return Evidence(oom_kills=counters.get("oom_kill", 0), limit_hits=counters.get("oom", 0))

    def _exec(self, argv: Sequence[str], *, stdin: bytes, stdout: Sink, timeout_s: float) -> tuple[bytes, bool]:
        """Return what the command printed on its stderr, which only the warden holds, and whether the time was up."""
        try:
            client = self._cluster.stream(
                self._cluster.api.connect_get_namespaced_pod_exec,
                self.name,
                self._cluster.namespace,
                container="box",
                command=list(argv),
                stdin=bool(stdin),
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
            )
        except Exception as error:
            raise SandboxError(f"a command can't be started in pod {self.name}: {error}", retryable=True, ids={"pod": self.name}) from error
        try:
            return self._follow(client, stdin, stdout, time.monotonic() + timeout_s)
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxError(f"the stream of pod {self.name} broke: {error}", retryable=True, ids={"pod": self.name}) from error
        finally:
            with contextlib.suppress(Exception):
                client.close()

    def _follow(self, client: Any, stdin: bytes, stdout: Sink, deadline: float) -> tuple[bytes, bool]:
        report, view = b"", memoryview(stdin)
        while client.is_open():
            if view:
                client.write_channel(_STDIN, bytes(view[:_PIECE]))
                view = view[_PIECE:]
                if not view:
                    client.close_channel(_STDIN)
            client.update(timeout=0 if view else 0.2)
            stdout.feed(client.read_channel(_STDOUT))
            report += client.read_channel(_STDERR)
            if status_of(report) is not None or time.monotonic() > deadline:
                break
        # What the pipe still holds came before the report; whoever else holds it is killed by the sweep.
        client.update(timeout=0)
        stdout.feed(client.read_channel(_STDOUT), final=True)
        return report, status_of(report) is None and time.monotonic() > deadline

    def delete(self) -> None:
        """Delete the pod without waiting for its end. Idempotent."""
        self._ended.set()
        with contextlib.suppress(Exception):
            self._lifeline.close()
        try:
            self._cluster.api.delete_namespaced_pod(self.name, self._cluster.namespace, grace_period_seconds=0)
        except Exception as error:
            if getattr(error, "status", None) != 404:
                raise SandboxError(f"pod {self.name} can't be deleted: {error}", retryable=True, ids={"pod": self.name}) from error


def _wait_until_running(cluster: Cluster, name: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        status = cluster.api.read_namespaced_pod_status(name, cluster.namespace).status
        containers = status.container_statuses or []
        reason = next((item.state.waiting.reason for item in containers if item.state.waiting is not None), "")
        if status.phase == "Running":
            return
        if status.phase in ("Failed", "Succeeded") or reason in _HOPELESS or time.monotonic() > deadline:
            raise SandboxError(f"pod {name} didn't start: phase {status.phase}, {reason or status.reason or 'no reason given'}")
        time.sleep(0.1)
