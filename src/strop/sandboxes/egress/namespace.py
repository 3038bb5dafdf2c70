"""Network namespaces without names: made and entered by descriptor, gone when the last descriptor and process are."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

from strop.core.errors import SandboxError

_CLONE_NEWNET = 0x40000000
_TIMEOUT_S = 30
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


@functools.cache
def missing_tools() -> str:
    """Why veth pairs can't be made here; empty if they can."""
    if os.geteuid() != 0:
        return "strop doesn't run as root, which making a veth pair takes"
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} isn't on PATH; install it, for example with: sudo apt-get install -y {package}"
    try:
        os.close(new_namespace())
    except (OSError, SandboxError) as error:
        return f"no network namespace can be made: {error}"
    return ""


def new_namespace() -> int:
    """Make a network namespace and return a descriptor of it."""

    def make() -> int:
        if _libc.unshare(_CLONE_NEWNET) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"unshare: {os.strerror(number)}")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def inside(namespace: int, action: Callable[[], T]) -> T:
    """Call ``action`` with the calling thread's network being ``namespace``; sockets that it makes stay there."""

    def act() -> T:
        if _libc.setns(namespace, _CLONE_NEWNET) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
        return action()

    return _in_thread(act)


def _in_thread(action: Callable[[], T]) -> T:
    """In a thread of its own, which ends with it: namespaces belong to threads, and this process must keep its own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def configure(namespace: int, commands: list[str], extra_fds: tuple[int, ...] = ()) -> None:
    """Run ``ip`` commands in a namespace.

    Args:
        namespace: Descriptor.
        commands: As ``ip`` takes them, without ``ip``.
        extra_fds: Descriptors that the commands name as ``/proc/self/fd/N``.

    Raises:
        SandboxError: One failed.
    """
    argv = ["nsenter", f"--net=/proc/self/fd/{namespace}", "ip", "-batch", "-"]
    try:
        done = subprocess.run(
            argv,
            input="\n".join(commands) + "\n",
            text=True,
            capture_output=True,
            pass_fds=(namespace, *extra_fds),
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"a box's network can't be configured: {error}") from error
    if done.returncode:
        raise SandboxError(f"a box's network can't be configured: {done.stderr.strip()[-300:]}")
