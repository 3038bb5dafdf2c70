"""What is particular to the bubblewrap back end; the contract itself is tested by the conformance suite."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.bubblewrap import judge
from strop.sandboxes.cgroups import Evidence, Group
from strop.sandboxes.conformance_arena import find_processes
from strop.sandboxes.worker import RunReport, Worker


def _report(status: int | None, *, timed_out: bool = False, oom: int = 0, refused: int = 0) -> RunReport:
    after = Evidence(oom_kills=oom, limit_hits=oom, refused_forks=refused)
    return RunReport(status=status, timed_out=timed_out, before=Evidence(), after=after, delta_fd=-1, duration_s=0.0)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (_report(0), (0, "")),
        (_report(137 << 8), (137, "")),
        (_report(signal.SIGKILL), (None, "")),
        (_report(signal.SIGKILL, oom=1), (None, "memory")),
        (_report(None, oom=1), (None, "memory")),
        (_report(0, oom=1), (0, "")),
        (_report(1 << 8, oom=1), (1, "memory")),
        (_report(1 << 8, refused=5), (1, "processes")),
        (_report(0, refused=5), (0, "")),
        (_report(None, timed_out=True, refused=5), (None, "timeout")),
        (_report(signal.SIGSEGV), (None, "")),
    ],
)
def test_cause_of_death(report: RunReport, expected: tuple[int | None, str]) -> None:
    assert judge(report) == expected


def test_a_vanished_first_process_is_the_machinery() -> None:
    with pytest.raises(SandboxError) as caught:
        judge(_report(None))
    assert caught.value.retryable


@pytest.mark.parametrize("status", [0, 137 << 8, signal.SIGKILL, None])
@pytest.mark.parametrize("timed_out", [False, True])
def test_memory_that_the_machine_lacked_is_never_the_agents_doing(status: int | None, timed_out: bool) -> None:
    within_limit = replace(
        _report(status, timed_out=timed_out), before=Evidence(oom_kills=2, limit_hits=7), after=Evidence(oom_kills=3, limit_hits=7)
    )
    with pytest.raises(SandboxError, match="this machine ran out of memory") as caught:
        judge(within_limit)
    assert caught.value.retryable


def test_a_run_killed_within_its_limit_is_a_failure_of_the_machinery(session, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Group.evidence

    async def work(provider: BubblewrapProvider) -> None:
        box = await provider.start(str(base))
        balloon = ["-c", "x = bytearray(300 << 20)"]
        if not provider.capabilities.kernel_evidence:
            pytest.skip(provider.capabilities.missing["kernel_evidence"])
        assert (await box.run_python(balloon, timeout_s=60)).killed_by == "memory"
        # The machine's own want of memory can't be had in a test; to the group it looks like this: a kill without a limit reached.
        monkeypatch.setattr(Group, "evidence", lambda group: replace(real(group), limit_hits=0))
        with pytest.raises(SandboxError, match="this machine ran out of memory"):
            await box.run_python(balloon, timeout_s=60)
        with pytest.raises(SandboxError, match="this machine ran out of memory"):
            await provider.run_isolated([str(base)], balloon, timeout_s=60)
        monkeypatch.undo()
        assert (await box.exec(["echo", "ok"], timeout_s=60)).output == "ok\n"
        await box.stop()

    session.run(work)


EARLY_DEATH = """
import asyncio, os, signal, sys
from pathlib import Path
from strop.sandboxes.worker import Worker

