"""Checks of the conformance suite: persistent shells, snapshots and forks, ways out; and the heavy ones, which use a box up."""

from __future__ import annotations

import asyncio
import contextlib
import resource

from strop.core.errors import SandboxError
from strop.ports import Egress, Sandbox
from strop.sandboxes.conformance_arena import Arena, check, expect

_TESTS = ["-m", "unittest", "-q"]


async def _refuses(arena: Arena, what: str, **wanted: object) -> None:
    """Fail unless a box with these arguments is refused."""
    box: Sandbox | None = None
    with contextlib.suppress(SandboxError):
        box = await arena.provider.start(str(arena.base), **wanted)  # type: ignore[arg-type]
    if box is not None:
        await box.stop()
        raise AssertionError(f"a box was started with {what}")


# ------------------------------------------------------------------------------------------------ shells


@check("shells")
async def shell_keeps_state(arena: Arena) -> None:
    box = await arena.box()
    shell = await box.open_shell()
    first = await shell.run("cd pkg; export A='x y'; f() { echo called $1; }; sleep 0.01 & echo out; echo err >&2; false", timeout_s=60)
    expect(first.exit_code == 1 and first.output == "out\nerr\n", first)
    second = await shell.run('pwd; echo "$A"; f 1; wait; cat; echo end', timeout_s=60)
    expect(second.exit_code == 0 and second.output.splitlines()[:3] == ["/workspace/pkg", "x y", "called 1"], second)
    expect(second.output.endswith("end\n"), f"a command in a shell waits for stdin: {second}")
    plain = await shell.run("printf 'no newline'", timeout_s=60)
    expect(plain.output == "no newline", plain)
    quoted = await shell.run("printf '%s|' 'a  b' \"c'd\" \"$(printf 'e\\nf')\" 日本; printf '\\377'", timeout_s=60)
    expect(quoted.output == "a  b|c'd|e\nf|日本|\ufffd", repr(quoted.output))
    large = await shell.run("head -c 3000000 /dev/zero | tr '\\0' x", timeout_s=120)
    expect(len(large.output) < 10_100 and "2990000 characters elided" in large.output, large.output[4990:5060])
    await shell.close()
    await shell.close()
    expect((await arena.shell("pwd", box=box)).output == "/workspace\n", "the shell's state is left in the box")


@check("shells")
async def shell_beside_commands(arena: Arena) -> None:
    box = await arena.box()
    box.write("before", b"1\n")
    shell = await box.open_shell()
    await shell.run("cat before > from-shell; rm README", timeout_s=60)
    expect(box.read("from-shell") == b"1\n" and "README" not in box.list_files(), box.list_files())
    expect((await arena.shell("cat from-shell; echo 2 > from-command", box=box)).output == "1\n", "a command doesn't see the shell's file")
    box.write("d/from-host", b"3\n")
    expect((await shell.run("cat from-command d/from-host", timeout_s=60)).output == "2\n3\n", "the shell doesn't see others' files")
    slow = await arena.shell(f"{arena.sleeper()} & {arena.sleeper()}", box=box, timeout_s=0.5)
    expect(slow.killed_by == "timeout" and await arena.survivors() == [], f"a command beside a shell isn't killed as a whole: {slow}")
    left = await arena.shell(f"{arena.sleeper()} & echo left", box=box)
    expect(left.output == "left\n" and await arena.survivors() == [], f"a command beside a shell leaves something: {left}")
    expect((await shell.run("echo alive", timeout_s=60)).output == "alive\n", "the shell died with a command beside it")
    changed = box.changes()
    await shell.close()
    expect(changed == {"README": None, "before": b"1\n", "d/from-host": b"3\n", "from-command": b"2\n", "from-shell": b"1\n"}, changed)
    expect(box.changes() == changed, f"closing the shell changed the workspace: {box.changes()}")
    expect((await arena.shell("cat d/from-host", box=box)).output == "3\n", "the box is at odds with itself after its shell")


