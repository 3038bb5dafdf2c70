"""The bubblewrap back end passes the whole suite; the suite itself notices a back end that breaks the contract."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from strop.core.config import SandboxConfig
from strop.core.errors import ConfigError
from strop.ports import SandboxCapabilities
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.archive import pack
from strop.sandboxes.bubblewrap import BubblewrapSandbox
from strop.sandboxes.conformance import run_conformance
from strop.sandboxes.conformance_arena import CHECKS
from strop.sandboxes.layer import Layer

SPEC = "strop.sandboxes.bubblewrap:BubblewrapProvider"
HERE = "tests.sandboxes.test_conformance"


FAST = ("shell_beside_commands", "shell_keeps_state", "snapshot_restores", "forks_are_independent", "contents_survive", "exit_codes")
BASIC = ("strop.sandboxes.conformance_checks", "strop.sandboxes.conformance_escapes")


@pytest.mark.timeout(600)
def test_bubblewrap_passes_the_basic_checks(usable_host: None) -> None:
    asyncio.run(run_conformance(SPEC, only=["stop_is_final"]))  # loads the checks
    names = [check.name for check in CHECKS if check.name in FAST or check.run.__module__ in BASIC]
    results = asyncio.run(run_conformance(SPEC, only=names))
    assert [result for result in results if result.status == "fail"] == []
    assert len(results) == len(names) + 1
    assert sum(result.status == "pass" for result in results) >= 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bubblewrap_passes_every_check(usable_host: None) -> None:
    results = asyncio.run(run_conformance(SPEC))
    assert [result for result in results if result.status == "fail"] == []
    assert len(results) == len(CHECKS) + 1
    assert sum(result.status == "pass" for result in results) >= 55


@pytest.mark.timeout(300)
def test_heavy_checks_can_be_left_out(usable_host: None) -> None:
    asyncio.run(run_conformance(SPEC, only=["stop_is_final"]))  # loads the checks
    only = [check.name for check in CHECKS if check.name == "stop_is_final" or check.is_heavy]
    assert len(only) >= 5
    kept = CHECKS.copy()
    CHECKS[:] = [check for check in CHECKS if check.name in only]
    try:
        results = asyncio.run(run_conformance(SPEC, heavy=False))
    finally:
        CHECKS[:] = kept
    assert [result.name for result in results] == ["stop_is_final", "base_unmodified"]


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


class _Careless(BubblewrapProvider):
    """A back end with other planted faults; each of its boxes' methods is wrong in its own way."""

    async def start(self, base: str, **wanted) -> BubblewrapSandbox:
        box = await super().start(base, **wanted)
        box.__class__ = _CarelessBox
        return box


class _CarelessBox(BubblewrapSandbox):
    async def exec(self, argv, *, timeout_s, stdin=b""):
        """Cuts stdin at 4 KiB, splits arguments at spaces, takes an early death for a time-out, and knows only two exit codes."""
        words = [word for item in argv for word in (item.split(" ") if item == "a b" else [item])]
        result = await super().exec(words, timeout_s=timeout_s, stdin=stdin[:4096])
        killed_by = "timeout" if result.exit_code is None else result.killed_by
        code = None if result.exit_code is None else min(result.exit_code, 128)
        return type(result)(exit_code=code, output=result.output, duration_s=result.duration_s, killed_by=killed_by)

    def write(self, path, content):
        """Translates line ends, and makes parents of what isn't there to delete."""
        if content is None and path not in self.list_files():
            return
        super().write(path, content.replace(b"\r\n", b"\n") if content else content)

    def list_files(self):
        return [path for path in super().list_files() if not path.startswith(".")]

    async def fork(self):
        return self

    async def snapshot(self):
        """Forgets deletions."""
        return pack_without_deletions(self._now())

    async def open_shell(self):
        return _Amnesiac(self)


class _Amnesiac:
    """A shell in name only: every command begins anew."""

    def __init__(self, box: BubblewrapSandbox) -> None:
        self._box = box

    async def run(self, command, *, timeout_s):
        return await self._box.exec(["sh", "-c", command], timeout_s=timeout_s)

    async def close(self) -> None: ...


def pack_without_deletions(layer: Layer) -> bytes:
    kept = {path: entry for path, entry in layer.index.items() if entry.kind != "whiteout"}
    whole, layer.index = layer.index, kept
    try:
        return pack(layer)
    finally:
        layer.index = whole


@pytest.mark.parametrize(
    "name",
    [
        "contents_survive",
        "names_survive",
        "wrong_paths_are_refused",
        "exit_codes",
        "signals_are_not_timeouts",
        "arguments_survive",
        "stdin_survives",
        "shell_keeps_state",
        "shell_ends_as_a_whole",
        "snapshot_restores",
        "forks_are_independent",
        "resuming_gives_the_same_verdict",
    ],
)
def test_more_planted_faults_are_found(usable_host: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = {result.name: result for result in asyncio.run(run_conformance("planted:_Careless", only=[name]))}
    assert results[name].status == "fail"


class _Apart(BubblewrapProvider):
    """Shells live in a copy of the box."""

    async def start(self, base: str, **wanted) -> BubblewrapSandbox:
        box = await super().start(base, **wanted)
        if "snapshot" not in wanted:
            box.__class__ = _ApartBox
        return box


class _ApartBox(BubblewrapSandbox):
    async def open_shell(self):
        return await (await self.fork()).open_shell()


def test_a_shell_in_a_place_of_its_own_is_found(usable_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = asyncio.run(run_conformance("planted:_Apart", only=["shell_beside_commands"]))
    assert results[0].status == "fail"


class _Silent(BubblewrapProvider):
    """Offers less than it says, and says nothing of it."""

    @property
    def capabilities(self) -> SandboxCapabilities:
        return replace(super().capabilities, egress=("none",), missing={})


def test_a_missing_way_out_has_to_be_declared(usable_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = asyncio.run(run_conformance("planted:_Silent", only=["egress_is_declared"]))
    assert (results[0].status, "neither there nor declared" in results[0].detail) == ("fail", True)


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


class _Touching(BubblewrapProvider):
    async def start(self, base: str) -> BubblewrapSandbox:
        (Path(base) / "README").write_text("touched\n")
        return await super().start(base)


def test_a_changed_base_is_found(usable_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "planted", __import__("sys").modules[__name__])
    results = asyncio.run(run_conformance("planted:_Touching", only=["stop_is_final"]))
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
