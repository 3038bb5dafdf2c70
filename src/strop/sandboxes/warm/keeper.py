"""A box that stays up between commands: process 1 of it, which forks every command into a process namespace of its own.

It keeps the capabilities to make those namespaces, so no command may reach it: it is in none of their namespaces and not dumpable.
It reads nothing that a command wrote, only wait statuses. Standard library only.
"""

# pyright: reportMissingImports=false

import json
import os
import select
import signal
import socket
import struct
from typing import Any

import isolate
import launch
import syscalls as sc

MAX_REQUEST = 1 << 18


def keep(request: dict[str, Any], channel: socket.socket) -> None:
    """Start what the host asks for until it closes the channel; everything in the box dies with this process. Never returns.

    The host sends ``{"id", "kind_of_run", "argv"}`` with three descriptors, and ``{"kill": id}``; the answer to each run is
    ``{"id", "status"}`` when all its processes are dead, with the status ``null`` if it was killed from outside.
    """
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    home = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    runs: dict[int, tuple[int, int, int]] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in runs:
                number, child, status_read = runs.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                status = _status(child, status_read)
                channel.send(json.dumps({"id": number, "status": status}).encode())
            elif fd == channel.fileno():
                data, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST, 3)
                if not data:
                    os._exit(0)
                message = json.loads(data)
                if "kill" in message:
                    for number, child, _ in runs.values():
                        if number == message["kill"]:
                            os.kill(child, signal.SIGKILL)
                    continue
                pidfd, child, status_read = _start(request, message, fds, home)
                runs[pidfd] = (message["id"], child, status_read)
                poll.register(pidfd, select.POLLIN)


def _start(request: dict[str, Any], message: dict[str, Any], fds: list[int], home: int) -> tuple[int, int, int]:
    status_read, status_write = os.pipe()
    sc.unshare(sc.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            sc.unshare(sc.CLONE_NEWNS)
            sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC | sc.MS_RDONLY)
            isolate.limit(request, message["kind_of_run"])
            for target in range(3):
                os.dup2(fds[target], target)
            sc.prctl(sc.PR_SET_DUMPABLE, 1)
            launch.become(message["kind_of_run"], message["argv"], status_write)
        finally:
            os._exit(70)
    sc.setns(home, sc.CLONE_NEWPID)
    os.close(status_write)
    for fd in fds:
        os.close(fd)
    return os.pidfd_open(child), child, status_read


def _status(child: int, status_read: int) -> int | None:
    _, status = os.waitpid(child, 0)
    answer = os.read(status_read, 4)
    os.close(status_read)
    if len(answer) == 4:
        return struct.unpack("=i", answer)[0]
    return None if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else status
