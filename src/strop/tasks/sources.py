"""Pinned sources of tasks: pure-Python wheels and the standard library, with versions, digests and licences.

The table is ``sources.toml`` beside this file. ``python -m strop.tasks.sources DIR`` downloads and checks the archives.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import platform
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from strop.core.errors import TaskError

TABLE = Path(__file__).with_name("sources.toml")
_SKIPPED = (
    "test",
    "tests",
    "testing",
    "_vendor",
    "vendor",
    "vendored",
    "extern",
    "docs",
    "examples",
    "benchmarks",
    "locale",
    "__pycache__",
)
_MAX_TEST_BYTES = 100_000
_LICENCE_NAMES = ("license", "licence", "copying", "notice", "authors")


@dataclass(frozen=True, slots=True)
class Source:
    """One row of the table.

    Attributes:
        name: Distribution name, ``"stdlib"`` for the standard library.
        version: Pinned version; for the standard library that of the interpreter that built the pool.
        file: Archive name.
        sha256: Its digest.
        licence: SPDX expression.
        include: Path prefixes to take (a file or a folder); empty takes every module.
    """

    name: str
    version: str
    file: str
    sha256: str
    licence: str
    include: tuple[str, ...]
    part: str = ""
    """Name of the part, where one source makes several trees."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of one source, as they lie in its archive.

    Attributes:
        source: Where they come from.
        files: Python modules, and licence texts under their own names.
    """

    source: Source
    files: dict[str, bytes]

    @property
    def tree_id(self) -> str:
        """``"boltons-26.2.0"``, or ``"stdlib-3.11.7-text"``."""
        return "-".join(filter(None, (self.source.name, self.source.version, self.source.part)))


def load_table(path: Path = TABLE) -> list[Source]:
    """Read the source table.

    Raises:
        TaskError: It is missing or has a wrong row.
    """
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
        return [
            Source(
                name=row["name"],
                version=row["version"],
                file=row.get("file", ""),
                sha256=row.get("sha256", ""),
                licence=row["licence"],
                include=tuple(row.get("include", ())),
                part=row.get("tree", ""),
            )
            for row in rows
        ]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise TaskError(f"source table {str(path)!r} can't be read: {error}") from None


def fetch(sources: list[Source], folder: Path) -> None:
    """Download the archives that ``folder`` lacks and check every digest.

    Raises:
        TaskError: A download fails or a digest differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source.name == "stdlib":
            continue
        target = folder / source.file
        if not target.exists():
            argv = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--platform",
                "any",
                "-d",
                str(folder),
            ]
            done = subprocess.run([*argv, f"{source.name}=={source.version}"], capture_output=True, text=True, check=False)
            if done.returncode or not target.exists():
                raise TaskError(f"{source.name} {source.version}: download of {source.file} failed: {done.stderr[-300:]}", retryable=True)
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        if digest != source.sha256:
            raise TaskError(f"{target.name}: sha256 is {digest}, the source table says {source.sha256}")


def read_tree(source: Source, folder: Path) -> Tree:
    """Return the modules of a fetched source (tests, vendored code and documents left out) and its licence texts.

    Raises:
        TaskError: The archive can't be read.
    """
    if source.name == "stdlib":
        return _stdlib_tree(source)
    try:
        with zipfile.ZipFile(folder / source.file) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
            files = {name: archive.read(name) for name in names if _is_taken(name, source.include)}
            for name in names:
                last = name.rpartition("/")[2]
                if last.lower().startswith(_LICENCE_NAMES) and not name.endswith(".py") and last not in files:
                    files[last] = archive.read(name)
            if all(path.endswith(".py") for path in files):
                # No licence text in the archive: its description names the licence and the authors.
                files["METADATA"] = next(archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise TaskError(f"{source.file}: can't be read: {error}") from None
    return Tree(source, files)


def example_texts(tree: Tree, folder: Path) -> list[str]:
    """Texts that may hold example calls: the tree's modules, the package's own tests and its description."""
    texts = [data for path, data in tree.files.items() if path.endswith(".py")]
    if tree.source.file:
        with zipfile.ZipFile(folder / tree.source.file) as archive:
            for info in archive.infolist():
                is_test = info.filename.endswith(".py") and "test" in info.filename and info.file_size < _MAX_TEST_BYTES
                if is_test or info.filename.endswith(".dist-info/METADATA"):
                    texts.append(archive.read(info))
    return [data.decode("utf-8", "replace") for data in texts]


def _is_taken(name: str, include: tuple[str, ...]) -> bool:
    parts = name.split("/")
    if not name.endswith(".py") or ".dist-info" in parts[0] or ".data" in parts[0]:
        return False
    if any(part in _SKIPPED or part.startswith(("test_", "tests_")) for part in (*parts[:-1], parts[-1].removesuffix(".py"))):
        return False
    if not include:
        return True
    is_parent = parts[-1] == "__init__.py" and any(prefix.startswith("/".join(parts[:-1]) + "/") for prefix in include)
    return is_parent or any(name == prefix or name.startswith(prefix.rstrip("/") + "/") for prefix in include)


def _stdlib_tree(source: Source) -> Tree:
    """The chosen modules under ``Lib/``, as in the interpreter's source repository: there they don't hide the real ones."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, bytes] = {}
    for name in source.include:
        path = root / name
        parents = [root / parent / "__init__.py" for parent in Path(name).parents if parent.name]
        files.update({f"Lib/{item.relative_to(root).as_posix()}": item.read_bytes() for item in parents if item.exists()})
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files.update({f"Lib/{item.relative_to(root).as_posix()}": item.read_bytes() for item in found if item.exists()})
    for candidate in (root / "LICENSE.txt", root.parent.parent / "LICENSE.txt"):
        if candidate.exists():
            files["LICENSE.txt"] = candidate.read_bytes()
            break
    return Tree(dataclasses.replace(source, version=platform.python_version()), files)


def pin(wheel: Path, include: tuple[str, ...] = ()) -> str:
    """Return the table row of a wheel (used when the table is extended)."""
    (distribution,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    meta = importlib.metadata.PathDistribution(distribution).metadata  # type: ignore[arg-type]
    classifiers = [text.rpartition(" :: ")[2] for text in meta.get_all("Classifier") or [] if text.startswith("License ::")]
    named = [*(meta.get_all("License-Expression") or []), *classifiers, *(meta.get_all("License") or []), "unknown"]
    licence = named[0].split("\n")[0][:60]
    rows = [
        "[[source]]",
        f'name = "{meta["Name"].lower()}"',
        f'version = "{meta["Version"]}"',
        f'file = "{wheel.name}"',
        f'sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"',
        f'licence = "{licence}"',
    ]
    if include:
        rows.append(f"include = [{', '.join(repr(item).replace(chr(39), chr(34)) for item in include)}]")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Download and check the archives of the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sources = load_table()
    fetch(sources, arguments.folder)
    print(f"{len(sources)} sources in {arguments.folder}")


if __name__ == "__main__":
    main()