@check("shells")
async def shell_ends_as_a_whole(arena: Arena) -> None:
    box = await arena.box()
    shell = await box.open_shell()
    with contextlib.suppress(SandboxError):
        await box.open_shell()
        raise AssertionError("two shells at once")
    await shell.run(f"{arena.sleeper()} & setsid {arena.sleeper()} >/dev/null 2>&1 & echo started", timeout_s=60)
    expect(await arena.is_running(), "background processes don't live on between commands")
    late = await shell.run("sleep 600", timeout_s=0.5)
    expect((late.exit_code, late.killed_by) == (None, "timeout"), late)
    expect(await arena.survivors() == [], "background processes outlived the session")
    with contextlib.suppress(SandboxError):
        await shell.run("true", timeout_s=60)
        raise AssertionError("a shell that has ended ran a command")
    again = await box.open_shell()
    ended = await again.run(f"{arena.sleeper()} & echo last; exit 3", timeout_s=60)
    expect(ended.output == "last\n" and ended.killed_by == "" and await arena.survivors() == [], ended)
    third = await box.open_shell()
    await third.run(f"{arena.sleeper()} & true", timeout_s=60)
    await box.stop()
    expect(await arena.survivors() == [], "stopping the box left its shell's processes")


@check("shells", "memory_limit", "kernel_evidence")
async def shell_cause_of_death(arena: Arena) -> None:
    box = await arena.box()
    shell = await box.open_shell()
    forged = await shell.run("echo Killed; (exit 137)", timeout_s=60)
    expect((forged.exit_code, forged.killed_by) == (137, ""), forged)
    balloon = f"python3 -c 'x = bytearray({4 * arena.config.memory_mb << 20}); print(len(x))'"
    result = await shell.run(f"{balloon}; echo code $?; exit 9", timeout_s=120)
    expect(result.killed_by == "memory", result)
    expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after its shell ran out of memory")


# ------------------------------------------------------------------------------------------------ snapshots


async def _make_changes(arena: Arena, box: Sandbox) -> None:
    script = (
        "rm README; mv pkg/extra.py moved.py; mkdir -p a/b empty; echo 1 > a/b/c; chmod 755 a/b/c; ln -s ../moved.py a/link; "
        "mkfifo a/pipe; rm -r tests; mkdir tests; cp pkg/core.py tests/new.py; printf '\\377\\0' > binary; : > nothing"
    )
    expect((await arena.shell(script, box=box)).exit_code == 0, "making changes failed")


_LOOK = "find . | sort; stat -c '%n %a %F' a/b/c a/link a/pipe empty nothing; readlink a/link; sha256sum binary moved.py a/b/c tests/new.py"


@check("snapshots")
async def snapshot_restores(arena: Arena) -> None:
    box = await arena.box()
    await _make_changes(arena, box)
    snapshot = await box.snapshot()
    again = await arena.provider.start(str(arena.base), snapshot=snapshot)
    expect(again.changes() == box.changes() and again.list_files() == box.list_files(), again.changes())
    seen, seen_again = await arena.shell(_LOOK, box=box), await arena.shell(_LOOK, box=again)
    expect(seen.exit_code == 0 and seen.output == seen_again.output, f"{seen.output!r:.200} against {seen_again.output!r:.200}")
    expect(await again.snapshot() == snapshot, "the snapshot of what was restored differs")
    await box.stop()
    expect((await arena.shell(_LOOK, box=again)).output == seen.output, "the restored box needs the one that it came from")
    for damaged in (b"", b"nonsense", snapshot[:-1], snapshot[:100] + bytes([snapshot[100] ^ 1]) + snapshot[101:]):
        await _refuses(arena, "a damaged snapshot", snapshot=damaged)


@check("snapshots")
async def forks_are_independent(arena: Arena) -> None:
    box = await arena.box()
    await _make_changes(arena, box)
    forks = [await box.fork() for _ in range(2)]
    before = box.changes()
    for number, fork in enumerate(forks):
        await arena.shell(f"echo {number} > mine; rm a/b/c; echo {number} > moved.py", box=fork)
        fork.write("pkg/core.py", b"%d\n" % number)
    expect(box.changes() == before, "a fork changed the box that it came from")
    for number, fork in enumerate(forks):
        seen = await arena.shell("cat mine moved.py pkg/core.py; ls a/b", box=fork)
        expect(seen.output == f"{number}\n" * 3, f"a fork sees another's changes: {seen}")
    await arena.shell("echo parent > moved.py", box=box)
    expect(forks[0].read("moved.py") == b"0\n", "the box changed its fork")
    await box.stop()
    grandchild = await forks[1].fork()
    expect(grandchild.changes() == forks[1].changes(), "a fork of a fork differs")


