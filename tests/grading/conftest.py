"""One event loop and one provider for the whole room: warm workers are what grading runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from grading_world import World

from strop.core.config import SandboxConfig
from strop.grading.repair import GradingLimits, RepairGrader
from strop.sandboxes import BubblewrapProvider


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def provider(loop: asyncio.Runner) -> Iterator[BubblewrapProvider]:
    made = BubblewrapProvider(SandboxConfig(workers=1, memory_mb=128, processes=24, disk_mb=16))
    yield made
    loop.run(made.close())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "base")


@pytest.fixture
def grader(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> Iterator[RepairGrader]:
    made = RepairGrader(world, provider, limits=GradingLimits(wall_s=4.0, cpu_s=0.5, load_cpu_s=2.0))
    yield made
    loop.run(made.close())
