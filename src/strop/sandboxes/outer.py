"""The outer bubblewrap: one per warm worker, holding the warm parent and everything that it forks.

It gives: user namespace (with the few capabilities that the warm parent needs to mount, none of them valid outside), process,
network, IPC and host
name namespaces, a read-only system, no devices beyond the harmless ones, a cleared environment, and death with its parent.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from strop.core.errors import SandboxError

WARM_DIR = Path(__file__).parent / "warm"
AGENT_UID = 1000
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    # Compiled files are checked by whole seconds; an agent edits and tests within one, and would test code that is no longer there.
    "PYTHONDONTWRITEBYTECODE": "1",
    # Lines of carets under every frame are a third of a traceback, and differ between versions.
    "PYTHONNODEBUGRANGES": "1",
}
# For mounts (SYS_ADMIN), overlayfs's own files (DAC_OVERRIDE, FOWNER, CHOWN), dropping for good (SETPCAP), and limits (SYS_RESOURCE).
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_CHOWN", "CAP_SETPCAP", "CAP_SYS_RESOURCE")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def find_bwrap() -> str:
    """Path of bubblewrap.

    Raises:
        SandboxError: If it isn't installed.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError("bubblewrap (bwrap) isn't on PATH; install it, for example with: sudo apt-get install -y bubblewrap")
    return path


def interpreter() -> tuple[str, str, str]:
    """The box's Python: ``(prefix on the host, prefix in the box, executable in the box)``.

    It is the interpreter below this process's virtual environment, without the environment's packages. Unless it is the system's,
    it stands at
    /usr/local, so that paths in tracebacks don't depend on whose home it is installed in.
    """
    prefix = os.path.realpath(sys.base_prefix)
    base = getattr(sys, "_base_executable", sys.executable)
    names = ("python", "python3", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    name = next((name for name in names if os.path.realpath(f"{prefix}/bin/{name}") == os.path.realpath(base)), names[-1])
    inside = prefix if prefix == "/usr" else "/usr/local"
    return prefix, inside, f"{inside}/bin/{name}"


def build_command(run_dir: Path, arguments: list[str]) -> list[str]:
    """The bubblewrap command line of a warm parent.

    Args:
        run_dir: The provider's own directory; ``delta`` below it must exist (see ``prepare``).
        arguments: Arguments of the warm parent's script.
    """
    prefix, inside, executable = interpreter()
    command = [
        find_bwrap(),
        "--unshare-user",
        "--uid",
        str(AGENT_UID),
        "--gid",
        str(AGENT_UID),
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
    ]
    command += ["--unshare-uts", "--hostname", "box", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for capability in _CAPABILITIES:
        command += ["--cap-add", capability]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    if prefix != "/usr":
        command += ["--ro-bind", prefix, inside]
        library = os.path.join(prefix, "lib", str(sysconfig.get_config_var("INSTSONAME")))
        if sysconfig.get_config_var("Py_ENABLE_SHARED") and os.path.isfile(library):
            command += ["--ro-bind", library, library]  # such an interpreter looks for it at the absolute path of its installation
    command += ["--tmpfs", "/etc", "--proc", "/proc", "--tmpfs", "/dev", "--dir", "/dev/shm"]
    for name in _DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    command += ["--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev"]
    for name in ("/workspace", "/tmp", "/mnt", "/home"):
        command += ["--dir", name]
    # One mount holds all that only the warm parent may see; a run detaches it as a whole.
    command += [
        "--tmpfs",
        "/run/box",
        "--dir",
        "/run/box/scratch",
        "--ro-bind",
        "/",
        "/run/box/host",
        "--ro-bind",
        str(WARM_DIR),
        "/run/box/code",
    ]
    command += ["--bind", str(run_dir / "delta"), "/run/box/delta", "--remount-ro", "/run/box", "--remount-ro", "/", "--chdir", "/"]
    return [*command, executable, "/run/box/code", *arguments]


def prepare(run_dir: Path) -> None:
    """Create what the command line refers to: the directory for changes on disk."""
    (run_dir / "delta").mkdir(exist_ok=True)