@check("snapshots")
async def resuming_gives_the_same_verdict(arena: Arena) -> None:
    turns = [
        "printf 'def double(x):\\n    return x\\n' > pkg/core.py",
        "mkdir -p notes && echo plan > notes/plan",
        "printf 'def double(x):\\n    return x + x\\n' > pkg/core.py",
        "rm notes/plan README; printf 'import pkg.core\\n' >> tests/__init__.py",
        "printf 'def double(x):\\n    return 3 * x\\n' > pkg/core.py",
    ]

    async def verdict(box: Sandbox) -> tuple[int | None, list[str]]:
        result = await box.run_python(_TESTS, timeout_s=120)
        return result.exit_code, box.list_files()

    straight = await arena.box()
    verdicts, snapshots = [], []
    for turn in turns:
        await arena.shell(turn, box=straight)
        verdicts.append(await verdict(straight))
        snapshots.append(await straight.snapshot())
    expect([code == 0 for code, _ in verdicts] == [False, False, True, True, False], verdicts)
    final = straight.changes()
    for number, snapshot in enumerate(snapshots):
        box = await arena.provider.start(str(arena.base), snapshot=snapshot)
        expect(await verdict(box) == verdicts[number], f"resumed after turn {number + 1}: another verdict")
        for turn in turns[number + 1 :]:
            await arena.shell(turn, box=box)
        expect(await verdict(box) == verdicts[-1] and box.changes() == final, f"resumed after turn {number + 1}: another end")
        await box.stop()


# ------------------------------------------------------------------------------------------------ the way out


@check()
async def egress_is_declared(arena: Arena) -> None:
    capabilities = arena.provider.capabilities
    expect("none" in capabilities.egress, capabilities.egress)
    for wanted in (Egress(mode="allowlist", hosts=("files.invalid",)), Egress(mode="public")):
        if wanted.mode not in capabilities.egress:
            expect(f"egress_{wanted.mode}" in capabilities.missing, f"{wanted.mode} is neither there nor declared missing")
            await _refuses(arena, f"egress {wanted.mode!r}, which is missing", egress=wanted)
    if "allowlist" in capabilities.egress:
        for hosts in (("192.0.2.1",), ("a b",), ("host:port",), ("*",)):
            await _refuses(arena, f"the allow-list {hosts}", egress=Egress(mode="allowlist", hosts=hosts))


