"""Starts boxes in containers of a docker daemon on this machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import Egress, SandboxCapabilities
from strop.sandboxes import ownership
from strop.sandboxes.absorb import ROOT_OPAQUE
from strop.sandboxes.archive import unpack
from strop.sandboxes.bytecode import layer_of
from strop.sandboxes.docker.box import DockerSandbox
from strop.sandboxes.docker.container import LABEL, Container, Daemon
from strop.sandboxes.docker.mount import Workspace, unmount_stale
from strop.sandboxes.docker.warden import warden
from strop.sandboxes.egress import Networks
from strop.sandboxes.egress.gateway import EgressEvent
from strop.sandboxes.layer import DIRECTORY, FILE, LINK, BaseTree, Layer
from strop.sandboxes.live import LiveView
from strop.sandboxes.outer import AGENT_UID
from strop.sandboxes.safepath import read_regular

DEFAULT_IMAGE = "strop-box:latest"
IMAGE_VARIABLE = "STROP_DOCKER_IMAGE"
DEFAULT_HOST = "unix:///var/run/docker.sock"
API_TIMEOUT_S = 300
_MAX_BASE_FILE_BYTES = 1 << 30
_OWNER = (AGENT_UID, AGENT_UID)


class DockerProvider:
    """Starts boxes; see ``ports.SandboxProvider``.

    Args:
        config: Limits, and how many boxes run something at the same time.
        image: The containers' image; it needs a POSIX shell, and Python for ``run_python``. Default: ``$STROP_DOCKER_IMAGE``, else
            ``strop-box:latest``, which ``python -m strop.sandboxes.docker.rootfs`` makes.
        host: The daemon, as ``$DOCKER_HOST``, which is the default; always a socket of this machine.
        parent_dir: Where the provider's directory is made; default: a directory of this user in the system's temporary directory.

    Raises:
        SandboxError: The client library, the daemon or the image isn't there, or strop doesn't run as root.
    """

    def __init__(
        self, config: SandboxConfig | None = None, *, image: str | None = None, host: str | None = None, parent_dir: str | None = None
    ) -> None:
        self.config = config or SandboxConfig()
        self._image = image or os.environ.get(IMAGE_VARIABLE) or DEFAULT_IMAGE
        if os.geteuid() != 0:
            raise SandboxError(
                "the docker back end must run as root on the daemon's machine: it mounts workspaces and reads control groups itself "
                "(membership in the docker group amounts to the same); run strop as root, or use the bubblewrap back end"
            )
        self._daemon = _connect(host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST, self._image)
        self._warden = warden()
        home = Path(parent_dir) if parent_dir else Path(tempfile.gettempdir()) / f"strop-docker-{os.getuid()}"
        unmount_stale(home)
        self._root = ownership.create_root(str(home))
        _remove_stale_containers(self._daemon.api)
        self._networks = Networks()
        self._bases: dict[str, tuple[BaseTree, list[Path]]] = {}
        self._boxes: dict[str, DockerSandbox] = {}
        self._next_box = 0
        self._slots = asyncio.Semaphore(self.config.workers)
        self._closed = False

    @property
    def capabilities(self) -> SandboxCapabilities:
        """What works with this daemon, and why the rest doesn't."""
        missing = {"warm_runner": "run_python starts a fresh interpreter of the image"}
        return SandboxCapabilities(
            network_isolation=True,
            memory_limit=True,
            process_limit=True,
            kernel_evidence=True,
            warm_runner=False,
            snapshots=True,
            missing=missing | self._networks.missing,
            shells=True,
            egress=self._networks.modes,
        )

    @property
    def directory(self) -> Path:
        """This provider's own directory; gone after ``close``."""
        return self._root

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Room for one running command."""
        return self._slots  # type: ignore[return-value]

    async def start(self, base: str, *, snapshot: bytes | None = None, egress: Egress | None = None) -> DockerSandbox:
        """Start a box over the directory ``base``; see ``ports.SandboxProvider.start``.

        Raises:
            SandboxError: The base, the snapshot or the egress mode can't be used, or the daemon refused.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        egress = self._networks.check(egress)
        tree, lower = self._base(base)
        self._next_box += 1
        name = f"b{self._next_box}"
        root = self._root / name
        root.mkdir(mode=0o700)
        limit, held = self.config.disk_mb << 20, 0
        try:
            if snapshot is not None:
                (root / "snapshot").mkdir()
                os.chown(root / "snapshot", *_OWNER)
                layer = Layer(tree, root / "snapshot", limit, _OWNER)
                try:
                    unpack(layer, snapshot)
                    held = len(layer.index)
                finally:
                    layer.close()
                lower = [root / "snapshot", *lower]
            below = len(tree.entries) + held
            workspace = Workspace.mount(root, lower, disk_bytes=limit, below=below, owner=AGENT_UID)
            try:
                container = await self._start_container(root, workspace, egress)
            except BaseException:
                workspace.unmount()
                raise
        except BaseException:
            ownership.remove_tree(root)
            raise

        def begin(place: Path) -> Layer:
            made = Layer(tree, place, limit)
            if snapshot is not None:
                unpack(made, snapshot)
            return made

        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        upper, merged = os.open(workspace.upper, flags), os.open(workspace.place, flags)
        view = LiveView(begin, root / "view", upper, merged, _OWNER, ROOT_OPAQUE)
        box = DockerSandbox(self, name, base, egress, container, workspace, view)
        self._boxes[name] = box
        return box

    async def _start_container(self, root: Path, workspace: Workspace, egress: Egress | None) -> Container:
        gateway = None if egress is None else await self._networks.gateway(egress)
        link, resolver = 0, None
        if gateway is not None:
            link, resolver = gateway.reserve(), root / "resolv.conf"
            resolver.write_text(f"nameserver {gateway.name_server(link)}\n")
            resolver.chmod(0o644)
        container = await Container.start(self._daemon, self._image, workspace.place, self._warden, self.config, resolver=resolver)
        if gateway is not None:
            try:
                network = os.open(f"/proc/{container.init}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    gateway.attach(link, network)
                finally:
                    os.close(network)
            except BaseException:
                await container.remove()
                raise
        return container

    def _base(self, base: str) -> tuple[BaseTree, list[Path]]:
        """The base's listing, and its lower directories: a copy that belongs to the boxes' user, and its compiled code if there is any."""
        found = self._bases.get(base)
        if found is None:
            try:
                tree = BaseTree.scan(os.path.realpath(base))
            except OSError as error:
                raise SandboxError(f"base directory {base!r} can't be used: {error.strerror}") from error
            copy = self._root / f"base{len(self._bases)}"
            _copy_tree(tree, copy)
            compiled = layer_of(tree.path)
            found = self._bases[base] = (tree, [copy, *([Path(compiled)] if compiled else [])])
        return found

    def egress_events(self) -> list[EgressEvent]:
        """The last connections that boxes tried to make, and why they were refused."""
        return self._networks.events()

    def forget(self, name: str) -> None:
        """A box has stopped."""
        self._boxes.pop(name, None)

    async def close(self) -> None:
        """Stop every box and remove all files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for box in list(self._boxes.values()):
            await box.stop()
        await self._networks.close()
        for tree, _ in self._bases.values():
            os.close(tree.fd)
        self._bases.clear()
        ownership.release_root(self._root)
        self._daemon.api.close()


def _connect(host: str, image: str) -> Daemon:
    try:
        import docker
        import docker.errors
    except ImportError as error:
        raise SandboxError("the docker back end needs its client library; install it with: pip install 'strop[docker]'") from error
    if not host.startswith("unix://"):
        raise SandboxError(f"docker daemon {host!r} must be a socket of this machine, unix:///PATH; set DOCKER_HOST")
    try:
        api: Any = docker.APIClient(base_url=host, version="auto", timeout=API_TIMEOUT_S)
        api.inspect_image(image)
    except docker.errors.ImageNotFound as error:
        hint = "make the default one with: python -m strop.sandboxes.docker.rootfs"
        raise SandboxError(f"the docker daemon at {host} has no image {image!r}; {hint}") from error
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxError(f"no docker daemon answers at {host}: {error}; start one, or name it with DOCKER_HOST") from error
    return Daemon(api=api, socket_path=host.removeprefix("unix://"))


def _remove_stale_containers(api: Any) -> None:
    """Containers of owners that are dead, should the daemon have been down when they died."""
    for found in api.containers(all=True, filters={"label": LABEL}):
        if ownership.is_dead(found["Labels"][LABEL]):
            with suppress(Exception):
                api.remove_container(found["Id"], v=True, force=True)


def _copy_tree(tree: BaseTree, target: Path) -> None:
    target.mkdir()
    os.chown(target, *_OWNER)
    directories = [""]
    for path in sorted(tree.entries):
        entry, place = tree.entries[path], target / path
        if entry.kind == DIRECTORY:
            place.mkdir(mode=0o700)
            directories.append(path)
        elif entry.kind == FILE:
            place.write_bytes(read_regular(tree.fd, path, _MAX_BASE_FILE_BYTES))
            place.chmod(entry.mode | 0o600)
            os.utime(place, (entry.mtime_s, entry.mtime_s))
        elif entry.kind == LINK:
            place.symlink_to(os.readlink(path, dir_fd=tree.fd))
        else:
            continue
        os.chown(place, *_OWNER, follow_symlinks=False)
    for path in directories[1:]:
        (target / path).chmod(tree.entries[path].mode | 0o700)
