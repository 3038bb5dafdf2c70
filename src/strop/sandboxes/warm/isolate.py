"""What a forked child does to itself before it touches agent code. Standard library only.

The child is process 1 of a new process namespace: when it ends, the kernel kills all that is left inside. Order matters:
everything that needs a capability first (mounts), then all capabilities go, then agent code runs.
"""

# pyright: reportMissingImports=false

import os
import resource
import struct
from typing import Any

import syscalls as sc

WORKSPACE, EXTRA, HOMES = "/workspace", "/mnt", "/home"
OUTER = "/run/box"
HOST, SCRATCH, DELTA = f"{OUTER}/host", f"{OUTER}/scratch", f"{OUTER}/delta"


def separate() -> None:
    """The part that needs no request, done ahead of it: own mount and IPC namespaces, and /proc of the own process namespace."""
    sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWIPC)
    # Read only, because its owner-writable files (sysctl) would otherwise be writable by a box started by root.
    sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC | sc.MS_RDONLY)


def enter(request: dict[str, Any]) -> int:
    """Build the box's view of the file system, after ``separate``.

    Args:
        request: ``layers`` (host directories, topmost first), ``writable``, ``extra`` (name under /mnt -> host path), ``disk_bytes``,
            ``inodes``, ``delta`` (name of a prepared directory on disk for changes, empty for memory), ``cwd``, and ``looks`` (see
            ``_disguise``).

    Returns:
        Descriptor of the directory that receives the workspace's changes, or -1 without one.
    """
    nosuid = sc.MS_NOSUID | sc.MS_NODEV
    sc.mount("tmpfs", SCRATCH, "tmpfs", nosuid, f"size={request['disk_bytes']},nr_inodes={request['inodes']},mode=0755")
    os.umask(0)
    os.mkdir(f"{SCRATCH}/tmp", 0o1777)
    os.mkdir(f"{SCRATCH}/shm", 0o1777)
    delta = _mount_workspace(request)
    # Bound directories keep nosuid and nodev of the mount they come from.
    sc.mount(f"{SCRATCH}/tmp", "/tmp", "", sc.MS_BIND)
    sc.mount(f"{SCRATCH}/shm", "/dev/shm", "", sc.MS_BIND)
    if request["extra"]:
        os.mkdir(f"{SCRATCH}/mnt", 0o755)
        for name, path in request["extra"].items():
            _mount_extra(f"{SCRATCH}/mnt/{name}", HOST + path)
        sc.mount(f"{SCRATCH}/mnt", EXTRA, "", sc.MS_BIND | sc.MS_REC)
    os.umask(0o022)
    _disguise(request.get("looks") or {})
    # One detach for all that the box must not see: each waits for the kernel's readers.
    sc.detach(OUTER)
    os.chdir(request["cwd"])
    return delta


def _disguise(looks: dict[str, Any]) -> None:
    """Give the box other looks: ``hostname``, ``uptime_s`` (in /proc/uptime), ``variables``, and the workspace at ``path`` as well."""
    if hostname := looks.get("hostname"):
        sc.unshare(sc.CLONE_NEWUTS)
        sc.set_hostname(hostname)
        _cover("/etc/hostname", f"{hostname}\n")
        _cover("/etc/hosts", f"127.0.0.1 localhost {hostname}\n::1 localhost\n")
    if uptime := looks.get("uptime_s"):
        _cover("/proc/uptime", f"{uptime:.2f} {uptime * os.cpu_count():.2f}\n")  # type: ignore[operator]
    os.environ.update(looks.get("variables") or {})
    if path := looks.get("path"):
        nosuid = sc.MS_NOSUID | sc.MS_NODEV
        sc.mount("tmpfs", HOMES, "tmpfs", nosuid, "size=64k,nr_inodes=16,mode=0755")
        os.makedirs(path)
        sc.mount(WORKSPACE, path, "", sc.MS_BIND)
        sc.mount("", HOMES, "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | nosuid)


def _cover(path: str, text: str) -> None:
    """Hide a file behind another one that only this run sees."""
    source = f"{SCRATCH}/looks-{path.replace('/', '-')}"
    with open(source, "w") as file:
        file.write(text)
    sc.bind(source, path, read_only=True)


def _mount_workspace(request: dict[str, Any]) -> int:
    # Layers are named by descriptor: no path of the host shows in the box's mount table, and no character needs escaping. They are
    # opened here because overlayfs takes only mounts of the caller's own mount namespace.
    opened = [_open_directory(HOST + path) for path in request["layers"]]
    lower = ":".join(f"/proc/self/fd/{fd}" for fd in opened)
    options = "userxattr"
    flags = sc.MS_NOSUID | sc.MS_NODEV
    delta = -1
    if request["writable"]:
        root = f"{DELTA}/{request['delta']}" if request["delta"] else SCRATCH
        if not request["delta"]:
            os.mkdir(f"{root}/upper", 0o755)
            os.mkdir(f"{root}/work", 0o755)
        delta, work = _open_directory(f"{root}/upper"), _open_directory(f"{root}/work")
        options += f",lowerdir={lower},upperdir=/proc/self/fd/{delta},workdir=/proc/self/fd/{work}"
        sc.mount("overlay", WORKSPACE, "overlay", flags, options)
    else:
        # An overlay without an upper layer needs two lower ones.
        os.mkdir(f"{SCRATCH}/empty", 0o555)
        sc.mount("overlay", WORKSPACE, "overlay", flags | sc.MS_RDONLY, f"{options},lowerdir={lower}:{SCRATCH}/empty")
    return delta


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _mount_extra(target: str, source: str) -> None:
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    sc.bind(source, target, read_only=True)


def limit(request: dict[str, Any], kind_of_run: str) -> None:
    """Resource limits of the whole tree, then no capability and no way back to one."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        (resource.RLIMIT_FSIZE, request["disk_bytes"]),
        (resource.RLIMIT_MEMLOCK, 1 << 20),
    ):
        resource.setrlimit(kind, (value, value))
    if request["nproc"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (request["nproc"], request["nproc"]))
    if request["address_space"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["address_space"], request["address_space"]))
    sc.drop_capabilities()
    sc.install_filter(denies_ptrace=kind_of_run == "python")


def supervise(child: int, status_fd: int) -> None:
    """Be an init for ``child``: reap orphans until it ends, report its wait status, end. Never returns."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            os.write(status_fd, struct.pack("=i", status))
            os._exit(0)
