"""Starts boxes in pods of a cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import Egress, ExecResult, SandboxCapabilities
from strop.sandboxes import ownership
from strop.sandboxes.archive import unpack
from strop.sandboxes.box import LayeredBox, check_command
from strop.sandboxes.docker.warden import warden
from strop.sandboxes.kubernetes import manifests
from strop.sandboxes.kubernetes.pod import Cluster, Pod
from strop.sandboxes.kubernetes.tree import archive_of, archive_of_file, differences
from strop.sandboxes.layer import BaseTree, Layer
from strop.sandboxes.output import CappedText
from strop.sandboxes.shell import ShellSession
from strop.sandboxes.verdict import judge
from strop.sandboxes.worker import RunReport

IMAGE_VARIABLE, NAMESPACE_VARIABLE = "STROP_KUBERNETES_IMAGE", "STROP_KUBERNETES_NAMESPACE"
MISSING = {
    "network_isolation": "a policy that denies all traffic is made, but only the cluster's network plug-in can enforce it",
    "process_limit": "the number of processes in a pod is a setting of the node (podPidsLimit)",
    "call_filter": "the container runtime's own filter holds, which lets some foreign socket families through",
    "host_processes": "processes of a pod can't be looked for on this machine",
    "open_files": "the number of open files is a setting of the node's container runtime",
    "shells": "what a command leaves is killed by a sweep of the whole pod, which would take a shell with it",
    "warm_runner": "run_python starts a fresh interpreter of the image",
    "egress_allowlist": "a gateway needs the node's network namespaces; use a network policy of the cluster",
    "egress_public": "the policy denies all traffic",
}


class KubernetesProvider:
    """Starts boxes; see ``ports.SandboxProvider``. Not run here: see the package.

    Args:
        config: Limits, and how many boxes run something at the same time.
        image: The pods' image; it needs tar and a POSIX shell, and Python for ``run_python``. Default: ``$STROP_KUBERNETES_IMAGE``.
        namespace: Default: ``$STROP_KUBERNETES_NAMESPACE``, else ``default``.
        api: A ready ``CoreV1Api``; default: from the kubeconfig, or from inside a pod.

    Raises:
        SandboxError: The client library, the cluster or the image's name is missing, or the cluster refuses what boxes need.
    """

    def __init__(
        self, config: SandboxConfig | None = None, *, image: str | None = None, namespace: str | None = None, api: Any = None
    ) -> None:
        self.config = config or SandboxConfig()
        self._image = image or os.environ.get(IMAGE_VARIABLE) or ""
        if not self._image:
            raise SandboxError(f"the kubernetes back end needs an image that the cluster can pull; name it with {IMAGE_VARIABLE}")
        self._cluster = _connect(api, namespace or os.environ.get(NAMESPACE_VARIABLE) or "default")
        helper = manifests.warden_map(warden())
        self._config_map = helper["metadata"]["name"]
        _ensure(lambda: self._cluster.api.create_namespaced_config_map(self._cluster.namespace, helper), "a config map")
        if api is None:
            _ensure_policy(self._cluster.namespace)
        self._root = ownership.create_root()
        self._bases: dict[str, BaseTree] = {}
        self._boxes: dict[str, KubernetesSandbox] = {}
        self._slots = asyncio.Semaphore(self.config.workers)

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What works with a cluster, and why the rest doesn't."""
        return SandboxCapabilities(
            network_isolation=False,
            memory_limit=True,
            process_limit=False,
            kernel_evidence=True,
            warm_runner=False,
            snapshots=True,
            missing=MISSING,
        )

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> KubernetesSandbox:
        """Start a box over the directory ``base``; see ``ports.SandboxProvider.start``."""
        if egress is not None and egress.mode != "none":
            raise SandboxError(f"egress {egress.mode!r} can't be had from this back end: {MISSING[f'egress_{egress.mode}']}")
        tree = self._base(base)
        name = f"strop-{secrets.token_hex(6)}"
        place = self._root / name
        place.mkdir(mode=0o700)
        layer = Layer(tree, place, self.config.disk_mb << 20)
        try:
            if snapshot is not None:
                unpack(layer, snapshot)
            manifest = manifests.pod(name, self._image, self._config_map, self.config, ownership.identity())
            pod = await asyncio.to_thread(Pod.start, self._cluster, manifest)
            try:
                await asyncio.to_thread(pod.helper, ["tar", "-xf", "-", "-C", "/workspace"], stdin=archive_of(tree, layer))
            except BaseException:
                await asyncio.to_thread(pod.delete)
                raise
        except BaseException:
            layer.close()
            ownership.remove_tree(place)
            raise
        box = self._boxes[name] = KubernetesSandbox(self, name, base, pod, layer)
        return box

    def _base(self, base: str) -> BaseTree:
        if base not in self._bases:
            try:
                self._bases[base] = BaseTree.scan(os.path.realpath(base))
            except OSError as error:
                raise SandboxError(f"base directory {base!r} can't be used: {error.strerror}") from error
        return self._bases[base]

    def new_layer(self, like: Layer) -> Layer:
        """An empty layer over the same base, in a directory of its own."""
        place = self._root / f"copy-{secrets.token_hex(6)}"
        place.mkdir(mode=0o700)
        return Layer(like.base, place, like.limit_bytes)

    def slot(self) -> asyncio.Semaphore:
        """Room for one running command."""
        return self._slots

    def forget(self, name: str) -> None:
        """A box has stopped."""
        self._boxes.pop(name, None)

    async def close(self) -> None:
        """Delete every pod and all files. Idempotent."""
        for box in list(self._boxes.values()):
            await box.stop()
        for tree in self._bases.values():
            os.close(tree.fd)
        self._bases.clear()
        ownership.release_root(self._root)


