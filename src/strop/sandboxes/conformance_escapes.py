"""Checks of the conformance suite: the file system, privileges, the outside world, other boxes, and the death of the parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import tempfile
from pathlib import Path

from strop.ports import Sandbox
from strop.sandboxes.conformance_arena import Arena, box_directory, check, expect, refused


def _own_file(text: bytes) -> Path:
    handle, name = tempfile.mkstemp(prefix="strop-outside-")
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return Path(name)


@check()
async def symlink_escape(arena: Arena) -> None:
    outside = _own_file(b"secret\n")
    try:
        box = await arena.box()
        script = f"ln -s {outside} link; ln -s {outside.parent} dirlink; rm README; ln -s {outside} README; cat link; ls dirlink"
        result = await arena.shell(script, box=box)
        expect("secret" not in result.output and outside.name not in result.output, "the box sees a file of the host")
        for path in ("link", "README", f"dirlink/{outside.name}"):
            refused(lambda path=path: box.read(path), FileNotFoundError)
        expect(not {"link", "dirlink", "README"} & set(box.list_files()), box.list_files())
        expect(box.changes() == {"README": None}, box.changes())
        refused(lambda: box.write(f"dirlink/{outside.name}", b"broken"), OSError)
        box.write("link", b"replaced\n")
        expect(box.read("link") == b"replaced\n" and outside.read_bytes() == b"secret\n", "a write followed a link")
    finally:
        outside.unlink()


@check()
async def dotdot_escape(arena: Arena) -> None:
    box = await arena.box()
    for path in ("../base/README", "pkg/../../base/README", "/etc/passwd", "..", "", "pkg/../README", "a\0b"):
        refused(lambda path=path: box.read(path), OSError)
        refused(lambda path=path: box.write(path, b"x"), OSError)
        refused(lambda path=path: box.write(path, None), OSError)
    expect(box.changes() == {}, box.changes())


@check()
async def hard_link(arena: Arena) -> None:
    box = await arena.box()
    await arena.shell("ln pkg/core.py alias.py; echo changed > alias.py; ln /etc/passwd stolen; ln /usr/bin/env envlink; true", box=box)
    expect(box.changes().get("alias.py") == b"changed\n", box.changes())
    expect("stolen" not in box.list_files() and "envlink" not in box.list_files(), box.list_files())
    expect((arena.base / "pkg/core.py").read_bytes().startswith(b"def double"), "the base changed through a hard link")


@check()
async def pipes_never_block(arena: Arena) -> None:
    box = await arena.box()
    await arena.shell("mkfifo pipe; rm README; mkfifo README; mkdir d; mkfifo d/p", box=box)
    for path in ("pipe", "README", "d/p"):
        refused(lambda path=path: box.read(path), FileNotFoundError)
    expect(box.changes() == {"README": None} and "pipe" not in box.list_files(), box.changes())
    box.write("pipe", b"now a file")
    expect(box.read("pipe") == b"now a file", "a pipe can't be replaced")
    expect((await arena.shell("cat pipe", box=box)).output == "now a file", "the box doesn't see it")


@check()
async def no_device_nodes(arena: Arena) -> None:
    box = await arena.box()
    code = """
import os, stat
for kind, device in ((stat.S_IFBLK, (8, 0)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (0, 0))):
    try:
        os.mknod("node", kind | 0o666, os.makedev(*device))
        print("made", device)
    except OSError:
        pass
for root, _, names in os.walk("/dev"):
    for name in names:
        info = os.stat(os.path.join(root, name), follow_symlinks=False)
        if stat.S_ISBLK(info.st_mode):
            print("block device", name)
