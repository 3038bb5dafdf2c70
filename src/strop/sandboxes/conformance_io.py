"""Checks of the conformance suite: files and commands as Inspect's self check has them, in terms of this port."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time

from strop.sandboxes.conformance_arena import Arena, check, expect, refused

_NAMES = (
    "plain.txt",
    "with space",
    "quo'te\"s",
    "dollar $HOME `x`",
    "-dash",
    "semi;colon&",
    "ünïcode-日本",
    "new\nline",
    "a/b/c/deep",
    ".hidden",
)
_CONTENTS = {
    "text": b"hello\nworld\n",
    "no newline": b"end",
    "empty": b"",
    "crlf": b"one\r\ntwo\r\n",
    "unicode": "héllo wörld 你好 🎉 \u200f\n".encode(),
    "every byte": bytes(range(256)) * 3,
    "invalid utf-8": b"\xff\xfe\xc3\x28",
    "only zeros": bytes(4096),
}


@check()
async def contents_survive(arena: Arena) -> None:
    box = await arena.box()
    for name, content in _CONTENTS.items():
        box.write("f", content)
        expect(box.read("f") == content, f"{name}: read back differs")
        summed = await arena.shell("sha256sum < f; cat f > g", box=box)
        expect(summed.output.split()[:1] == [hashlib.sha256(content).hexdigest()], f"{name}: the box sees other bytes: {summed}")
        expect(box.read("g") == content, f"{name}: what the box wrote reads differently")


@check()
async def large_files(arena: Arena) -> None:
    box = await arena.box()
    content = bytes(range(256)) * (arena.config.disk_mb << 10)  # a quarter of the box's disk
    box.write("large", content)
    expect(box.read("large") == content, "a large file reads back differently")
    copied = await arena.shell("cat large > copy && sha256sum < copy", box=box)
    expect(copied.output.split()[0] == hashlib.sha256(content).hexdigest() and box.read("copy") == content, copied)
    box.write("large", b"short")
    expect(box.read("large") == b"short", "a shorter content leaves a rest")


@check()
async def names_survive(arena: Arena) -> None:
    box = await arena.box()
    for number, name in enumerate(_NAMES):
        box.write(name, str(number).encode())
    expect(set(_NAMES) <= set(box.list_files()), box.list_files())
    code = f"import sys; names = {_NAMES!r}; print([open(name).read() for name in names])"
    seen = await arena.python(code, box=box)
    expect(seen.output.strip() == str([str(number) for number in range(len(_NAMES))]), seen)
    await arena.python(f"import os; [os.rename(name, 'x' + name) for name in {_NAMES!r} if '/' not in name]", box=box)
    expect({f"x{name}" for name in _NAMES if "/" not in name} <= set(box.list_files()), box.list_files())


@check()
async def wrong_paths_are_refused(arena: Arena) -> None:
    box = await arena.box()
    for path in ("nowhere", "pkg", "pkg/nowhere/x", "README/below", "x" * 5000, "tests/"):
        refused(lambda path=path: box.read(path), OSError)
    refused(lambda: box.write("pkg", b"x"), IsADirectoryError)
    refused(lambda: box.write("pkg", None), IsADirectoryError)
    refused(lambda: box.write("README/below", b"x"), NotADirectoryError)
    refused(lambda: box.write("nowhere", None), FileNotFoundError)
    expect(box.changes() == {}, box.changes())


@check()
async def size_limits_hold_from_both_sides(arena: Arena) -> None:
    box = await arena.box()
    over = (arena.config.disk_mb << 20) + 1
    refused(lambda: box.write("over", bytes(over)), OSError)
    await arena.shell(f"truncate -s {over} sparse 2>/dev/null; truncate -s 1T huge 2>/dev/null; true", box=box)
    expect(all(len(content or b"") < over for content in box.changes().values()), "a file over the limit was kept")


@check()
async def modes_and_links_survive(arena: Arena) -> None:
    box = await arena.box()
    box.write("tool", b"#!/bin/sh\necho ran\n")
    await arena.shell("chmod 755 tool; chmod 600 README; ln -s pkg/core.py link; mv tests moved; mkdir empty; chmod 700 empty", box=box)
    seen = await arena.shell("./tool; head -1 link; stat -c %a README empty tool | tr '\\n' ' '; ls moved tests 2>&1 | wc -l", box=box)
    expect(seen.output.startswith("ran\ndef double(x):\n600 700 755 "), seen)
    box.write("tool", b"#!/bin/sh\necho again\n")
    expect((await arena.shell("./tool", box=box)).output == "again\n", "writing a file took its mode away")
    moved = {name for name in box.changes() if name.startswith(("moved/", "tests/"))}
    expect(moved == {"moved/__init__.py", "moved/test_core.py", "tests/__init__.py", "tests/test_core.py"}, box.changes())


# ------------------------------------------------------------------------------------------------ commands


@check()
async def exit_codes(arena: Arena) -> None:
    box = await arena.box()
    for code in (0, 1, 2, 42, 126, 128, 130, 137, 139, 143, 255):
        result = await arena.shell(f"exit {code}", box=box)
        expect((result.exit_code, result.killed_by) == (code, ""), result)
    box.write("not-executable", b"#!/bin/sh\n")
    expect((await box.exec(["./not-executable"], timeout_s=30)).exit_code == 126, "a file that can't be executed isn't 126")
    expect((await box.exec(["pkg"], timeout_s=30)).exit_code in (126, 127), "a directory was executed")


@check()
async def signals_are_not_timeouts(arena: Arena) -> None:
    box = await arena.box()
    for signal in ("TERM", "KILL", "SEGV", "INT", "HUP"):
        # A child of the command: some back ends start commands as process 1, which a signal without a handler can't end.
        result = await arena.shell(f"sh -c 'kill -{signal} $$'; code=$?; [ $code -gt 128 ] && exit 7", box=box)
        expect((result.exit_code, result.killed_by) == (7, "") and result.duration_s < 25, result)
    result = await arena.shell("kill -KILL $$", box=box)
    expect((result.exit_code, result.killed_by) == (None, ""), result)


@check()
async def arguments_survive(arena: Arena) -> None:
    box = await arena.box()
    arguments = [
        "",
        " ",
        "a b",
        "quo'te",
        '"double"',
        "$HOME",
        "`id`",
        "$(id)",
        "*",
        "\\",
        "new\nline",
        "日本",
        "-n",
        "--",
        ";true",
        "&",
        "#x",
    ]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    for result in (
        await box.exec(["python3", "-c", code, *arguments], timeout_s=60),
        await box.run_python(["-c", code, *arguments], timeout_s=60),
    ):
        expect(result.output.strip() == json.dumps(arguments), result)
    long = "x" * 60_000
    expect((await box.exec(["sh", "-c", 'printf %s "$1" | wc -c', "sh", long], timeout_s=60)).output.strip() == "60000", "a long argument")


@check()
async def stdin_survives(arena: Arena) -> None:
    box = await arena.box()
    for name, data in {
        **_CONTENTS,
        "shell": b"$(touch hacked) `touch hacked` '; touch hacked #\n",
        "large": bytes(range(256)) * 8192,
    }.items():
        if data:
            result = await arena.shell("sha256sum", box=box, stdin=data)
            expect(result.output.split()[:1] == [hashlib.sha256(data).hexdigest()], f"{name}: {result}")
    expect("hacked" not in box.list_files(), "stdin was interpreted")
    unread = await arena.shell("exit 3", box=box, stdin=bytes(4 << 20))
    expect(unread.exit_code == 3, f"a command that doesn't read its stdin: {unread}")


@check()
async def output_after_closing_it(arena: Arena) -> None:
    box = await arena.box()
    closed = await arena.shell("exec >&- 2>&-; sleep 0.2; echo x > later; exit 5", box=box)
    expect(closed.exit_code == 5 and box.read("later") == b"x\n", f"a command was over when it closed its output: {closed}")
    broken = await arena.shell("yes | head -n 1; echo done", box=box)
    expect(broken.output == "y\ndone\n", broken)


@check()
async def zombies_do_no_harm(arena: Arena) -> None:
    box = await arena.box()
    code = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.1); print('left', flush=True); os._exit(0)"
    )
    for _ in range(3):
        result = await arena.python(code, box=box)
        expect(result.output == "left\n" and result.exit_code == 0, result)


@check()
async def no_terminal(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.shell(
        "for n in 0 1 2; do [ -t $n ] && echo tty $n; done; (: < /dev/tty) 2>/dev/null && echo terminal; true", box=box
    )
    expect(result.output == "", f"a command has a terminal: {result}")


@check()
async def caller_can_cancel(arena: Arena) -> None:
    box = await arena.box()
    task = asyncio.create_task(arena.shell(f"{arena.sleeper()} & {arena.sleeper()}", box=box, timeout_s=600))
    started = time.monotonic()
    while not await arena.is_running() and time.monotonic() < started + 30:
        await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    expect(await arena.survivors(10.0) == [], "processes outlived a cancelled call")
    expect((await arena.shell("echo ok", box=box)).output == "ok\n", "the box is unusable after a cancelled call")


# ------------------------------------------------------------------------------------------------ surroundings


@check()
async def clock_is_the_hosts(arena: Arena) -> None:
    box = await arena.box()
    code = """