class KubernetesSandbox(LayeredBox):
    """One box; see ``ports.Sandbox``. Its layer is a copy of what the pod differs in, renewed after every command."""

    def __init__(self, provider: KubernetesProvider, name: str, base: str, pod: Pod, layer: Layer) -> None:
        super().__init__(provider, name, base, None)
        self._provider = provider
        self._pod = pod
        self._layer = layer
        self._is_stale = False

    def _now(self) -> Layer:
        if self._is_stale:
            limit = self._layer.limit_bytes + sum(entry.size for entry in self._layer.base.entries.values()) + (64 << 20)
            archive = self._pod.helper(["/bin/sh", "-c", "tar -cf - -C /workspace . 2>/dev/null; true"], limit=limit)
            fresh = self._provider.new_layer(self._layer)
            try:
                self.entries_dropped = differences(fresh, archive)
            except BaseException:
                _drop(fresh)
                raise
            old, self._layer = self._layer, fresh
            _drop(old)
            self._is_stale = False
        return self._layer

    def write(self, path: str, content: bytes | None) -> None:
        """Create, replace or delete a file; see ``ports.Sandbox.write``. Blocks for a round trip to the cluster."""
        self._check_open()
        layer = self._now()
        super().write(path, content)
        parts = [part for part in path.split("/") if part not in ("", ".")]
        name = "/".join(parts)
        self._pod.helper(["rm", "-f", "--", f"/workspace/{name}"])
        if content is not None:
            parents = ["/".join(parts[:end]) for end in range(1, len(parts))]
            new = [parent for parent in parents if parent not in layer.base.entries]
            data = archive_of_file(name, content, layer.index[name].mode, new)
            self._pod.helper(["tar", "-xf", "-", "-C", "/workspace"], stdin=data)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        """Run a command in the box; see ``ports.Sandbox.exec``."""
        check_command(argv)
        async with self._busy, self._provider.slot():
            self._check_open()
            output = CappedText()
            loop = asyncio.get_running_loop()
            before, started = await asyncio.to_thread(self._pod.evidence), loop.time()
            self._is_stale = True
            status, timed_out = await asyncio.to_thread(self._pod.run, argv, stdin=stdin, stdout=output, timeout_s=timeout_s)
            spent, after = loop.time() - started, await asyncio.to_thread(self._pod.evidence)
            status = 9 if status is None and not timed_out else status  # the command killed its own reporter, which has the same user
            report = RunReport(status=status, timed_out=timed_out, before=before, after=after, delta_fd=-1, duration_s=spent)
            exit_code, killed_by = judge(report)
            return ExecResult(exit_code=exit_code, output=output.text(), duration_s=spent, killed_by=killed_by)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """Run the image's Python in the box; see ``ports.Sandbox.run_python``. There is no warm runner here."""
        return await self.exec(["/bin/sh", "-c", 'exec "$(command -v python3)" "$@"', "sh", *argv], timeout_s=timeout_s)

    async def open_shell(self) -> ShellSession:
        """Not available; see ``MISSING``."""
        raise SandboxError(f"the kubernetes back end has no persistent shells: {MISSING['shells']}")

    async def _remove(self) -> None:
        await asyncio.to_thread(self._pod.delete)
        _drop(self._layer)


def _drop(layer: Layer) -> None:
    layer.close()
    ownership.remove_tree(Path(layer.directory))


def _connect(api: Any, namespace: str) -> Cluster:
    try:
        from kubernetes import client, config
        from kubernetes.stream import stream
    except ImportError as error:
        raise SandboxError("the kubernetes back end needs its client library; install it with: pip install 'strop[k8s]'") from error
    if api is None:
        try:
            try:
                config.load_incluster_config()
            except config.ConfigException:
                config.load_kube_config()
        except (config.ConfigException, OSError) as error:
            raise SandboxError(f"no cluster is configured: {error}; set KUBECONFIG") from error
        api = client.CoreV1Api()
    return Cluster(api=api, namespace=namespace, stream=stream)


def _ensure_policy(namespace: str) -> None:
    from kubernetes import client

    network: Any = client.NetworkingV1Api()
    _ensure(lambda: network.create_namespaced_network_policy(namespace, manifests.network_policy()), "a network policy")


def _ensure(create: Any, what: str) -> None:
    try:
        create()
    except Exception as error:
        if getattr(error, "status", None) != 409:  # there already
            raise SandboxError(f"the cluster refuses {what} that boxes need: {error}") from error