@check("egress_allowlist")
async def allow_list_is_closed(arena: Arena) -> None:
    """What isn't in the list is refused; that what is in it works takes a server, and a test of its own."""
    box = await arena.provider.start(str(arena.base), egress=Egress(mode="allowlist", hosts=("files.invalid",)))
    code = """
import os, socket
def attempt(what, port, data=b""):
    try:
        with socket.create_connection(("192.0.2.1", port), timeout=20) as s:
            s.sendall(data)
            got = s.recv(12)
            print(what, "refused" if got in (b"", b"HTTP/1.1 403") else got)
    except OSError:
        print(what, "refused")
attempt("host", 80, b"GET / HTTP/1.1\\r\\nHost: other.invalid\\r\\n\\r\\n")
attempt("no host", 80, b"GET / HTTP/1.1\\r\\n\\r\\n")
attempt("address", 80, b"GET / HTTP/1.1\\r\\nHost: 192.0.2.1\\r\\n\\r\\n")
attempt("connect", 80, b"CONNECT files.invalid:443 HTTP/1.1\\r\\nHost: files.invalid\\r\\n\\r\\n")
attempt("no name", 443, b"\\x16\\x03\\x01\\x00\\x05\\x01\\x00\\x00\\x01\\x00")
attempt("not tls", 443, b"SSH-2.0-x\\r\\n\\r\\n")
attempt("port", 22)
try:
    print(socket.getaddrinfo("other.invalid", 80))
except OSError:
    print("name refused")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.3)
try:
    s.sendto(b"x", ("192.0.2.1", 9999)); print(s.recv(10))
except OSError:
    print("datagram refused")
print([name for name in os.environ if "proxy" in name.lower()])
"""
    result = await arena.python(code, box=box, timeout_s=120)
    expect(result.exit_code == 0 and result.output.count("refused") == 9 and result.output.endswith("[]\n"), result)
    neighbour = await arena.provider.start(str(arena.base), egress=Egress(mode="allowlist", hosts=("files.invalid",)))
    listen = """
import socket
s = socket.create_server(("0.0.0.0", 4242)); s.settimeout(2)
try:
    s.accept(); print("reached")
except OSError:
    print("alone")
"""
    address = (await arena.python("import socket; print(socket.gethostbyname('box'), open('/proc/net/fib_trie').read())", box=box)).output
    seen = sorted({word for word in address.split() if word.startswith("10.201.")})
    reach = f"""
import socket
for address in {seen!r}:
    try:
        socket.create_connection((address, 4242), timeout=1)
    except OSError:
        pass
"""
    listening, _ = await asyncio.gather(arena.python(listen, box=box), arena.python(reach, box=neighbour))
    expect(listening.output == "alone\n", "boxes of one allow-list reach each other")


# ------------------------------------------------------------------------------------------------ heavy


@check(heavy=True)
async def gigabyte_of_output(arena: Arena) -> None:
    box = await arena.box()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await arena.shell("printf begin; head -c 1000000000 /dev/zero | tr '\\0' x; printf end", box=box, timeout_s=600)
    expect(result.output.startswith("beginxxx") and result.output.endswith("xxxend"), result.output[:20])
    expect("999990008 characters elided" in result.output, result.output[4990:5060])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    expect(grown < 64 << 10, f"reading it took {grown} KiB of memory")


@check("process_limit", heavy=True)
async def growing_fork_bomb(arena: Arena) -> None:
    box, other = await arena.box(), await arena.box()
    bomb = f"b() {{ b | b & }}; {arena.sleeper()} & b; sleep 600"
    result = await arena.shell(bomb, box=box, timeout_s=2)
    expect(result.exit_code != 0, result)
    expect(await arena.survivors(20.0) == [], "a fork bomb outlived its run")
    for one in (other, box):
        expect((await arena.shell("echo ok", box=one, timeout_s=60)).output == "ok\n", "a box is unusable after a fork bomb")


@check("disk_limit", heavy=True)
async def full_scratch(arena: Arena) -> None:
    box = await arena.box()
    limit = arena.config.disk_mb << 20
    fill = "i=0; while head -c 1048576 /dev/zero > $d/f$i 2>/dev/null && [ $i -lt 200 ]; do i=$((i+1)); done; du -sk $d"
    script = f"for d in /tmp /dev/shm; do {fill}; done"
    result = await arena.shell(script, box=box, timeout_s=120)
    sizes = [int(line.split()[0]) << 10 for line in result.output.splitlines() if "/" in line]
    expect(result.killed_by == "memory" or (len(sizes) == 2 and max(sizes) <= limit + (1 << 20)), f"scratch space isn't limited: {result}")
    expect((await arena.shell("echo ok > after; cat after", box=box)).output == "ok\n", "the box is unusable after full scratch space")


@check("disk_limit", heavy=True)
async def many_small_files(arena: Arena) -> None:
    box = await arena.box()
    code = """
import os
os.mkdir("many")
made = 0
try:
    for made in range(40000):
        open(f"many/{made}", "w").close()
except OSError:
    pass
print(made)
"""
    result = await arena.python(code, box=box, timeout_s=120)
    expect(0 < int(result.output or 0) < 39_999, f"the number of files isn't limited: {result}")
    expect((await arena.shell("rm -rf many; echo ok > after; cat after", box=box, timeout_s=120)).output == "ok\n", "the box is unusable")
