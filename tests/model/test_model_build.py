"""Compiling the kernels: once, also under concurrency, and with a clear word where it can't be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.core.errors import EngineError
from strop.model.native import build as build_module

ONE_FILE = """
import sys
from strop.model.native import build
build.SOURCES = ("pool.c",)
original = build._compile
def loud(*arguments):
    print("compiling")
    original(*arguments)
build._compile = loud
print(build.build())
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "SOURCES", ("pool.c",))


def test_concurrent_builds_compile_once() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ONE_FILE], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0].split() for process in processes]
    assert sum("compiling" in lines for lines in outputs) == 1
    assert len({lines[-1] for lines in outputs}) == 1
    assert Path(outputs[0][-1]).is_file()


def test_a_missing_compiler_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"no C compiler found.*Install one"):
        build_module.build()


def test_a_failing_compiler_is_reported_with_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "bad-cc"
    compiler.write_text("#!/bin/sh\necho 'cannot do that' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(EngineError, match="cannot do that"):
        build_module.build()
    assert not list(build_module.cache_dir().glob("*.so"))


def test_the_key_covers_compiler_flags_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_module.build()
    assert build_module.build() == first
    monkeypatch.setattr(build_module, "cpu_features", lambda: "another processor")
    assert build_module.build() != first
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-DOTHER"))
    assert build_module.build() not in (first,)
    assert len(list(build_module.cache_dir().glob("*.so"))) == 3


def test_a_cache_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert build_module.build().parent.parent == tmp_path
    (build_module.build().parent).chmod(0o777)
    with pytest.raises(EngineError, match="only this user can write"):
        build_module.build()
