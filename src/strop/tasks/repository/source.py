"""Turns what a person names into a ``Source``: a local git checkout or folder, a source archive, or a package name.

A package name is looked up by pip. Pip asks a source archive's own setup code about its dependencies, so it runs in a box, and there the
question is answered from the archive's ``PKG-INFO`` instead.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strop.core.errors import TaskError
from strop.tasks.repository.boxed import run_boxed
from strop.tasks.repository.files import ARCHIVE_SUFFIXES, Files, is_archive, read_archive, read_folder
from strop.tasks.repository.gitread import GitCheckout

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(==[A-Za-z0-9.!+_-]+)?")
_PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_ANSWERS = """
import os, shutil, sys, types
backend = os.environ.get("_PYPROJECT_HOOKS_BUILD_BACKEND") or os.environ.get("PEP517_BUILD_BACKEND")
if backend:
    def prepare_metadata_for_build_wheel(folder, config_settings=None):
        with open("PKG-INFO", encoding="utf-8", errors="replace") as file:
            rows = dict(line.rstrip().split(": ", 1) for line in file if line.startswith(("Name: ", "Version: ")))
        name = rows["Name"].replace("-", "_") + "-" + rows["Version"] + ".dist-info"
        os.mkdir(os.path.join(folder, name))
        shutil.copyfile("PKG-INFO", os.path.join(folder, name, "METADATA"))
        return name
    module = types.ModuleType(backend.partition(":")[0])
    module.prepare_metadata_for_build_wheel = prepare_metadata_for_build_wheel
    module.get_requires_for_build_wheel = lambda config_settings=None: []
    for attribute in filter(None, backend.partition(":")[2].split(".")):
        setattr(module, attribute, module)
    sys.modules[module.__name__] = module
"""
"""Stands in for every build back end: pip asks one for a source archive's dependencies, and ``PKG-INFO`` has the answer. So nothing of the
archive is run, and no back end has to be installed."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source, read.

    Attributes:
        name: What it is called, for ids: ``"boltons-25.0.0"``.
        kind: ``"git"``, ``"folder"``, ``"archive"`` or ``"package"``.
        origin: What the person named.
        files: Its files.
        notes: What was left out while reading.
        checkout: For a git checkout, its history.
        releases: Earlier releases of a package, oldest first: name and files.
    """

    name: str
    kind: str
    origin: str
    files: Mapping[str, bytes]
    notes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    checkout: GitCheckout | None = None
    releases: tuple[tuple[str, Mapping[str, bytes]], ...] = ()

    @property
    def digest(self) -> str:
        """Digest of all files: paths and contents."""
        digest = hashlib.blake2b(digest_size=12)
        for path in sorted(self.files):
            data = self.files[path]
            digest.update(f"{len(path)} {len(data)} {path}\n".encode("utf-8", "surrogateescape"))
            digest.update(data)
        return digest.hexdigest()


def open_source(text: str, *, download_dir: Path, releases: tuple[str, ...] = ()) -> Source:
    """Read a source.

    Args:
        text: A folder, an archive, or a package name as ``NAME`` or ``NAME==VERSION``.
        download_dir: Where source archives of packages are kept.
        releases: Earlier releases whose differences make history, oldest first: archives, or versions of the same package.

    Raises:
        TaskError: There is no such source, or it can't be read.
    """
    try:
        return _open_local(Path(text), text, download_dir, releases) or _open_package(text, download_dir, releases)
    except OSError as error:
        raise TaskError(f"source {text!r} can't be read: {error.strerror or error}") from None


def _open_local(path: Path, text: str, download_dir: Path, releases: tuple[str, ...]) -> Source | None:
    """Read a folder or archive; ``None`` if there is nothing of that name."""
    if path.is_dir():
        if (path / ".git").exists():
            checkout = GitCheckout(path)
            files = checkout.files()
            return _source(f"{path.resolve().name}-{checkout.head[:8]}", "git", text, files, checkout=checkout)
        return _source(path.resolve().name, "folder", text, read_folder(path))
    if os.path.lexists(path):
        if not path.is_file():
            raise TaskError(f"source {text!r} is neither a folder nor a regular file")
        if not is_archive(path):
            raise TaskError(f"source {text!r} isn't a source archive; known: {', '.join(ARCHIVE_SUFFIXES)}")
        earlier = tuple(_earlier(item, "", download_dir) for item in releases)
        return _source(_stem(path), "archive", text, read_archive(path), releases=earlier)
    return None


def _open_package(text: str, download_dir: Path, releases: tuple[str, ...]) -> Source:
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise TaskError(f"source {text!r} is no folder, no archive and no package name (NAME or NAME==VERSION)")
    archive = download(text, download_dir)
    earlier = tuple(_earlier(item, match[1], download_dir) for item in releases)
    return _source(_stem(archive), "package", text, read_archive(archive), releases=earlier)


def _source(name: str, kind: str, origin: str, files: Files, **more: object) -> Source:
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "source"
    return Source(name=clean, kind=kind, origin=origin, files=files.content, notes=files.notes, **more)  # type: ignore[arg-type]


def _earlier(item: str, package: str, download_dir: Path) -> tuple[str, Mapping[str, bytes]]:
    path = Path(item)
    if not path.is_file():
        if not package:
            raise TaskError(f"release {item!r}: no such archive")
        path = download(f"{package}=={item}", download_dir)
    return _stem(path), read_archive(path).content


def _stem(path: Path) -> str:
    name = path.name
    suffix = next((suffix for suffix in sorted(ARCHIVE_SUFFIXES, key=len, reverse=True) if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)] if suffix else name


def download(requirement: str, folder: Path) -> Path:
    """Fetch a package's source archive with pip, in a box with network; one that is there already is kept.

    Raises:
        TaskError: There is no such package, it has no source archive, or the network is down.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise TaskError(f"package {requirement!r} isn't NAME or NAME==VERSION")
    name, version = match[1], (match[2] or "").removeprefix("==")
    if version and (kept := _find(folder, name, version)):
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download") as work:
        for part in ("files", "answers"):
            (Path(work) / part).mkdir()
        (Path(work) / "answers" / "sitecustomize.py").write_text(_ANSWERS, encoding="utf-8")
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--use-pep517", "--no-build-isolation", "--no-binary", name]
        variables = {
            key: os.environ[key] for key in (*_PASSED_ON, *(key for key in os.environ if key.startswith("PIP_"))) if key in os.environ
        }
        done = run_boxed(
            [*argv, "-d", "/out/files", requirement],
            writable={"/out": work},
            variables={**variables, "PYTHONPATH": "/out/answers"},
            network=True,
            timeout_s=300,
        )
        found = [path for path in (Path(work) / "files").iterdir() if is_archive(path) and path.is_file() and not path.is_symlink()]
        if done.exit_code or len(found) != 1:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
            raise TaskError(
                f"source archive of {requirement!r} can't be fetched: {' '.join(lines)[:400] or 'pip left none'}", retryable=True
            )
        target = folder / found[0].name
        shutil.move(found[0], target)
    return target


def _find(folder: Path, name: str, version: str) -> Path | None:
    wanted = _plain(f"{name}-{version}")
    found = [path for path in folder.glob("*") if is_archive(path) and _plain(_stem(path)) == wanted] if folder.is_dir() else []
    return found[0] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
