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

import json
import os
import select
import signal
import socket
import struct

import isolate
import keeper
import launch
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
    network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    socket.send_fds(control, [b'{"kind": "hello"}'], [network])
    os.close(network)
    number = 0
    while True:
        number += 1
        status, cpu_s = _one_child(requests, control, home, number)
        end = b"null" if status is None else b"%d" % status
        control.send(b'{"kind": "done", "number": %d, "status": %s, "cpu_s": %.3f}' % (number, end, cpu_s))


def _one_child(requests: socket.socket, control: socket.socket, home: int, number: int) -> tuple[int | None, float]:
    """Fork one child into a new process namespace and wait for the end of its tree.

    Returns:
        Wait status of what it ran, ``None`` if it was killed from outside, and the processor seconds of its process 1 with those that this
        has waited for (the kernel doesn't add what dies with it).
    """
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
    status, is_cpu, cpu_s = _wait(control, child, b"kill %d" % number)
    answer = os.read(status_read, 4)
    os.close(status_read)
    if len(answer) == 4:
        return struct.unpack("=i", answer)[0], cpu_s
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not is_cpu:
        return None, cpu_s  # nothing else in its own namespace can do that to process 1
    return status, cpu_s


def _wait(control: socket.socket, child: int, kill: bytes) -> tuple[int, bool, float]:
    """Until the run's process 1 is gone (the kernel then has killed and reaped its whole tree); kill it when the host says so.

    Returns:
        Its wait status, whether it had used up a limit of processor time that it set for itself, and the processor seconds used.
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
            cpu_s = usage.ru_utime + usage.ru_stime
            return status, cpu_s >= limit_s - 0.5, cpu_s  # the two clocks differ by a few ticks


def _cpu_limit(child: int) -> float:
    """Processor seconds after which the kernel kills a process that has ended but is not yet reaped; a run can lower this for itself."""
    with open(f"/proc/{child}/limits") as file:
        hard = next(line.split()[4] for line in file if line.startswith("Max cpu time"))
    return float("inf") if hard == "unlimited" else float(hard)


def first_process(requests: socket.socket, control: socket.socket, status_write: int) -> None:
    """Process 1 of the box: wait for a request, isolate, then become the run, or the keeper of a box that stays up. Never returns."""
    isolate.separate()
    data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
    if not data:
        os._exit(0)
    request = json.loads(data)
    try:
        delta = isolate.enter(request)
        if request["kind_of_run"] != "keep":
            isolate.limit(request, request["kind_of_run"])
    except OSError as error:
        control.send(json.dumps({"kind": "broken", "error": str(error)}).encode())
        os._exit(71)
    for target in range(3):
        os.dup2(fds[target], target)
    if request["kind_of_run"] == "keep":
        # The mounted workspace too: the host writes through it while the box is up.
        merged = os.open(isolate.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        socket.send_fds(control, [b'{"kind": "ready"}'], [delta, merged])
        os.close(merged)
    elif delta >= 0:
        socket.send_fds(control, [b'{"kind": "ready"}'], [delta])
    else:
        control.send(b'{"kind": "ready"}')
    if request["kind_of_run"] == "keep":
        channel = socket.socket(fileno=os.dup(0))
        os.dup2(1, 0)
        for other in (requests, control):
            other.close()
        keeper.keep(request, channel)
    launch.become(request["kind_of_run"], request["argv"], status_write)


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
