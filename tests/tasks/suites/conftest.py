"""A pool built from the small repository by the real build, in real boxes, through the real gate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from suite_kit import FILES, build_once, give_environment, write_files

from strop.core.config import SandboxConfig
from strop.sandboxes import BubblewrapProvider
from strop.tasks.admission.build import BuildOptions
from strop.tasks.admission.pool import SuitePool
from strop.tasks.admission.tally import SourceTally


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("source") / "shop", FILES)


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory, source: Path) -> BuildOptions:
    """Options of a small build whose environment is there already."""
    out = tmp_path_factory.mktemp("pool") / "pool"
    give_environment(out, FILES)
    return BuildOptions(out=out, limits={"mutation": 3, "combined": 1, "deletion": 2, "history": 0}, workers=2)


@pytest.fixture(scope="session")
def built(options: BuildOptions, source: Path) -> tuple[BuildOptions, SourceTally]:
    return options, build_once(options, source)


@pytest.fixture(scope="session")
def pool(built: tuple[BuildOptions, SourceTally], tmp_path_factory: pytest.TempPathFactory) -> SuitePool:
    return SuitePool(built[0].out, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def provider() -> Iterator[BubblewrapProvider]:
    found = BubblewrapProvider(SandboxConfig(workers=2, memory_mb=512))
    yield found
    asyncio.run(found.close())