"""
    result = await arena.python(code, box=box)
    expect(result.output == "", result)


@check()
async def no_privileges(arena: Arena) -> None:
    box = await arena.box()
    script = (
        "cp /usr/bin/id ./id && chmod 6755 ./id; ./id -u; ./id -ru; grep -E 'CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs' /proc/self/status; "
        "unshare -U true && echo escaped; unshare -m true && echo escaped; true"
    )
    result = await arena.shell(script, box=box)
    words = result.output.split()
    expect(words[0] == words[1] != "0" and "escaped" not in words, result)
    expect("CapEff:\t0000000000000000" in result.output and "CapBnd:\t0000000000000000" in result.output, result)
    expect("NoNewPrivs:\t1" in result.output, result)
    for content in Path(box_directory(arena)).rglob("id") if box_directory(arena) else []:
        is_ignored = bool(os.statvfs(content).f_flag & os.ST_NOSUID)
        expect(is_ignored or content.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID) == 0, "a setuid file lies on the host")


@check()
async def system_read_only(arena: Arena) -> None:
    before = stat.S_IMODE(os.stat("/dev/null").st_mode)
    box = await arena.box()
    code = """
import os
for path in ("/usr/x", "/etc/x", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory",
             "/proc/sysrq-trigger", "/x", "/dev/x", "/run/x",
             os.__file__, "/sys/x", "/mnt/x"):
    try:
        open(path, "a").close()
        print("writable", path)
    except OSError:
        pass
for path in ("/dev/null", "/usr/bin/env", "/"):
    try:
        os.chmod(path, 0o777 if path != "/dev/null" else 0o600)
        print("chmod", path)
    except OSError:
        pass
open("/dev/null", "w").write("x"); open("/tmp/ok", "w").write("x"); open("/dev/shm/ok", "w").write("x")
print(len(open("/dev/urandom", "rb").read(8)))
"""
    result = await arena.python(code, box=box)
    expect(result.output == "8\n", result)
    expect(stat.S_IMODE(os.stat("/dev/null").st_mode) == before, "the host's /dev/null changed")


@check()
async def workspace_replaced(arena: Arena) -> None:
    box = await arena.box()
    script = (
        "cd /; rm -rf /workspace/* ; mv /workspace /moved; rmdir /workspace; ln -sfn /etc /workspace; "
        "ln -s /etc /workspace/pkg; ln -s / /workspace/tests; true"
    )
    await arena.shell(script, box=box)
    expect(all("passwd" not in name for name in box.list_files()), box.list_files())
    expect(set(box.changes().values()) <= {None} and len(box.changes()) == 6, box.changes())
    refused(lambda: box.write("pkg/passwd", b"x"), OSError)
    refused(lambda: box.read("pkg/passwd"), FileNotFoundError)


@check()
async def hostile_trees(arena: Arena) -> None:
    box = await arena.box()
    code = """
import os
here = os.open(".", os.O_RDONLY)
for _ in range(300):
    os.mkdir("d" * 200, dir_fd=here)
    below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
    os.close(here)
    here = below
os.close(os.open("bottom", os.O_CREAT, dir_fd=here))
os.mkdir("locked"); open("locked/inside", "w").write("x"); os.chmod("locked", 0)
open("unreadable", "w").write("y"); os.chmod("unreadable", 0)
os.symlink("x" * 4000, "longlink"); os.symlink("loop", "loop")
f = open("sparse", "w"); f.truncate(4 << 20)
"""
    result = await arena.python(code, box=box)
    expect(result.exit_code == 0, result)
    expect(box.read("locked/inside") == b"x" and box.read("unreadable") == b"y", "files without permission bits are lost")
    expect(len(box.read("sparse")) == 4 << 20, "a sparse file is wrong")
    expect((await arena.shell("ls >/dev/null; echo ok", box=box)).output == "ok\n", "the box is unusable")


# ------------------------------------------------------------------------------------------------ the outside


@check("network_isolation")
async def no_network(arena: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract:
        abstract.bind(f"\0strop-{arena.marker}")
        abstract.listen()
        code = f"""
import socket
def attempt(what, family, address, kind=socket.SOCK_STREAM):
    try:
        s = socket.socket(family, kind); s.settimeout(1); s.connect(address); print("reached", what)
    except OSError:
        pass
