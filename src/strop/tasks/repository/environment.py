"""A workspace's installed requirements: wheels unpacked by pip into a folder that every tree of a source shares.

pip runs on the host and takes wheels only, so that no setup code of anybody's runs. The package under work is never among them: an
installed copy of it would be the solution.
"""

from __future__ import annotations

import compileall
import contextlib
import io
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import TaskError
from strop.core.random import key_of
from strop.tasks.repository.metadata import Metadata, normalise
from strop.tasks.repository.suite import VENV
from strop.tasks.trees import make_once

_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Environment:
    """Installed requirements.

    Attributes:
        folder: Holds what lies in ``site-packages``.
        requirements: What was asked for and installed.
        missing: What couldn't be installed, with the last line of pip.
    """

    folder: Path
    requirements: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]


RUNNERS = ("pytest", "pytest<9", "pytest<8", "pytest<7")
"""Newest first; an older suite may need an older one."""


def install(metadata: Metadata, extra: Sequence[str], folder: Path, *, runner: str = RUNNERS[0]) -> Environment:
    """Install pytest, a package's requirements and those of its tests.

    What its code needs must install; of what its tests need, whatever has a wheel is taken.

    Args:
        metadata: What the package declares.
        extra: More requirements, found missing by running.
        folder: Where environments are kept, one for each set of requirements.
        runner: The requirement for pytest.

    Raises:
        TaskError: pytest can't be installed, or the disk is full.
    """
    own = normalise(metadata.name)
    tests = _test_requires(metadata)
    wanted = [runner, *metadata.requires, *tests, *extra]
    name = environment_name(metadata, extra, runner=runner)
    target = folder / name
    report = folder / f"{name}.missing"
    if not target.is_dir():
        missing: list[tuple[str, str]] = []

        def fill(place: Path) -> None:
            missing.extend(_fill(place, [runner, *metadata.requires], [*tests, *extra]))
            _remove_own(place, own)
            _compile(place)
            report.write_text("".join(f"{item}\t{reason}\n" for item, reason in missing), encoding="utf-8")

        make_once(target, fill)
    rows = [tuple(line.split("\t", 1)) for line in report.read_text(encoding="utf-8").splitlines()] if report.exists() else []
    lost = tuple((row[0], row[1]) for row in rows if len(row) == 2)
    return Environment(target, tuple(item for item in wanted if item not in dict(lost)), lost)


def environment_name(metadata: Metadata, extra: Sequence[str] = (), *, runner: str = RUNNERS[0]) -> str:
    """Return the folder name of the environment that ``install`` makes with the same arguments."""
    wanted = sorted([runner, *metadata.requires, *_test_requires(metadata), *extra])
    return f"{key_of(sys.version, normalise(metadata.name), *wanted):032x}"[:16]


def _test_requires(metadata: Metadata) -> list[str]:
    return [item for item in metadata.test_requires if not re.match(r"pytest\b(?!-)", item)]


def _fill(place: Path, needed: list[str], wanted: list[str]) -> list[tuple[str, str]]:
    """Install as much as there is; returns what isn't there. The first of ``needed`` is pytest."""
    if not _pip(place, [*needed, *wanted]):
        return []
    missing = []
    if problem := _pip(place, needed):
        missing = [(item, problem) for item in needed[1:]]
        needed = needed[:1]
        if problem := _pip(place, needed):
            raise TaskError(f"pytest can't be installed: {problem}", retryable=True)
    kept = list(needed)
    for item in wanted:
        if problem := _pip(place, [*kept, item]):
            missing.append((item, problem))
        else:
            kept.append(item)
    _pip(place, kept)
    return missing


def _pip(place: Path, requirements: Sequence[str]) -> str:
    """Install into an emptied folder; returns the reason of a failure."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    argv = [sys.executable, "-m", "pip", "install", "-q", "--target", str(place), "--only-binary", ":all:", "--no-compile"]
    argv += ["--no-warn-script-location", "--disable-pip-version-check", "--", *requirements]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"pip gave no answer within {_TIMEOUT_S} s"
    if not done.returncode:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:] or ["pip failed"]
    if "No space left" in done.stderr:
        raise TaskError(f"the requirements can't be installed into {str(place.parent)!r}: no space left on the disk")
    return " ".join(lines[-1].removeprefix("ERROR: ").split())[:200]


def _remove_own(place: Path, own: str) -> None:
    """Remove the package under work, which another requirement may have brought along."""
    for info in place.glob("*.dist-info"):
        if own and normalise(info.name.rpartition(".dist-info")[0].rpartition("-")[0]) == own:
            record = info / "RECORD"
            for line in record.read_text(encoding="utf-8", errors="replace").splitlines() if record.is_file() else []:
                path = os.path.normpath(place / line.split(",")[0])
                if path.startswith(f"{place}{os.sep}"):
                    Path(path).unlink(missing_ok=True)
            shutil.rmtree(info, ignore_errors=True)
    shutil.rmtree(place / "bin", ignore_errors=True)
    for folder, _, _ in os.walk(place, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _compile(place: Path) -> None:
    """Byte code that is checked against the source's hash: valid wherever the folder is mounted."""
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(
            str(place),
            maxlevels=20,
            ddir=f"/workspace/{VENV}",
            quiet=2,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        )
