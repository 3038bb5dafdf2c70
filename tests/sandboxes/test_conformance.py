"""The bubblewrap back end passes the whole suite; the suite itself notices a back end that breaks the contract."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from strop.core.config import SandboxConfig
from strop.core.errors import ConfigError
from strop.ports import SandboxCapabilities
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.bubblewrap import BubblewrapSandbox
from strop.sandboxes.conformance import run_conformance
from strop.sandboxes.conformance_arena import CHECKS

SPEC = "strop.sandboxes.bubblewrap:BubblewrapProvider"
HERE = "tests.sandboxes.test_conformance"


def test_bubblewrap_passes_every_check(usable_host: None) -> None:
    results = asyncio.run(run_conformance(SPEC))
    assert [result for result in results if result.status == "fail"] == []
    assert len(results) == len(CHECKS) + 1
    assert sum(result.status == "pass" for result in results) >= 25


class _Leaky(BubblewrapProvider):
    """A back end with planted faults: follows links, forgets deletions, inherits the host's environment, blames memory for exit
    code 137."""

    async def start(self, base: str) -> BubblewrapSandbox:
        box = await super().start(base)
        box.__class__ = _LeakyBox
        return box


class _LeakyBox(BubblewrapSandbox):
    async def exec(self, argv, *, timeout_s, stdin=b""):
        result = await super().exec(argv, timeout_s=timeout_s, stdin=stdin)
        output = result.output + (f"SECRET={os.environ['STROP_CONFORMANCE_SECRET']}" if "env;" in argv[-1] else "")
        killed_by = "memory" if result.exit_code == 137 else result.killed_by
        return type(result)(exit_code=result.exit_code, output=output, duration_s=result.duration_s, killed_by=killed_by)

    def read(self, path):
        return (self._layer.directory / path).read_bytes() if (self._layer.directory / path).exists() else super().read(path)

    def changes(self):
        return {path: content for path, content in super().changes().items() if content is not None}


@pytest.mark.parametrize(
    "name",
    [
        "symlink_escape",
        "dotdot_escape",
        "file_operations",
        "replacements_are_changes",
        "environment_clean",
        "cause_of_death_cannot_be_forged",
    ],
)
def test_planted_faults_are_found(usable_host: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = {result.name: result for result in asyncio.run(run_conformance("planted:_Leaky", only=[name]))}
    assert results[name].status == "fail"


class _Modest(BubblewrapProvider):
    @property
    def capabilities(self) -> SandboxCapabilities:
        found = super().capabilities
        return SandboxCapabilities(
            network_isolation=True,
            memory_limit=False,
            process_limit=True,
            kernel_evidence=False,
            warm_runner=True,
            snapshots=False,
            missing={**found.missing, "memory_limit": "declared absent"},
        )


def test_a_declared_absence_is_not_a_failure(usable_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = asyncio.run(run_conformance("planted:_Modest", only=["memory_balloon"]))
    first = results[0]
    assert (first.name, first.status, first.detail) == ("memory_balloon", "missing", "declared absent")


class _Careless(BubblewrapProvider):
    async def start(self, base: str) -> BubblewrapSandbox:
        (Path(base) / "README").write_text("touched\n")
        return await super().start(base)


def test_a_changed_base_is_found(usable_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = asyncio.run(run_conformance("planted:_Careless", only=["stop_is_final"]))
    assert results[-1].name == "base_unmodified"
    assert results[-1].status == "fail"


@pytest.mark.parametrize(
    ("spec", "only", "message"),
    [
        ("nowhere", [], "must look like"),
        ("strop.sandboxes.nowhere:X", [], "can't be imported"),
        ("strop.sandboxes.bubblewrap:BubblewrapProvidr", [], "Did you mean 'BubblewrapProvider'"),
        (SPEC, ["fork_bom"], "Did you mean 'fork_bomb'"),
    ],
)
def test_wrong_names_are_explained(spec: str, only: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(run_conformance(spec, SandboxConfig(), only))
