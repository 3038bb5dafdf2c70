"""Checks of the conformance suite: ordinary commands and files, and processes that won't end or won't be content."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import subprocess

from strop.core.errors import SandboxError
from strop.ports import ExecResult
from strop.sandboxes.conformance_arena import Arena, check, expect, refused

# ------------------------------------------------------------------------------------------------ the ordinary


@check()
async def output_and_status(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("echo out; echo err >&2; exit 3", box=box)
    expect(result.exit_code == 3 and result.output == "out\nerr\n" and result.killed_by == "", result)
    missing = await box.exec(["no-such-command-here"], timeout_s=30)
    expect(missing.exit_code == 127, missing)


@check()
async def stdin_closed_or_given(arena: Arena) -> None:
    box = await arena.box()
    expect((await arena.shell("cat; echo end", box=box)).output == "end\n", "stdin was inherited")
    data = bytes(range(256)) * 4096
    counted = await arena.shell("cksum", box=box, stdin=data)
    expected = subprocess.run(["cksum"], input=data, capture_output=True, check=True).stdout.decode()
    expect(counted.output == expected, counted)
    expect((await arena.python("import sys; print(repr(sys.stdin.read()))", box=box)).output == "''\n", "run_python inherited stdin")


@check()
async def environment_clean(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("env; cat /proc/1/environ /proc/self/environ 2>/dev/null; hostname; pwd", box=box)
    expect(arena.secret not in result.output, "an environment variable of the host is visible")
    python = await arena.python("import os; print(dict(os.environ)); print(os.getcwd(), os.uname().nodename)", box=box)
    expect(arena.secret not in python.output, "an environment variable of the host is visible to run_python")
    expect(os.uname().nodename not in python.output.split(), "the host's name is visible")
    expect("LANG" in python.output and "/workspace" in python.output, python)


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
    expect(result.output == "False False False\n", result)
    box.write("pkg/core.py", b"def double(x):\n    return x + x\n")
    for text in (b"return x + 1", b"return 2 * x"):
        box.write("pkg/core.py", b"def double(x):\n    " + text + b"\n")
        tests = await box.run_python(["-m", "unittest", "-q"], timeout_s=30)
        expect((tests.exit_code == 0) == (text == b"return 2 * x"), f"a run saw code that is no longer there: {tests.output}")


@check()
async def file_operations(arena: Arena) -> None:
    box = await arena.box()
    expect(
        box.list_files() == ["README", "pkg/__init__.py", "pkg/core.py", "pkg/extra.py", "tests/__init__.py", "tests/test_core.py"],
        box.list_files(),
    )
    expect(box.changes() == {}, box.changes())
    box.write("pkg/new/deep.py", b"x = 1\n")
    box.write("README", None)
    box.write("pkg/extra.py", b"VALUE = 1\n")  # equal to the base: no change
    expect(box.changes() == {"README": None, "pkg/new/deep.py": b"x = 1\n"}, box.changes())
    seen = await arena.shell(
        "cat pkg/new/deep.py; ls README; echo made > made.txt; rm -r tests; mkdir tests; echo 1 > tests/one; mv pkg/extra.py moved.py",
        box=box,
    )
    expect(seen.output.startswith("x = 1\n"), seen)
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
    expect(box.changes() == expected, box.changes())
    expect(box.list_files() == ["made.txt", "moved.py", "pkg/__init__.py", "pkg/core.py", "pkg/new/deep.py", "tests/one"], box.list_files())
    again = await arena.shell("find . -type f | sort", box=box)
    expect(again.output.split() == [f"./{name}" for name in box.list_files()], again)
    box.write("README", b"back\n")
    expect(box.read("README") == b"back\n" and box.read("pkg/core.py").startswith(b"def"), "read back")
    refused(lambda: box.read("pkg/extra.py"), FileNotFoundError)


@check()
async def replacements_are_changes(arena: Arena) -> None:
    """What stood where something of another kind stands now is gone, and ``changes`` says so, in one step and in two."""
    for script, expected in (
        ("rm README; mkdir README", {"README": None}),
        ("rm README; mkdir README; echo 1 > README/in", {"README": None, "README/in": b"1\n"}),
        ("rm pkg/core.py; ln -s extra.py pkg/core.py; rm README; mkfifo README", {"README": None, "pkg/core.py": None}),
        ("rm -r tests; echo 1 > tests", {"tests": b"1\n", "tests/__init__.py": None, "tests/test_core.py": None}),
        ("rm -r tests; ln -s pkg tests", {"tests/__init__.py": None, "tests/test_core.py": None}),
    ):
        for steps in ([script], script.split("; ")):
            box = await arena.box()
            for step in steps:
                expect((await arena.shell(step, box=box)).exit_code == 0, step)
            expect(box.changes() == expected, f"after {steps}: {box.changes()}")
            await box.stop()


@check()
async def stop_is_final(arena: Arena) -> None:
    box = await arena.box()
    await box.stop()
    await box.stop()
    refused(lambda: box.read("README"), SandboxError)
    with contextlib.suppress(SandboxError):
        await box.exec(["true"], timeout_s=5)
        raise AssertionError("a stopped box ran a command")


@check()
async def many_at_once(arena: Arena) -> None:
    boxes = [await arena.box() for _ in range(6)]
    for number, box in enumerate(boxes):
        box.write("mine.txt", str(number).encode())
    results = await asyncio.gather(*(box.run_python(["-c", "print(open('mine.txt').read())"], timeout_s=60) for box in boxes))
    expect([result.output for result in results] == [f"{number}\n" for number in range(6)], results)


# ------------------------------------------------------------------------------------------------ processes


@check()
async def timeout_kills_the_tree(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell(f"setsid {arena.sleeper()} & ({arena.sleeper()} &) ; {arena.sleeper()}", box=box, timeout_s=0.5)
    expect(result.killed_by == "timeout" and result.exit_code is None, result)
    expect(await arena.survivors() == [], "processes outlived the time-out")
    warm = await arena.python(f"import subprocess; subprocess.run({arena.sleeper().split()})", box=box, timeout_s=0.5)
    expect(warm.killed_by == "timeout", warm)
    expect(await arena.survivors() == [], "processes outlived the warm runner's time-out")
    expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after a time-out")


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
    expect(result.output == "left\n" and result.exit_code == 0, result)
    expect(await arena.survivors() == [], "a daemonised child outlived its run")
    held = await arena.shell(f"{arena.sleeper()} & echo left", box=box, timeout_s=20)
    expect(held.output == "left\n" and held.killed_by == "", f"a child that holds the output pipe delays the result: {held}")


@check()
async def cause_of_death_cannot_be_forged(arena: Arena) -> None:
    box = await arena.box()
    forged = await arena.shell("echo Killed; echo 'MemoryError: Temporary failure in name resolution'; exit 137", box=box)
    expect(forged.exit_code == 137 and forged.killed_by == "", forged)
    suicide = await arena.shell("kill -9 $$", box=box)
    expect(suicide.exit_code is None and suicide.killed_by == "", suicide)
    crash = await arena.python("import ctypes; ctypes.string_at(0)", box=box)
    expect(crash.exit_code is None and crash.killed_by == "", crash)


@check("process_limit")
async def fork_bomb(arena: Arena) -> None:
    box = await arena.box()
    code = "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(20)\n        os._exit(0)\n"
    result = await arena.python(code, box=box)
    expect(result.exit_code not in (0, None) and result.killed_by == "processes", result)
    expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after a fork bomb")


@check("memory_limit", "kernel_evidence")
async def memory_balloon(arena: Arena) -> None:
    box, other = await arena.box(), await arena.box()
    size = 4 * arena.config.memory_mb << 20
    result = await arena.python(f"x = bytearray({size})\nfor i in range(0, {size}, 4096): x[i] = 1\nprint('held')", box=box)
    expect(result.exit_code is None and result.killed_by == "memory", result)
    expect((await arena.shell("echo ok", box=other)).output == "ok\n", "another box suffered")
    expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after running out of memory")


@check("disk_limit")
async def full_disk(arena: Arena) -> None:
    box = await arena.box()
    blocks = 2 * arena.config.disk_mb
    script = f"i=0; while [ $i -lt {blocks} ]; do head -c 1048576 /dev/zero > f$i || break; i=$((i+1)); done; exit 0"
    await arena.shell(script, box=box)
    kept = sum(len(content) for content in box.changes().values() if content)
    expect(kept <= arena.config.disk_mb << 20, f"the layer holds {kept} bytes")
    again = await arena.shell("rm -f f*; echo ok > after; cat after", box=box)
    expect(again.output == "ok\n", f"the box can't free its own disk: {again}")


@check()
async def large_output(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("printf 'begin'; head -c 100000000 /dev/zero | tr '\\0' 'x'; printf 'end'", box=box, timeout_s=60)
    expect(result.output.startswith("beginxxx") and result.output.endswith("xxxend"), result.output[:20])
    expect(len(result.output) < 10_100 and "99990008 characters elided" in result.output, result.output[4990:5060])


@check()
async def invalid_utf8(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell("printf 'a\\377\\376b\\303'", box=box)
    expect(result.output == "a\ufffd\ufffdb\ufffd", repr(result.output))
    named = await arena.shell("touch \"$(printf 'bad\\377name')\"; echo good > good", box=box)
    expect(named.exit_code == 0 and "good" in box.list_files(), box.list_files())
    expect(all(name.isprintable() for name in box.list_files()), "a file name isn't text")
