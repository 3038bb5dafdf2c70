"""The checks of the conformance suite. Each is a small hostile or ordinary program and what must be true afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from strop.core.errors import SandboxError
from strop.ports import ExecResult, Sandbox
from strop.sandboxes.conformance import Arena, Check

CHECKS: list[Check] = []


def check(*needs: str):
    """Register a check; ``needs`` are capabilities whose declared absence excuses it."""

    def register(function):
        CHECKS.append(Check(name=function.__name__, needs=needs, run=function))
        return function

    return register


def _expect(condition: bool, message: object) -> None:
    if not condition:
        raise AssertionError(str(message)[:500])


def _refused(action, *errors: type[Exception]) -> None:
    try:
        result = action()
    except errors:
        return
    raise AssertionError(f"expected one of {[e.__name__ for e in errors]}, got {result!r:.200}")


# ------------------------------------------------------------------------------------------------ the ordinary


@check()
async def output_and_status(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("echo out; echo err >&2; exit 3", box=box)
    _expect(result.exit_code == 3 and result.output == "out\nerr\n" and result.killed_by == "", result)
    missing = await box.exec(["no-such-command-here"], timeout_s=30)
    _expect(missing.exit_code == 127, missing)


@check()
async def stdin_closed_or_given(arena: Arena) -> None:
    box = await arena.box()
    _expect((await arena.shell("cat; echo end", box=box)).output == "end\n", "stdin was inherited")
    data = bytes(range(256)) * 4096
    counted = await arena.shell("cksum", box=box, stdin=data)
    expected = subprocess.run(["cksum"], input=data, capture_output=True, check=True).stdout.decode()
    _expect(counted.output == expected, counted)
    _expect((await arena.python("import sys; print(repr(sys.stdin.read()))", box=box)).output == "''\n", "run_python inherited stdin")


@check()
async def environment_clean(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("env; cat /proc/1/environ /proc/self/environ 2>/dev/null; hostname; pwd", box=box)
    _expect(arena.secret not in result.output, "an environment variable of the host is visible")
    python = await arena.python("import os; print(dict(os.environ)); print(os.getcwd(), os.uname().nodename)", box=box)
    _expect(arena.secret not in python.output, "an environment variable of the host is visible to run_python")
    _expect(os.uname().nodename not in python.output.split(), "the host's name is visible")
    _expect("LANG" in python.output and "/workspace" in python.output, python)


@check()
async def same_as_real_python(arena: Arena) -> None:
    box = await arena.box()
    python = (await arena.python("import sys; print(sys.executable)", box=box)).output.strip()
    box.write("script.py", b"import sys\nprint(sys.argv, sys.path[0], __name__, __file__)\ndef f():\n    raise ValueError('boom')\nf()\n")
    box.write("quit.py", b"import sys, atexit\natexit.register(print, 'bye')\nsys.exit(sys.argv[1])\n")
    box.write("broken.py", b"def f(:\n")
    for argv in (
        ["script.py", "a", "b"],
        ["-m", "script", "x"],
        ["quit.py", "words"],
        ["broken.py"],
        ["-m", "no.such.module"],
        ["no_such_file.py"],
        ["-m", "unittest", "-v", "tests.test_core.CoreTest.no_such_test"],
        ["-c", "import sys; print(sys.argv, sys.path, sys.flags, __name__, sorted(globals())); sys.exit(7)", "z"],
        ["-c", "import json, re; print(json.__file__, sorted(k for k in vars() if k[0] != '_')); 1/0"],
    ):
        warm = await box.run_python(argv, timeout_s=30)
        cold = await box.exec([python, *argv], timeout_s=30)
        if _without_times(warm) != _without_times(cold):
            lines = "\n".join(difflib.unified_diff(cold.output.splitlines(), warm.output.splitlines(), "real", "warm", n=0, lineterm=""))
            raise AssertionError(f"{argv}: exit codes {cold.exit_code} and {warm.exit_code}; {lines}")


def _without_times(result: ExecResult) -> tuple[str, int | None, str]:
    lines = [line.split(" in ")[0] if line.startswith("Ran ") else line for line in result.output.splitlines()]
    return "\n".join(lines), result.exit_code, result.killed_by


@check()
async def runs_share_nothing(arena: Arena) -> None:
    box = await arena.box()
    await arena.python("import pkg.core, builtins; builtins.leak = 1; import sys; sys.path.append('/leak')", box=box)
    result = await arena.python("import sys; print('pkg' in sys.modules, hasattr(__builtins__, 'leak'), '/leak' in sys.path)", box=box)
    _expect(result.output == "False False False\n", result)
    box.write("pkg/core.py", b"def double(x):\n    return x + x\n")
    for text in (b"return x + 1", b"return 2 * x"):
        box.write("pkg/core.py", b"def double(x):\n    " + text + b"\n")
        tests = await box.run_python(["-m", "unittest", "-q"], timeout_s=30)
        _expect((tests.exit_code == 0) == (text == b"return 2 * x"), f"a run saw code that is no longer there: {tests.output}")


@check()
async def file_operations(arena: Arena) -> None:
    box = await arena.box()
    _expect(box.list_files() == ["README", "pkg/__init__.py", "pkg/core.py", "pkg/extra.py", "tests/__init__.py", "tests/test_core.py"], box.list_files())
    _expect(box.changes() == {}, box.changes())
    box.write("pkg/new/deep.py", b"x = 1\n")
    box.write("README", None)
    box.write("pkg/extra.py", b"VALUE = 1\n")  # equal to the base: no change
    _expect(box.changes() == {"README": None, "pkg/new/deep.py": b"x = 1\n"}, box.changes())
    seen = await arena.shell("cat pkg/new/deep.py; ls README; echo made > made.txt; rm -r tests; mkdir tests; echo 1 > tests/one; mv pkg/extra.py moved.py", box=box)
    _expect(seen.output.startswith("x = 1\n"), seen)
    expected = {
        "README": None,
        "made.txt": b"made\n",
        "moved.py": b"VALUE = 1\n",
        "pkg/extra.py": None,
        "pkg/new/deep.py": b"x = 1\n",
        "tests/__init__.py": None,
        "tests/one": b"1\n",
        "tests/test_core.py": None,
    }
    _expect(box.changes() == expected, box.changes())
    _expect(box.list_files() == ["made.txt", "moved.py", "pkg/__init__.py", "pkg/core.py", "pkg/new/deep.py", "tests/one"], box.list_files())
    again = await arena.shell("find . -type f | sort", box=box)
    _expect(again.output.split() == [f"./{name}" for name in box.list_files()], again)
    box.write("README", b"back\n")
    _expect(box.read("README") == b"back\n" and box.read("pkg/core.py").startswith(b"def"), "read back")
    _refused(lambda: box.read("pkg/extra.py"), FileNotFoundError)


@check()
async def stop_is_final(arena: Arena) -> None:
    box = await arena.box()
    await box.stop()
    await box.stop()
    _refused(lambda: box.read("README"), SandboxError)
    with contextlib.suppress(SandboxError):
        await box.exec(["true"], timeout_s=5)
        raise AssertionError("a stopped box ran a command")


@check()
async def many_at_once(arena: Arena) -> None:
    boxes = [await arena.box() for _ in range(6)]
    for number, box in enumerate(boxes):
        box.write("mine.txt", str(number).encode())
    results = await asyncio.gather(*(box.run_python(["-c", "print(open('mine.txt').read())"], timeout_s=60) for box in boxes))
    _expect([result.output for result in results] == [f"{number}\n" for number in range(6)], results)


# ------------------------------------------------------------------------------------------------ processes


@check()
async def timeout_kills_the_tree(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell(f"setsid {arena.sleeper()} & ({arena.sleeper()} &) ; {arena.sleeper()}", box=box, timeout_s=0.5)
    _expect(result.killed_by == "timeout" and result.exit_code is None, result)
    _expect(await arena.survivors() == [], "processes outlived the time-out")
    warm = await arena.python(f"import subprocess; subprocess.run({arena.sleeper().split()})", box=box, timeout_s=0.5)
    _expect(warm.killed_by == "timeout", warm)
    _expect(await arena.survivors() == [], "processes outlived the warm runner's time-out")
    _expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after a time-out")


@check()
async def daemon_dies_with_its_run(arena: Arena) -> None:
    box = await arena.box()
    code = f"""
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        os.execvp("sleep", {arena.sleeper().split()})
    os._exit(0)
