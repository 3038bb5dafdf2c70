"""Boxes look as their settings say, keep what they change, and look like nothing of the sort to the next box."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.core.errors import ConfigError
from strop.sandboxes.domain import DRAWN, Domain, VariedProvider, check_settings, draw_domain, variant_of

TESTS = ("-m", "unittest", "discover", "-q", "-s", "tests")


@pytest.mark.parametrize(
    "setting",
    [
        "host=x",
        "hostname=Two Words",
        "hostname=" + "a" * 64,
        "hostname=-a",
        "path=/workspace",
        "path=/home",
        "path=/home/../etc",
        "path=/home/a/../..",
        "path=/home//a",
        "env.PATH=/evil",
        "env.LD_PRELOAD=x",
        "env.PYTHONPATH=x",
        "env.CI",
        "env.A B=1",
        "uptime=-1",
        "uptime=nan",
        "latency_ms=1e99",
        "latency_ms=99999999",
        "runner=pytest",
        "order=a b",
        "env.A=x\ny",
        "env.A=1,2",
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting: str):
    with pytest.raises(ConfigError, match="domain setting"):
        check_settings([setting])


def test_a_key_is_given_once():
    with pytest.raises(ConfigError, match="twice"):
        check_settings(["hostname", "hostname=a"])


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(DRAWN), unique=True), st.integers(0, 1000))
def test_what_is_drawn_could_have_been_fixed(keys: list[str], box: int):
    domain = draw_domain(keys, box)
    fields = {"uptime": "uptime_s"}
    fixed = [f"{key}={getattr(domain, fields.get(key, key))}" for key in keys]
    assert draw_domain(fixed, "other") == domain == draw_domain(keys, box)


def test_draws_differ_between_boxes():
    assert len({draw_domain(["hostname"], box).hostname for box in range(50)}) > 20


def test_only_test_runs_are_varied():
    domain = Domain(runner="verbose", order="7f")
    assert variant_of(["-c", "pass"], domain) == ["-c", "pass"]
    assert variant_of(TESTS, Domain()) == list(TESTS)
    assert variant_of(TESTS, Domain(runner="verbose")) == ["-m", "unittest", "discover", "-v", "-s", "tests"]
    assert variant_of(TESTS, domain)[2:] == ["7f", "discover", "-v", "-s", "tests"]


def test_a_box_looks_as_the_settings_say_and_the_next_one_does_not(session: Any, base: Path):
    settings = ["hostname=ci-7", "path=/home/dev/app", "env.CI=true", "uptime=12345", "latency_ms=3", "runner=verbose", "order=7f"]
    script = "hostname; cat /etc/hostname; pwd; echo CI=$CI; cut -d. -f1 /proc/uptime; echo x > made; ls /workspace/made"

    async def work(provider: Any) -> None:
        varied = VariedProvider(provider, settings)
        box = await varied.start(str(base))
        result = await box.exec(["sh", "-c", script], timeout_s=30)
        lines = result.output.splitlines()
        assert lines[:4] == ["ci-7", "ci-7", "/home/dev/app", "CI=true"]
        assert 12345 <= int(lines[4]) < 12400
        assert lines[5] == "/workspace/made"
        assert box.changes() == {"made": b"x\n"}
        assert result.duration_s >= 0.003
        tests = await box.run_python(TESTS, timeout_s=30)
        assert tests.exit_code == 0, tests.output
        assert "test_double" in tests.output
        twin = await box.fork()
        assert (await twin.exec(["hostname"], timeout_s=30)).output == "ci-7\n"
        shell = await twin.open_shell()
        assert (await shell.run("hostname; pwd", timeout_s=30)).output == "ci-7\n/home/dev/app\n"
        await shell.close()
        await twin.stop()
        plain = await provider.start(str(base))
        assert (await plain.exec(["sh", "-c", "hostname; pwd; echo CI=$CI; ls /home"], timeout_s=30)).output == "box\n/workspace\nCI=\n"
        await plain.stop()
        await box.stop()

    session.run(work)


def test_a_box_cannot_undo_its_looks(session: Any, base: Path):
    async def work(provider: Any) -> None:
        box = await VariedProvider(provider, ["hostname=ci-7", "path=/home/dev/app"]).start(str(base))
        tries = "hostname other; umount /etc/hostname; echo y > /etc/hostname; echo y > /home/file; mkdir /home/dev/b"
        script = f"{tries}; hostname; ls /home /home/dev"
        lines = (await box.exec(["sh", "-c", script], timeout_s=30)).output.splitlines()
        assert lines[-6:] == ["ci-7", "/home:", "dev", "", "/home/dev:", "app"]
        await box.stop()

    session.run(work)


def test_boxes_over_one_base_look_alike_unless_asked_otherwise(session: Any, base: Path):
    async def names(provider: Any, per_box: bool) -> set[str]:
        varied = VariedProvider(provider, ["hostname"], per_box=per_box)
        boxes = [await varied.start(str(base)) for _ in range(6)]
        found = {box.domain.hostname for box in boxes}  # type: ignore[attr-defined]
        for box in boxes:
            await box.stop()
        return found

    assert len(session.run(lambda provider: names(provider, False))) == 1
    assert len(session.run(lambda provider: names(provider, True))) > 1


class _PlainBox:
    stopped = False

    def list_files(self) -> list[str]:
        return []

    async def stop(self) -> None:
        self.stopped = True


class _PlainProvider:
    def __init__(self) -> None:
        self.box = _PlainBox()

    async def start(self, base: str, **_: Any) -> _PlainBox:
        return self.box


def test_a_back_end_that_cannot_says_so():
    inner = _PlainProvider()
    with pytest.raises(ConfigError, match="can't change hostname"):
        asyncio.run(VariedProvider(inner, ["hostname"]).start("x"))  # type: ignore[arg-type]
    assert inner.box.stopped
    asyncio.run(VariedProvider(inner, ["latency_ms=1", "order"]).start("x"))  # type: ignore[arg-type]