async def main():
    worker = Worker("w0", Path(sys.argv[1]), {}, memory_bytes=1 << 26, processes=8)
    starting = asyncio.create_task(worker.start())
    while not worker.pid or not Path(sys.argv[2]).exists():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_host_killed_before_bubblewrap_is_bound_to_it_leaves_no_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for bubblewrap in the moment before it asks the kernel to die with its parent: it never asks."""
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 3600.5512\n")
    fake.chmod(0o755)
    (tmp_path / "delta").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = subprocess.run([sys.executable, "-c", EARLY_DEATH, str(tmp_path), str(tmp_path / "begun")], check=False, timeout=60)
    assert host.returncode == -signal.SIGKILL
    assert (tmp_path / "begun").exists()
    asyncio.run(_gone("3600.5512"))


async def _gone(marker: str, wait_s: float = 30.0) -> None:
    for _ in range(int(wait_s / 0.02)):
        if not find_processes(marker):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left behind: {find_processes(marker)}")


def test_a_bubblewrap_that_cannot_start_takes_its_shell_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'no room' >&2\nexit 1\n")
    fake.chmod(0o755)
    (tmp_path / "delta").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def work() -> None:
        worker = Worker("w0", tmp_path, {}, memory_bytes=1 << 26, processes=8)
        with pytest.raises(SandboxError, match="no room"):
            await worker.start()
        assert not worker.is_running

    asyncio.run(work())


def test_a_dead_worker_is_reported_and_replaced(session, base: Path) -> None:
    async def work(provider: BubblewrapProvider) -> None:
        box = await provider.start(str(base))
        await provider.warm()
        task = asyncio.create_task(box.exec(["sleep", "61.5091"], timeout_s=60))
        await _visible("61.5091")
        for worker in provider._pool._workers:
            os.killpg(worker.pid, signal.SIGKILL)
        with pytest.raises(SandboxError) as caught:
            await task
        assert caught.value.retryable
        for _ in provider._pool._workers:
            assert (await _until_replaced(box)).output == "ok\n"
        await box.stop()

    session.run(work)


async def _visible(marker: str, wait_s: float = 60.0) -> None:
    for _ in range(int(wait_s / 0.02)):
        if find_processes(marker):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the command never ran")


def test_cancelling_a_start_leaves_no_half_started_worker(usable_host: None, base: Path) -> None:
    async def work() -> None:
        provider = BubblewrapProvider(SandboxConfig(workers=1))
        try:
            box = await provider.start(str(base))
            task = asyncio.create_task(box.exec(["true"], timeout_s=60))
            while not provider._pool._workers[0].pid:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not provider._pool._workers[0].is_running
            assert (await box.exec(["echo", "ok"], timeout_s=60)).output == "ok\n"
        finally:
            await provider.close()

    asyncio.run(work())


async def _until_replaced(box):
    # The idle worker's death shows when it is next used, as an error that says "again".
    for _ in range(2):
        try:
            return await box.exec(["echo", "ok"], timeout_s=20)
        except SandboxError as error:
            if not error.retryable:
                raise
    raise AssertionError("no worker came back")


def test_cancelling_a_run_kills_it(session, base: Path) -> None:
    async def work(provider: BubblewrapProvider) -> None:
        box = await provider.start(str(base))
        task = asyncio.create_task(box.exec(["sleep", "61.7391"], timeout_s=60))
        await _visible("61.7391")
        with pytest.raises(SandboxError, match="while a command runs"):
            box.write("a", b"1")
        assert box.read("README") == b"read me\n"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert find_processes("61.7391") == []
        assert (await box.exec(["echo", "ok"], timeout_s=20)).output == "ok\n"
        box.write("a", b"1")
        await box.stop()

    session.run(work)


def test_isolated_run(session, base: Path, tmp_path: Path) -> None:
    (tmp_path / "changes/pkg").mkdir(parents=True)
    (tmp_path / "changes/pkg/core.py").write_text("def double(x):\n    return 'changed'\n")
    os.mknod(tmp_path / "changes/README", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/data.txt").write_text("mounted")

    async def work(provider: BubblewrapProvider) -> None:
        layers = [str(tmp_path / "changes"), str(base)]
        code = (
            "import sys, os\nsys.path.insert(0, '/workspace')\nfrom pkg.core import double\n"
            "print(double(1), sys.stdin.read(), open('data.txt').read(), os.path.exists('/workspace/README'), flush=True)\n"
            "print('note', file=sys.stderr, flush=True)\nos._exit(5)"
        )
        result = await provider.run_isolated(
            layers, ["-c", code], stdin=b"given", timeout_s=20, extra_ro={"/mnt/driver": str(tmp_path / "driver")}, cwd="/mnt/driver"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (5, b"changed given mounted False\n", "note\n")
        for writable, expected in ((False, b"refused\n"), (True, b"written\n")):
            code = (
                "try:\n    open('/workspace/new', 'w').close(); print('written')\nexcept OSError: print('refused')\n"
                "try:\n    open('/mnt/driver/x', 'w'); print('BAD')\nexcept OSError: pass"
            )
            again = await provider.run_isolated(
                [str(base)], ["-c", code], timeout_s=20, writable=writable, extra_ro={"/mnt/driver": str(tmp_path / "driver")}
            )
            assert again.stdout == expected
        assert not (base / "new").exists()
        flood = await provider.run_isolated([str(base)], ["-c", "print('x' * 100000)"], timeout_s=20, max_stdout_bytes=1000)
        assert (len(flood.stdout), flood.stdout_truncated, flood.exit_code) == (1000, True, 0)
        hang = await provider.run_isolated([str(base)], ["-c", "while True: pass"], timeout_s=0.3)
        assert (hang.exit_code, hang.killed_by) == (None, "timeout")
        with pytest.raises(SandboxError, match="must be /mnt/NAME"):
            await provider.run_isolated([str(base)], ["-c", ""], timeout_s=1, extra_ro={"/usr/x": str(base)})

    session.run(work)


def test_driver_script_from_a_mount(session, base: Path, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text("import sys\nprint(__name__, sys.argv, sys.path[0])\n")

    async def work(provider: BubblewrapProvider) -> bytes:
        result = await provider.run_isolated(
            [str(base)], ["/mnt/driver.py", "a"], timeout_s=20, extra_ro={"/mnt/driver.py": str(driver)}, cwd="/tmp"
        )
        return result.stdout

    assert session.run(work) == b"__main__ ['/mnt/driver.py', 'a'] /mnt\n"


def test_a_missing_layer_is_an_error_of_the_machinery(session, base: Path) -> None:
    async def work(provider: BubblewrapProvider) -> None:
        with pytest.raises(SandboxError, match="could not be set up"):
            await provider.run_isolated([str(base / "nowhere"), str(base)], ["-c", ""], timeout_s=5)
        with pytest.raises(SandboxError, match="nowhere"):
            await provider.start(str(base / "nowhere"))
        box = await provider.start(str(base))
        with pytest.raises(SandboxError, match="non-empty list of strings"):
            await box.exec([], timeout_s=5)

    session.run(work)


def test_without_control_groups_limits_are_weaker_and_declared(usable_host: None, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.sandboxes.cgroups.find_hierarchies", lambda: {})

    async def work() -> None:
        provider = BubblewrapProvider(SandboxConfig(workers=1, memory_mb=128))
        try:
            capabilities = provider.capabilities
            assert not any([capabilities.memory_limit, capabilities.process_limit, capabilities.kernel_evidence])
            assert {"memory_limit", "process_limit", "kernel_evidence"} <= set(capabilities.missing)
            box = await provider.start(str(base))
            result = await box.run_python(["-c", "x = bytearray(512 << 20)"], timeout_s=20)
            assert "MemoryError" in result.output
            assert (result.exit_code, result.killed_by) == (1, "")
        finally:
            await provider.close()

    asyncio.run(work())


def test_changes_on_disk_where_memory_has_no_attributes(usable_host: None, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = __import__("strop.sandboxes.host", fromlist=["probe_kernel"]).probe_kernel
    monkeypatch.setattr("strop.sandboxes.bubblewrap.probe_kernel", lambda root: {**real(root), "tmpfs_xattr": "not supported"})

    async def work() -> None:
        provider = BubblewrapProvider(SandboxConfig(workers=1))
        try:
            assert "disk_limit" in provider.capabilities.missing
            box = await provider.start(str(base))
            await box.exec(["sh", "-c", "rm -r pkg; mkdir pkg; echo 1 > pkg/one"], timeout_s=20)
            assert box.changes() == {"pkg/__init__.py": None, "pkg/core.py": None, "pkg/extra.py": None, "pkg/one": b"1\n"}
            assert list((provider.directory / "delta").iterdir()) == []
        finally:
            await provider.close()

    asyncio.run(work())


def test_close_leaves_nothing(usable_host: None, base: Path) -> None:
    async def work() -> tuple[Path, list[Path]]:
        provider = BubblewrapProvider(SandboxConfig(workers=1))
        box = await provider.start(str(base))
        await box.run_python(["-c", "print(1)"], timeout_s=20)
        parents = [hierarchy.parent for hierarchy in provider._hierarchies.values()]
        await provider.close()
        await provider.close()
        with pytest.raises(SandboxError):
            await box.exec(["true"], timeout_s=1)
        return provider.directory, [
            path for parent in parents for path in parent.glob(f"strop-{os.getpid()}-*/w{provider.directory.name}-*")
        ]

    directory, groups = asyncio.run(work())
    assert not directory.exists()
    assert groups == []


def test_no_bubblewrap_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bubblewrap .* install"):
        BubblewrapProvider(SandboxConfig())


def test_kernel_refusal_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"No permissions to create new namespace.*strop doctor"):
        BubblewrapProvider(SandboxConfig())
