"""The default image, from this machine's own programs: ``python -m strop.sandboxes.docker.rootfs`` imports it into the daemon.

A root file system with a shell, the core utilities, git and the interpreter that strop runs on, each with the libraries that it loads; the
same programs that a bubblewrap box sees. No registry is asked for anything.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from strop.core.errors import SandboxError
from strop.sandboxes.docker.provider import API_TIMEOUT_S, DEFAULT_HOST, DEFAULT_IMAGE
from strop.sandboxes.outer import AGENT_UID, interpreter

PROGRAMS = """
    sh bash env cat ls cp mv rm rmdir mkdir ln chmod chown touch head tail tr cut sort uniq wc cksum sha256sum sleep true false id printf
    echo pwd stat date dd tee test expr seq timeout mkfifo mknod df du basename dirname realpath readlink uname whoami nproc yes od grep
    sed awk find xargs tar gzip diff patch setsid unshare hostname ps kill git
"""
_SKIPPED = re.compile(r"(^|/)(__pycache__|test|tests|idlelib|turtledemo|tkinter|config-3[^/]*|lib2to3|ensurepip)(/|$)|\.a$")
_KEPT_PACKAGES = ("pip", "setuptools")
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{AGENT_UID}:{AGENT_UID}:agent:/tmp:/bin/sh\n",
    "etc/group": f"root:x:0:\nagent:x:{AGENT_UID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def write_rootfs(target: Path) -> None:
    """Write the root file system as a tar file.

    Raises:
        SandboxError: This machine lacks a shell.
    """
    prefix, inside, executable = interpreter()
    host_python = f"{prefix}/bin/{os.path.basename(executable)}"
    found = {name: path for name in PROGRAMS.split() if (path := shutil.which(name))}
    if "sh" not in found:
        raise SandboxError("no shell (sh) on PATH, so no image can be made")
    with tarfile.open(target, "w") as tar:
        _add_links(tar)
        seen: set[str] = set()
        git_core = Path("/usr/lib/git-core")
        extra = [str(git_core / "git")] if (git_core / "git").is_file() else []
        extensions = [str(path) for path in Path(prefix, "lib").glob("python3*/lib-dynload/*.so")]
        for path in [*found.values(), *extra]:
            _add_file(tar, path, seen)
        for path in _libraries([*found.values(), *extra, host_python, *extensions]):
            _add_file(tar, path, seen)
        if prefix != "/usr":
            for part in ("bin", "lib"):
                tar.add(f"{prefix}/{part}", arcname=f"{inside.lstrip('/')}/{part}", filter=_wanted)
            _add_library_of(tar, prefix, seen)
        else:
            _add_file(tar, host_python, seen)
            tar.add(sysconfig.get_path("stdlib"), arcname=sysconfig.get_path("stdlib").lstrip("/"), filter=_wanted)
        for name, text in _FILES.items():
            _add_text(tar, name, text)
        _add_directory(tar, "tmp", 0o1777)
        _add_directory(tar, "workspace", 0o755)


def _add_links(tar: tarfile.TarFile) -> None:
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
            tar.addfile(link)


def _add_file(tar: tarfile.TarFile, path: str, seen: set[str]) -> None:
    """Add what a path leads to, under the path's name with the directory's links resolved."""
    name = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)).lstrip("/")
    if name not in seen:
        seen.add(name)
        real = os.path.realpath(path)
        info = tar.gettarinfo(real, arcname=name)
        info.uid = info.gid = 0
        info.mode &= 0o755  # no setuid program
        info.type, info.linkname = tarfile.REGTYPE, ""
        info.size = os.stat(real).st_size
        with open(real, "rb") as file:
            tar.addfile(info, file)


def _add_library_of(tar: tarfile.TarFile, prefix: str, seen: set[str]) -> None:
    # An interpreter with a shared library looks for it at the absolute path of its installation.
    library = os.path.join(prefix, "lib", str(sysconfig.get_config_var("INSTSONAME")))
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and os.path.isfile(library):
        _add_file(tar, library, seen)


def _libraries(paths: Iterable[str]) -> list[str]:
    """Shared libraries that programs of this machine load."""
    done = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=False)
    return sorted(set(re.findall(r"(/\S+) \(0x", done.stdout)))


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    _, is_package, name = info.name.partition("site-packages/")
    if is_package and not name.startswith(_KEPT_PACKAGES):
        return None
    if not is_package and _SKIPPED.search(info.name):
        return None
    info.uid = info.gid = 0
    info.mode &= 0o755
    return info


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text), 0o644
    tar.addfile(info, io.BytesIO(text.encode()))


def _add_directory(tar: tarfile.TarFile, name: str, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    tar.addfile(info)


def import_image(tag: str = DEFAULT_IMAGE, host: str | None = None) -> str:
    """Make the root file system and import it.

    Args:
        tag: ``NAME:VERSION`` of the image.
        host: The daemon; default ``$DOCKER_HOST``.

    Returns:
        The image's id.

    Raises:
        SandboxError: The daemon refused.
    """
    import docker
    import docker.errors

    name, _, version = tag.rpartition(":")
    try:
        api = docker.APIClient(base_url=host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST, version="auto", timeout=API_TIMEOUT_S)
        with tempfile.TemporaryDirectory(prefix="strop-rootfs-") as directory:
            write_rootfs(Path(directory) / "rootfs.tar")
            api.import_image_from_file(str(Path(directory) / "rootfs.tar"), repository=name or version, tag=version if name else "latest")
        return api.inspect_image(tag)["Id"]
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxError(f"the image {tag!r} can't be imported: {error}") from error


def main() -> int:
    """Import the image and print its id."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default=DEFAULT_IMAGE, help="name of the image")
    arguments = parser.parse_args()
    try:
        print(import_image(arguments.tag))
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
