"""Equal programs on equal files run once; whatever differs, or can't be seen in the files, runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import BUSY_SHARE, ExecResult
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.archive import content_digest
from strop.sandboxes.conformance import run_conformance
from strop.sandboxes.conformance_arena import CHECKS
from strop.sandboxes.reuse import ReusingBox, ReusingProvider

HERE = "tests.sandboxes.test_reuse"
TEST = ("-m", "unittest", "discover", "-s", "tests")


def reusing(config: SandboxConfig) -> ReusingProvider:
    return ReusingProvider(BubblewrapProvider(config))


class _Counting:
    """Hands out real boxes and counts what runs in them."""

    def __init__(self, provider: BubblewrapProvider) -> None:
        self.provider = provider
        self.runs = 0
        self.error: SandboxError | None = None
        self.busy_share: float | None = None

    @property
    def capabilities(self):
        return self.provider.capabilities

    async def start(self, base, *, snapshot=None, egress=None):
        box = await self.provider.start(base, snapshot=snapshot, egress=egress)
        real = box.run_python

        async def run_python(argv, *, timeout_s) -> ExecResult:
            self.runs += 1
            if self.error is not None:
                raise self.error
            result = await real(argv, timeout_s=timeout_s)
            # How much of its limit a loop gets is the machine's business; what follows from it is ours.
            return result if self.busy_share is None else replace(result, cpu_s=self.busy_share * timeout_s)

        box.run_python = run_python  # type: ignore[method-assign]
        return box

    async def close(self) -> None:
        pass


async def _two(counting: _Counting, base: Path, **options) -> tuple[ReusingBox, ReusingBox]:
    provider = ReusingProvider(counting, **options)
    return await provider.start(str(base)), await provider.start(str(base))  # type: ignore[return-value]


def _script(box: ReusingBox, text: str, name: str = "work.py") -> None:
    box.write(name, text.encode())


def test_equal_files_are_tested_once(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, two = await _two(counting, base)
        first = await one.run_python(TEST, timeout_s=10)
        again = await one.run_python(TEST, timeout_s=10)
        other = await two.run_python(TEST, timeout_s=10)
        assert counting.runs == 1
        assert first.duration_s > 0
        assert again.duration_s == other.duration_s == 0
        assert first.output == again.output == other.output
        assert "OK" in first.output

    session.run(work)


@pytest.mark.parametrize("name", ["work.py", "other.txt"])
def test_any_other_content_runs(session, base: Path, name: str) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, two = await _two(counting, base)
        _script(one, "print('hello')")
        _script(two, "print('hello')")
        two.write(name, b"print('bye')")
        await one.run_python(["work.py"], timeout_s=10)
        await two.run_python(["work.py"], timeout_s=10)
        assert counting.runs == 2
        two.write(name, b"print('hello')" if name == "work.py" else None)
        assert (await two.run_python(["work.py"], timeout_s=10)).output == "hello\n"
        assert counting.runs == 2

    session.run(work)


def test_other_arguments_run(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, _ = await _two(counting, base)
        _script(one, "import sys; print(sys.argv[1:])")
        outputs = [(await one.run_python(["work.py", *more], timeout_s=10)).output for more in ((), ("a",), ("a", "b"), ("a",))]
        assert outputs == ["[]\n", "['a']\n", "['a', 'b']\n", "['a']\n"]
        assert counting.runs == 3

    session.run(work)


@pytest.mark.parametrize(
    "leaves",
    ["open('left', 'w').close()", "os.mkdir('left')", "os.symlink('/etc', 'left')", "os.mkfifo('left')", "os.chmod('work.py', 0o600)"],
)
def test_what_leaves_something_runs_each_time(session, base: Path, leaves: str) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, two = await _two(counting, base)
        for box in (one, two):
            _script(box, f"import os; {leaves}; print('done')")
            assert (await box.run_python(["work.py"], timeout_s=10)).output == "done\n"
        assert counting.runs == 2
        assert content_digest(await one.snapshot()) == content_digest(await two.snapshot())

    session.run(work)


@pytest.mark.parametrize("prepare", ["mkdir hidden", "ln -s /etc/hostname hidden", "mkfifo hidden"])
def test_an_agent_cannot_hide_what_decides_from_the_key(session, base: Path, prepare: str) -> None:
    """What isn't in ``changes()`` must be in the key, or the answer of a prepared box would be given to an honest one."""

    async def work(provider):
        counting = _Counting(provider)
        prepared, honest = await _two(counting, base)
        program = "import os; print('OK' if os.path.lexists('hidden') else 'FAILED')"
        _script(prepared, program)
        _script(honest, program)
        await prepared.exec(["sh", "-c", prepare], timeout_s=10)
        assert (await prepared.run_python(["work.py"], timeout_s=10)).output == "OK\n"
        assert (await honest.run_python(["work.py"], timeout_s=10)).output == "FAILED\n"

    session.run(work)