attempt("host port", socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]}))
attempt("outside", socket.AF_INET, ("192.0.2.1", 80))
attempt("outside datagram", socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)
attempt("abstract socket", socket.AF_UNIX, "\\0strop-{arena.marker}")
for family in (40, 38, 17, 31):  # vsock, alg, packet, bluetooth
    try:
        socket.socket(family, socket.SOCK_STREAM if family in (40, 31) else socket.SOCK_SEQPACKET if family == 38 else socket.SOCK_RAW)
        print("family", family)
    except OSError:
        pass
"""
        result = await arena.python(code)
    if "call_filter" in arena.provider.capabilities.missing:
        result_lines = [line for line in result.output.splitlines() if not line.startswith("family")]
        expect(result_lines == [], result)
    else:
        expect(result.output == "", result)


@check("host_processes")
async def boxes_invisible_to_each_other(arena: Arena) -> None:
    first, second = await arena.box(), await arena.box()
    left = f"echo {arena.marker} > /tmp/{arena.marker}; echo mine > {arena.marker}; {arena.sleeper()}"
    hold = asyncio.create_task(arena.shell(left, box=first, timeout_s=600))
    for _ in range(1500):
        if hold.done() or await arena.is_running():
            break
        await asyncio.sleep(0.02)
    expect(await arena.is_running(), "the other box's command never ran")
    find = (
        "ls /tmp /workspace /dev/shm; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -v grep | grep -c 'sleep 3600'; "
        "ls /proc | grep -c '^[0-9]'; cat /proc/self/mountinfo"
    )
    result = await arena.shell(find, box=second)
    expect(arena.marker not in result.output, "a box sees another box's files or processes")
    lines = result.output.splitlines()
    expect(
        "0" in lines and box_directory(arena) not in (result.output if box_directory(arena) else ""),
        f"another box or host paths show: {result.output[-1500:]}",
    )
    hold.cancel()
    await asyncio.gather(hold, return_exceptions=True)
    expect(await arena.survivors(10.0) == [], "processes outlived a cancelled call")


@check("call_filter")
async def no_channel_between_runs(arena: Arena) -> None:
    box, other = await arena.box(), await arena.box()
    leave = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(248 if os.uname().machine == "x86_64" else 217, b"user", b"strop", b"secret", 6, -4) >= 0)
libc.shmget(4242, 4096, 0o1666)
open("/tmp/strop-left", "w").write("x"); open("/dev/shm/strop-left", "w").write("x")
"""
    look = "import ctypes, os; libc = ctypes.CDLL(None); print(libc.shmget(4242, 4096, 0) >= 0, os.listdir('/tmp'), os.listdir('/dev/shm'))"
    for _ in range(arena.config.workers):
        expect((await arena.python(leave, box=box)).output == "False\n", "a kernel key can be left for another box")
    for _ in range(arena.config.workers):
        expect((await arena.python(look, box=other)).output == "False [] []\n", "a run left something for another")


@check("open_files")
async def open_files_limited(arena: Arena) -> None:
    result = await arena.python(
        "import resource\nfs = []\ntry:\n    for _ in range(5000): fs.append(open('/dev/null'))\nexcept OSError as e:\n    print(e.errno)\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))"
    )
    expect(result.output == "24\n(0, 0)\n", result)


@check("host_processes")
async def kill_of_the_parent_leaves_nothing(arena: Arena) -> None:
    command = [sys.executable, "-m", "strop.sandboxes.conformance", arena.spec, str(arena.base), f"{arena.sleeper()} & {arena.sleeper()}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        directory = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        for _ in range(1500):
            if await arena.is_running():
                break
            await asyncio.sleep(0.02)
        expect(await arena.is_running(), "the command never ran")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    expect(await arena.survivors(10.0) == [], "processes outlived the killed parent")
    if directory:
        other: Sandbox | None = None
        again = type(arena.provider)(arena.config)  # type: ignore[call-arg]
        try:
            other = await again.start(str(arena.base))
            expect(not os.path.exists(directory), "the next start didn't remove what the killed parent left")
        finally:
            if other is not None:
                await other.stop()
            await again.close()