os.wait()
print("left")
"""
    result = await arena.python(code, box=box)
    _expect(result.output == "left\n" and result.exit_code == 0, result)
    _expect(await arena.survivors() == [], "a daemonised child outlived its run")
    held = await arena.shell(f"{arena.sleeper()} & echo left", box=box, timeout_s=20)
    _expect(held.output == "left\n" and held.killed_by == "", f"a child that holds the output pipe delays the result: {held}")


@check()
async def cause_of_death_cannot_be_forged(arena: Arena) -> None:
    box = await arena.box()
    forged = await arena.shell("echo Killed; echo 'MemoryError: Temporary failure in name resolution'; exit 137", box=box)
    _expect(forged.exit_code == 137 and forged.killed_by == "", forged)
    suicide = await arena.shell("kill -9 $$", box=box)
    _expect(suicide.exit_code is None and suicide.killed_by == "", suicide)
    crash = await arena.python("import ctypes; ctypes.string_at(0)", box=box)
    _expect(crash.exit_code is None and crash.killed_by == "", crash)


@check("process_limit")
async def fork_bomb(arena: Arena) -> None:
    box = await arena.box()
    code = "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(20)\n        os._exit(0)\n"
    result = await arena.python(code, box=box)
    _expect(result.exit_code not in (0, None) and result.killed_by == "processes", result)
    _expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after a fork bomb")


@check("memory_limit", "kernel_evidence")
async def memory_balloon(arena: Arena) -> None:
    box, other = await arena.box(), await arena.box()
    size = 4 * arena.config.memory_mb << 20
    result = await arena.python(f"x = bytearray({size})\nfor i in range(0, {size}, 4096): x[i] = 1\nprint('held')", box=box)
    _expect(result.exit_code is None and result.killed_by == "memory", result)
    _expect((await arena.shell("echo ok", box=other)).output == "ok\n", "another box suffered")
    _expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after running out of memory")


@check("disk_limit")
async def full_disk(arena: Arena) -> None:
    box = await arena.box()
    blocks = 2 * arena.config.disk_mb
    script = f"i=0; while [ $i -lt {blocks} ]; do head -c 1048576 /dev/zero > f$i || break; i=$((i+1)); done; exit 0"
    await arena.shell(script, box=box)
    kept = sum(len(content) for content in box.changes().values() if content)
    _expect(kept <= arena.config.disk_mb << 20, f"the layer holds {kept} bytes")
    again = await arena.shell("rm -f f*; echo ok > after; cat after", box=box)
    _expect(again.output == "ok\n", f"the box can't free its own disk: {again}")


@check()
async def large_output(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("printf 'begin'; head -c 100000000 /dev/zero | tr '\\0' 'x'; printf 'end'", box=box, timeout_s=60)
    _expect(result.output.startswith("beginxxx") and result.output.endswith("xxxend"), result.output[:20])
    _expect(len(result.output) < 10_100 and "99990008 characters elided" in result.output, result.output[4990:5060])


@check()
async def invalid_utf8(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("printf 'a\\377\\376b\\303'", box=box)
    _expect(result.output == "a\ufffd\ufffdb\ufffd", repr(result.output))
    named = await arena.shell("touch \"$(printf 'bad\\377name')\"; echo good > good", box=box)
    _expect(named.exit_code == 0 and "good" in box.list_files(), box.list_files())
    _expect(all(name.isprintable() for name in box.list_files()), "a file name isn't text")


# ------------------------------------------------------------------------------------------------ the file system


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
        _expect("secret" not in result.output and outside.name not in result.output, "the box sees a file of the host")
        for path in ("link", "README", f"dirlink/{outside.name}"):
            _refused(lambda path=path: box.read(path), FileNotFoundError)
        _expect(not {"link", "dirlink", "README"} & set(box.list_files()), box.list_files())
        _expect(box.changes() == {"README": None}, box.changes())
        _refused(lambda: box.write(f"dirlink/{outside.name}", b"broken"), OSError)
        box.write("link", b"replaced\n")
        _expect(box.read("link") == b"replaced\n" and outside.read_bytes() == b"secret\n", "a write followed a link")
    finally:
        outside.unlink()


@check()
async def dotdot_escape(arena: Arena) -> None:
    box = await arena.box()
    for path in ("../base/README", "pkg/../../base/README", "/etc/passwd", "..", "", "pkg/../README", "a\0b"):
        _refused(lambda path=path: box.read(path), OSError)
        _refused(lambda path=path: box.write(path, b"x"), OSError)
        _refused(lambda path=path: box.write(path, None), OSError)
    _expect(box.changes() == {}, box.changes())


@check()
async def hard_link(arena: Arena) -> None:
    box = await arena.box()
    await arena.shell("ln pkg/core.py alias.py; echo changed > alias.py; ln /etc/passwd stolen; ln /usr/bin/env envlink; true", box=box)
    _expect(box.changes().get("alias.py") == b"changed\n", box.changes())
    _expect("stolen" not in box.list_files() and "envlink" not in box.list_files(), box.list_files())
    _expect((arena.base / "pkg/core.py").read_bytes().startswith(b"def double"), "the base changed through a hard link")


@check()
async def pipes_never_block(arena: Arena) -> None:
    box = await arena.box()
    await arena.shell("mkfifo pipe; rm README; mkfifo README; mkdir d; mkfifo d/p", box=box)
    for path in ("pipe", "README", "d/p"):
        _refused(lambda path=path: box.read(path), FileNotFoundError)
    _expect(box.changes() == {"README": None} and "pipe" not in box.list_files(), box.changes())
    box.write("pipe", b"now a file")
    _expect(box.read("pipe") == b"now a file", "a pipe can't be replaced")
    _expect((await arena.shell("cat pipe", box=box)).output == "now a file", "the box doesn't see it")


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
    _expect(result.output == "", result)


@check()
async def no_privileges(arena: Arena) -> None:
    box = await arena.box()
    script = "cp /usr/bin/id ./id && chmod 6755 ./id; ./id -u; ./id -ru; grep -E 'CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs' /proc/self/status; unshare -U true && echo escaped; unshare -m true && echo escaped; true"
    result = await arena.shell(script, box=box)
    words = result.output.split()
    _expect(words[0] == words[1] != "0" and "escaped" not in words, result)
    _expect("CapEff:\t0000000000000000" in result.output and "CapBnd:\t0000000000000000" in result.output, result)
    _expect("NoNewPrivs:\t1" in result.output, result)
    for content in Path(box_directory(arena)).rglob("id") if box_directory(arena) else []:
        _expect(content.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID) == 0, "a setuid file lies on the host")


def box_directory(arena: Arena) -> str:
    """Where the back end keeps files on this host, if it says so."""
    return str(getattr(arena.provider, "directory", ""))


@check()
async def system_read_only(arena: Arena) -> None:
    before = stat.S_IMODE(os.stat("/dev/null").st_mode)
    box = await arena.box()
    code = """
