"""The docker back end. What needs a daemon runs where one answers (``make test-docker`` starts one) and is skipped elsewhere."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from test_egress import check_scenario, scenario_can_run

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.sandboxes.conformance import make_base, run_conformance
from strop.sandboxes.conformance_arena import CHECKS
from strop.sandboxes.docker import DockerProvider
from strop.sandboxes.docker.container import READY, status_of
from strop.sandboxes.docker.mount import unmount_stale
from strop.sandboxes.docker.profile import profile
from strop.sandboxes.docker.warden import warden

SPEC = "strop.sandboxes.docker:DockerProvider"
SMALL = SandboxConfig(workers=2, memory_mb=96, processes=16, disk_mb=8)


@pytest.fixture(scope="session")
def daemon() -> None:
    """Skip without a daemon that has the image."""
    try:
        asyncio.run(_open_and_close())
    except SandboxError as error:
        pytest.skip(f"{error}")


async def _open_and_close() -> None:
    await DockerProvider(SMALL).close()


def with_provider(work: Callable[[DockerProvider], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` with a provider."""

    async def session() -> None:
        provider = DockerProvider(SMALL)
        try:
            await work(provider)
        finally:
            await provider.close()

    asyncio.run(session())


# ------------------------------------------------------------------------------------------------ without a daemon


@pytest.mark.skipif(os.geteuid() != 0, reason="the back end asks for root first")
@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("tcp://127.0.0.1:1", "must be a socket of this machine"),
        ("unix:///nowhere/docker.sock", "no docker daemon answers at unix:///nowhere"),
    ],
)
def test_a_daemon_that_is_not_there_is_one_clear_error(host: str, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        DockerProvider(SMALL, host=host)


def test_an_ordinary_user_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="must run as root"):
        DockerProvider(SMALL)


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (b"", None),
        (READY, None),
        (READY + b"25", None),
        (READY + b"256\n", 256),
        (READY + b"9\n", 9),
        (b"9\n", 9),
        (b"x\n", None),
        (READY + b"-1\n", None),
    ],
)
def test_only_a_whole_report_is_a_status(report: bytes, status: int | None) -> None:
    assert status_of(report) == status


def test_the_warden_reports_what_the_kernel_says() -> None:
    path = str(warden())
    for script, expected in (("exit 0", 0), ("exit 137", 137 << 8), ("kill -9 $$", 9), ("kill -TERM $$", 15)):
        done = subprocess.run([path, "run", "sh", "-c", f"echo out; echo err >&2; {script}"], capture_output=True, check=True, timeout=60)
        assert (done.stdout, status_of(done.stderr)) == (b"out\nerr\n", expected)
    missing = subprocess.run([path, "run", "no-such-command"], capture_output=True, check=True, timeout=60)
    assert (missing.stdout, status_of(missing.stderr)) == (b"no-such-command: No such file or directory\n", 127 << 8)
    # Process 1 lives as long as its stdin.
    init = subprocess.Popen([path, "init"], stdin=subprocess.PIPE)
    assert init.stdin is not None
    init.stdin.write(b"\n")
    init.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        init.wait(0.2)
    init.stdin.close()
    assert init.wait(60) == 0


def test_the_filter_refuses_namespaces_and_foreign_sockets() -> None:
    import json

    found = json.loads(profile())
    refused = {name for rule in found["syscalls"] if "args" not in rule for name in rule["names"]}
    assert {"mount", "unshare", "setns", "keyctl", "bpf", "clone3", "perf_event_open"} <= refused
    families = {argument["value"] for rule in found["syscalls"] if rule["names"] == ["socket"] for argument in rule["args"]}
    assert families.isdisjoint({1, 2, 10, 16})
    assert {17, 38, 40} <= families
    flags = [argument for rule in found["syscalls"] if rule["names"] == ["clone"] for argument in rule["args"]]
    assert sum(argument["value"] for argument in flags) == 0x7E020000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_only_mounts_of_the_dead_are_taken_away(tmp_path: Path) -> None:
    from strop.sandboxes.ownership import identity

    pid, _, namespace = identity().removeprefix("strop-").split("-")
    dead, alive = tmp_path / f"strop-{pid}-1-{namespace}", tmp_path / identity()
    try:
        for place in (dead, alive):
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
        unmount_stale(tmp_path)
        assert (os.path.ismount(dead), os.path.ismount(alive)) == (False, True)
    finally:
        subprocess.run(["umount", "-q", str(dead), str(alive)], check=False)


# ------------------------------------------------------------------------------------------------ with a daemon


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_docker_passes_every_check(daemon: None) -> None:
    results = asyncio.run(run_conformance(SPEC))
    assert [result for result in results if result.status != "pass"] == []
    assert len(results) == len(CHECKS) + 1


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_command_line_checks_docker(daemon: None) -> None:
    command = [sys.executable, "-m", "strop", "sandbox", "check", "docker", "--only", "output_and_status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "docker: 2 passed, 0 missing here, 0 failed" in done.stdout


@pytest.mark.slow
def test_a_package_installs_through_the_allow_list_of_a_container(daemon: None) -> None:
    if reason := scenario_can_run():
        pytest.skip(reason)
    check_scenario(SPEC)


def test_a_missing_image_is_one_clear_error(daemon: None) -> None:
    with pytest.raises(SandboxError, match="has no image 'no-such-image:1'"):
        DockerProvider(SMALL, image="no-such-image:1")


def test_a_command_that_kills_its_reporter_has_only_killed_itself(daemon: None, tmp_path: Path) -> None:
    async def work(provider: DockerProvider) -> None:
        box = await provider.start(str(make_base(tmp_path)))
        killed = await box.exec(["sh", "-c", "echo before; kill -9 $PPID; sleep 600"], timeout_s=120)
        assert (killed.exit_code, killed.killed_by) == (None, "")
        assert (await box.exec(["sh", "-c", "kill -9 -1; true"], timeout_s=120)).killed_by == ""
        assert (await box.exec(["echo", "ok"], timeout_s=120)).output == "ok\n"

    with_provider(work)


def test_snapshots_move_between_back_ends(daemon: None, usable_host: None, tmp_path: Path) -> None:
    from strop.sandboxes import BubblewrapProvider

    base = str(make_base(tmp_path))

    async def work(provider: DockerProvider) -> None:
        other = BubblewrapProvider(SMALL)
        try:
            box = await provider.start(base)
            await box.exec(
                ["sh", "-c", "rm README; mkdir -m 700 d; echo 1 > d/f; chmod 755 d/f; ln -s /etc link; mv tests moved"], timeout_s=120
            )
            there = await other.start(base, snapshot=await box.snapshot())
            assert there.changes() == box.changes()
            back = await provider.start(base, snapshot=await there.snapshot())
            assert back.changes() == box.changes()
            assert (await back.exec(["stat", "-c", "%a %u", "d", "d/f"], timeout_s=120)).output == "700 1000\n755 1000\n"
        finally:
            await other.close()

    with_provider(work)


def test_close_leaves_nothing(daemon: None, tmp_path: Path) -> None:
    import docker

    from strop.sandboxes.docker.container import LABEL
    from strop.sandboxes.ownership import identity

    seen: list[Path] = []

    async def work(provider: DockerProvider) -> None:
        box = await provider.start(str(make_base(tmp_path)))
        await box.open_shell()
        seen.append(provider.directory)

    with_provider(work)
    assert not seen[0].exists()
    assert str(seen[0]) not in Path("/proc/self/mountinfo").read_text()
    assert docker.from_env().containers.list(all=True, filters={"label": f"{LABEL}={identity()}"}) == []