def test_a_run_finds_nothing_of_an_earlier_one_but_the_files(session, base: Path) -> None:
    """The condition under which reuse is safe."""

    async def work(provider):
        box = await provider.start(str(base))
        box.write("work.py", b"import os; print(os.path.exists('/tmp/seen'), os.path.exists('/dev/shm/seen')); open('/tmp/seen', 'w')")
        box.write("more.py", b"import os; print(os.path.exists('/tmp/seen')); open('/dev/shm/seen', 'w')")
        for _ in range(2):
            assert (await box.run_python(["work.py"], timeout_s=10)).output == "False False\n"
            assert (await box.run_python(["more.py"], timeout_s=10)).output.startswith("False\n")

    session.run(work)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import time; time.sleep(60)", "timeout"),
        ("import threading; threading.Event().wait()", "timeout"),
        ("x = [bytearray(1 << 20) for _ in range(1 << 20)]", "memory"),
    ],
)
def test_a_run_that_was_stopped_by_something_else_than_its_own_work_is_run_again(session, base: Path, text: str, cause: str) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, two = await _two(counting, base)
        limit_s = 0.5 if cause == "timeout" else 30.0
        for box in (one, two):
            _script(box, text)
            assert (await box.run_python(["work.py"], timeout_s=limit_s)).killed_by == cause
        assert counting.runs == 2

    session.run(work)


@pytest.mark.parametrize(("busy_share", "runs"), [(0.9, 2), (BUSY_SHARE, 2), (0.2, 4)])
def test_an_endless_loop_runs_once_under_each_limit_unless_it_was_starved(session, base: Path, busy_share: float, runs: int) -> None:
    async def work(provider):
        counting = _Counting(provider)
        counting.busy_share = busy_share
        boxes = await _two(counting, base)
        for limit_s in (0.6, 0.3):
            for box in boxes:
                _script(box, "import os\nos.fork()\nwhile True: pass")
                result = await box.run_python(["work.py"], timeout_s=limit_s)
                assert (result.exit_code, result.killed_by) == (None, "timeout")
        assert counting.runs == runs

    session.run(work)


def test_processor_time_of_a_run_is_counted(session, base: Path) -> None:
    async def work(provider):
        box = await provider.start(str(base))
        loop = "import os, time\nos.fork()\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
        _script(box, loop + "os.wait() if os.getpid() == 1 else None")
        assert 0.55 <= (await box.run_python(["work.py"], timeout_s=60)).cpu_s < 5
        _script(box, "import time; time.sleep(0.3)")
        assert (await box.run_python(["work.py"], timeout_s=60)).cpu_s < 0.25
        _script(box, "import os\nos.fork()\nwhile True: pass")
        killed = await box.run_python(["work.py"], timeout_s=1.5)
        assert killed.killed_by == "timeout"
        assert 0.02 < killed.cpu_s < 3

    session.run(work)


def test_a_broken_box_keeps_nothing_and_blocks_nobody(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, two = await _two(counting, base)
        counting.error = SandboxError("broken")
        with pytest.raises(SandboxError, match="broken"):
            await one.run_python(TEST, timeout_s=10)
        counting.error = None
        assert "OK" in (await two.run_python(TEST, timeout_s=10)).output

    session.run(work)


def test_equal_runs_at_the_same_time_are_one(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        boxes = [*await _two(counting, base)]
        boxes += [await boxes[0].fork() for _ in range(4)]
        results = await asyncio.gather(*(box.run_python(TEST, timeout_s=10) for box in boxes))
        assert counting.runs == 1
        assert len({result.output for result in results}) == 1

    session.run(work)


def test_beside_a_shell_everything_runs(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, _ = await _two(counting, base)
        shell = await one.open_shell()
        await one.run_python(TEST, timeout_s=10)
        await one.run_python(TEST, timeout_s=10)
        await shell.close()
        assert counting.runs == 2

    session.run(work)


def test_the_least_recently_used_result_goes_first(session, base: Path) -> None:
    async def work(provider):
        counting = _Counting(provider)
        one, _ = await _two(counting, base, capacity=2)
        _script(one, "import sys; print(sys.argv[1])")
        for argument in ("a", "b", "a", "c", "a", "b"):
            assert (await one.run_python(["work.py", argument], timeout_s=10)).output == f"{argument}\n"
        assert counting.runs == 4  # a, b, c, and b again

    session.run(work)


@pytest.mark.timeout(600)
def test_it_keeps_the_contract_of_a_box(usable_host: None) -> None:
    asyncio.run(run_conformance(f"{HERE}:reusing", only=["stop_is_final"]))  # loads the checks
    basic = ("strop.sandboxes.conformance_checks", "strop.sandboxes.conformance_state")
    names = [check.name for check in CHECKS if check.run.__module__ in basic]
    results = asyncio.run(run_conformance(f"{HERE}:reusing", only=names))
    assert [result for result in results if result.status == "fail"] == []
    assert sum(result.status == "pass" for result in results) >= 20
