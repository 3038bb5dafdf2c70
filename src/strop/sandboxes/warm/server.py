"""Main loop of the warm parent: it keeps one forked child ready, which takes a request and becomes the run. Standard library only.

Two SEQPACKET sockets lead to the host. On the first the host sends requests (JSON with three descriptors: stdin, stdout, stderr);
only the waiting
child reads it. On the second the child answers ``ready`` (with the descriptor of the change directory) when it is isolated and
about to run agent
code, or ``broken``; the parent answers ``done`` with the wait status of the n-th child, and the host sends ``kill n``. End of file
ends everything.
The parent reads nothing that agent code wrote: only wait statuses, one of them through a pipe that the agent's process doesn't hold.
"""

# pyright: reportMissingImports=false

import gc
import json
import os
import select
import signal
import socket
import struct
import sys

import isolate
import pyrun
import syscalls as sc

MAX_REQUEST = 1 << 18


def serve(requests: socket.socket, control: socket.socket) -> None:
    """Fork children, one after the other, until the host closes the sockets."""
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    # When memory runs out the kernel shall take the run, which inherits this, before anything of the user's; the parent itself is small.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # From here on nobody in this user namespace can make another one, which is where most kernel holes of unprivileged users start.
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    control.send(b'{"kind": "hello"}')
    number = 0
    while True:
        number += 1
        status = _one_child(requests, control, home, number)
        control.send(b'{"kind": "done", "number": %d, "status": %s}' % (number, b"null" if status is None else b"%d" % status))


def _one_child(requests: socket.socket, control: socket.socket, home: int, number: int) -> int | None:
    """Fork one child into a new process namespace and return the wait status of what it ran, ``None`` if it was killed from outside."""
    status_read, status_write = os.pipe()
    sc.unshare(sc.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        try:
            first_process(requests, control, status_write)
        finally:
            os._exit(70)
    sc.setns(home, sc.CLONE_NEWPID)
    os.close(status_write)
    status, is_cpu = _wait(control, child, b"kill %d" % number)
    answer = os.read(status_read, 4)
    os.close(status_read)
    if len(answer) == 4:
        return struct.unpack("=i", answer)[0]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not is_cpu:
        return None  # nothing else in its own namespace can do that to process 1
    return status


def _wait(control: socket.socket, child: int, kill: bytes) -> tuple[int, bool]:
    """Until the run's process 1 is gone (the kernel then has killed and reaped its whole tree); kill it when the host says so.

    Returns:
        Its wait status, and whether it had used up a limit of processor time that it set for itself.
    """
    pidfd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if control.fileno() in ready:
            message = control.recv(64)
            if not message:
                os._exit(0)
            if message == kill:  # not one for a child that has ended meanwhile
                os.kill(child, signal.SIGKILL)
        if pidfd in ready:
            limit_s = _cpu_limit(child)
            _, status, usage = os.wait4(child, 0)
            os.close(pidfd)
            is_cpu = usage.ru_utime + usage.ru_stime >= limit_s - 0.5  # the two clocks differ by a few ticks
            return status, is_cpu


def _cpu_limit(child: int) -> float:
    """Processor seconds after which the kernel kills a process that has ended but is not yet reaped; a run can lower this for itself."""
    with open(f"/proc/{child}/limits") as file:
        hard = next(line.split()[4] for line in file if line.startswith("Max cpu time"))
    return float("inf") if hard == "unlimited" else float(hard)


def first_process(requests: socket.socket, control: socket.socket, status_write: int) -> None:
    """Process 1 of the box: wait for a request, isolate, then run Python here, or fork a command and be its init. Never returns."""
    isolate.separate()
    data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
    if not data:
        os._exit(0)
    request = json.loads(data)
    try:
        delta = isolate.enter(request)
        isolate.limit(request)
    except OSError as error:
        control.send(json.dumps({"kind": "broken", "error": str(error)}).encode())
        os._exit(71)
    for target in range(3):
        os.dup2(fds[target], target)
    if delta >= 0:
        socket.send_fds(control, [b'{"kind": "ready"}'], [delta])
    else:
        control.send(b'{"kind": "ready"}')
    argv = request["argv"]
    if request["kind_of_run"] == "python":
        if pyrun.can_run(argv):
            os.closerange(3, 1 << 20)
            os.setsid()
            run_python(argv)
        argv = [sys.executable, *argv]
    # A command isn't written to be process 1 (which ignores signals of its own namespace), so this process stays and forks it. Not
    # dumpable: the command has the same user and must not trace this one.
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child:
        os.dup2(status_write, 3)
        os.closerange(4, 1 << 20)
        os.closerange(0, 3)
        isolate.supervise(child, 3)
    os.closerange(3, 1 << 20)
    sc.prctl(sc.PR_SET_DUMPABLE, 1)
    os.setsid()
    run_command(argv)


def run_python(argv: list[str]) -> None:
    """Become ``python ARGV``. Never returns."""
    for name in ("furnish", "isolate", "server", "syscalls", "pyrun"):
        sys.modules.pop(name, None)
    gc.enable()
    os._exit(pyrun.run(argv, sys.executable))


def run_command(argv: list[str]) -> None:
    """Become the command. Never returns."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs expect them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {os.strerror(error.errno or 0)}\n".encode(errors="replace"))
        os._exit(126 if isinstance(error, PermissionError) else 127)


def probe() -> None:
    """Print as JSON what works here: each key is an error text, empty where it works."""
    result = {"overlay": "", "tmpfs_xattr": "", "filter": "" if sc.filter_supported() else f"unknown processor {os.uname().machine}"}
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("tmpfs", isolate.SCRATCH, "tmpfs", 0)
    for name in ("upper", "work", "lower"):
        os.mkdir(f"{isolate.SCRATCH}/{name}")
    try:
        os.setxattr(f"{isolate.SCRATCH}/upper", "user.strop", b"y")
    except OSError as error:
        result["tmpfs_xattr"] = str(error)
    try:
        paths = f"lowerdir={isolate.SCRATCH}/lower,upperdir={isolate.SCRATCH}/upper,workdir={isolate.SCRATCH}/work"
        sc.mount("overlay", isolate.WORKSPACE, "overlay", 0, f"userxattr,{paths}")
    except OSError as error:
        result["overlay"] = str(error)
    print(json.dumps(result))