import os
for path in ("/usr/x", "/etc/x", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/x", "/dev/x", "/run/x",
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
    _expect(result.output == "8\n", result)
    _expect(stat.S_IMODE(os.stat("/dev/null").st_mode) == before, "the host's /dev/null changed")


@check()
async def workspace_replaced(arena: Arena) -> None:
    box = await arena.box()
    script = "cd /; rm -rf /workspace/* ; mv /workspace /moved; rmdir /workspace; ln -sfn /etc /workspace; ln -s /etc /workspace/pkg; ln -s / /workspace/tests; true"
    await arena.shell(script, box=box)
    _expect(all("passwd" not in name for name in box.list_files()), box.list_files())
    _expect(set(box.changes().values()) <= {None} and len(box.changes()) == 6, box.changes())
    _refused(lambda: box.write("pkg/passwd", b"x"), OSError)
    _refused(lambda: box.read("pkg/passwd"), FileNotFoundError)


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
    _expect(result.exit_code == 0, result)
    _expect(box.read("locked/inside") == b"x" and box.read("unreadable") == b"y", "files without permission bits are lost")
    _expect(len(box.read("sparse")) == 4 << 20, "a sparse file is wrong")
    _expect((await arena.shell("ls >/dev/null; echo ok", box=box)).output == "ok\n", "the box is unusable")


# ------------------------------------------------------------------------------------------------ the outside


@check()
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
        _expect(result_lines == [], result)
    else:
        _expect(result.output == "", result)


@check()
async def boxes_invisible_to_each_other(arena: Arena) -> None:
    first, second = await arena.box(), await arena.box()
    hold = asyncio.create_task(arena.shell(f"echo {arena.marker} > /tmp/{arena.marker}; echo mine > {arena.marker}; {arena.sleeper()}", box=first, timeout_s=3))
    await asyncio.sleep(0.5)
    find = f"ls /tmp /workspace /dev/shm; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -v grep | grep -c 'sleep 3600'; ls /proc | grep -c '^[0-9]'; cat /proc/self/mountinfo"
    result = await arena.shell(find, box=second)
    _expect(arena.marker not in result.output, "a box sees another box's files or processes")
    lines = result.output.splitlines()
    _expect("0" in lines and box_directory(arena) not in (result.output if box_directory(arena) else ""), f"another box or host paths show: {result.output[-1500:]}")
    await hold
    await arena.survivors()


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
        _expect((await arena.python(leave, box=box)).output == "False\n", "a kernel key can be left for another box")
    for _ in range(arena.config.workers):
        _expect((await arena.python(look, box=other)).output == "False [] []\n", "a run left something for another")


@check()
async def open_files_limited(arena: Arena) -> None:
    result = await arena.python("fs = []\ntry:\n    for _ in range(5000): fs.append(open('/dev/null'))\nexcept OSError as e:\n    print(e.errno)\nimport resource; print(resource.getrlimit(resource.RLIMIT_CORE))")
    _expect(result.output == "24\n(0, 0)\n", result)


@check()
async def kill_of_the_parent_leaves_nothing(arena: Arena) -> None:
    command = [sys.executable, "-m", "strop.sandboxes.conformance", arena.spec, str(arena.base), f"{arena.sleeper()} & {arena.sleeper()}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        directory = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        for _ in range(1500):
            if await _running(arena):
                break
            await asyncio.sleep(0.02)
        _expect(await _running(arena), "the command never ran")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
    _expect(await arena.survivors(10.0) == [], "processes outlived the killed parent")
    if directory:
        other: Sandbox | None = None
        again = type(arena.provider)(arena.config)  # type: ignore[call-arg]
        try:
            other = await again.start(str(arena.base))
            _expect(not os.path.exists(directory), "the next start didn't remove what the killed parent left")
        finally:
            if other is not None:
                await other.stop()
            await again.close()


async def _running(arena: Arena) -> bool:
    from strop.sandboxes.conformance import find_processes

    return bool(find_processes(arena.marker))