import time
for clock in (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC):
    try:
        time.clock_settime(clock, 0.0)
        print("set")
    except (OSError, PermissionError):
        pass
a = time.monotonic(); time.sleep(0.05); assert time.monotonic() > a
print(time.time(), time.tzname[0])
"""
    before = time.time()
    words = (await arena.python(code, box=box)).output.split()
    expect(len(words) == 2 and before - 1 <= float(words[0]) <= time.time() + 1 and words[1] == "UTC", words)


@check()
async def locale_is_utf8(arena: Arena) -> None:
    box = await arena.box()
    code = "import sys, locale; print(sys.getfilesystemencoding(), sys.stdout.encoding, locale.getpreferredencoding(), 'é日🎉')"
    for result in (await arena.python(code, box=box), await box.exec(["python3", "-c", code], timeout_s=60)):
        expect(result.output.lower().split() == ["utf-8", "utf-8", "utf-8", "é日🎉"], result)


@check()
async def owner_and_git(arena: Arena) -> None:
    box = await arena.box()
    box.write("written.py", b"x = 1\n")
    script = "id -u; stat -c %u . README pkg pkg/core.py written.py; touch made; stat -c %u made; rm -r pkg; mkdir pkg; echo x > README"
    words = (await arena.shell(script, box=box)).output.split()
    expect(len(words) == 7 and len(set(words)) == 1 and words[0] != "0", f"the workspace doesn't belong to the box's user: {words}")
    git = (
        "command -v git >/dev/null || { echo none; exit; }; git init -q --template= . && git add -A && "
        "git -c user.name=a -c user.email=a@b commit -qm one && git status --porcelain && git log --format=%s"
    )
    result = await arena.shell(git, box=box)
    expect(result.output in ("one\n", "none\n") and result.exit_code == 0, f"git doesn't work in the workspace: {result}")
    again = await arena.shell("command -v git >/dev/null && git status --porcelain || true", box=box)
    expect(again.output == "", f"git is at odds with its own files in the next command: {again}")
