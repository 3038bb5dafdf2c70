"""Fixtures of the sandbox room: a small base tree and one provider per test module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.core.config import SandboxConfig
from strop.sandboxes import BubblewrapProvider, check_host
from strop.sandboxes.conformance import make_base

SMALL = SandboxConfig(workers=2, memory_mb=96, processes=16, disk_mb=8)


@pytest.fixture(scope="session")
def usable_host() -> None:
    """Skip where this machine can't run the sandbox at all, with the reason."""
    for requirement in check_host():
        if requirement.is_required and not requirement.ok:
            pytest.skip(f"{requirement.name}: {requirement.detail}")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A package tree with one passing test."""
    return make_base(tmp_path)


class Session:
    """A provider and the event loop that it lives in."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.provider: BubblewrapProvider = self.runner.run(self._make())

    async def _make(self) -> BubblewrapProvider:
        return BubblewrapProvider(SMALL)

    def run(self, work: Callable[[BubblewrapProvider], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(work(self.provider))

    def close(self) -> None:
        self.runner.run(self.provider.close())
        self.runner.close()


@pytest.fixture(scope="module")
def session(usable_host: None) -> Iterator[Session]:
    """One provider for a module's tests."""
    made = Session()
    yield made
    made.close()
