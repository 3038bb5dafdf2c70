"""Source code for the base: modules of pinned wheels and of the standard library, held-out modules left out.

A corpus file is zstd-compressed JSON lines: first a header (sources with version, licence, counts), then one module a line:
``{"package", "path", "text", "functions": [[name, start_line, end_line], ...]}``.
"""

from __future__ import annotations

import ast
import email.parser
import io
import json
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import zstandard

from strop.core.errors import TaskError
from strop.tasks.mutation import FunctionSpan, find_functions, normalised_digest
from strop.tasks.split import module_of, split_of

SKIPPED_PARTS = ("test", "vendor", "example", "docs", "benchmark", "migrations", "locale")
MAX_MODULE_BYTES = 120_000
FUNCTION_LINES = (3, 40)


@dataclass(frozen=True, slots=True)
class Module:
    """One source module.

    Attributes:
        package: Distribution name, or ``"stdlib"``.
        path: Path inside the archive.
        text: Source.
        functions: Functions of 3 to 40 lines.
    """

    package: str
    path: str
    text: str
    functions: tuple[FunctionSpan, ...]


def wheel_modules(wheel: Path) -> tuple[dict[str, str], Iterator[tuple[str, str]]]:
    """Return facts (name, version, licence) and ``(path, text)`` of a wheel's Python modules.

    Raises:
        TaskError: If the archive can't be read or has no metadata.
    """
    try:
        archive = zipfile.ZipFile(wheel)
        meta_path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    except (zipfile.BadZipFile, StopIteration, OSError) as error:
        raise TaskError(f"wheel {wheel.name!r} can't be read: {error}") from None
    meta = email.parser.HeaderParser().parsestr(archive.read(meta_path).decode("utf-8", "replace"))
    classifiers = [c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License")]
    licence = meta.get("License-Expression") or "; ".join(classifiers) or (meta.get("License") or "unknown").split("\n")[0][:60]
    facts = {"name": (meta.get("Name") or wheel.name).lower(), "version": meta.get("Version") or "", "licence": licence}

    def modules() -> Iterator[tuple[str, str]]:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            if info.filename.endswith(".py") and info.file_size <= MAX_MODULE_BYTES and ".dist-info/" not in info.filename:
                yield info.filename, archive.read(info).decode("utf-8", "replace")

    return facts, modules()


def stdlib_modules() -> tuple[dict[str, str], Iterator[tuple[str, str]]]:
    """Return facts and modules of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])

    def modules() -> Iterator[tuple[str, str]]:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            if not relative.startswith(("site-packages/", "lib2to3/", "idlelib/")) and path.stat().st_size <= MAX_MODULE_BYTES:
                yield relative, path.read_text(encoding="utf-8", errors="replace")

    return {"name": "stdlib", "version": sysconfig.get_python_version(), "licence": "PSF-2.0"}, modules()


def build_corpus(wheels: Path, out: Path) -> dict[str, int]:
    """Write ``out`` (training modules) and ``out.heldout`` (held-out modules, for the gate only).

    Functions of training modules whose normalised digest occurs in a held-out module are left out of the function lists and their
    modules are dropped, so that no held-out function is seen in any form.

    Returns:
        Counts: modules, functions, dropped duplicates.
    """
    sources, train, heldout = [], [], []
    for facts, modules in [stdlib_modules(), *(wheel_modules(w) for w in sorted(wheels.glob("*.whl")))]:
        if "gpl" in facts["licence"].lower() or "gnu" in facts["licence"].lower():
            continue
        kept = 0
        for path, text in modules:
            if any(part in path.lower() for part in SKIPPED_PARTS):
                continue
            module = read_module(facts["name"], path, text)
            if module is None:
                continue
            (heldout if split_of(module.package, module_of(path)) == "heldout" else train).append(module)
            kept += 1
        if kept:
            sources.append({**facts, "modules": kept})
    forbidden = {normalised_digest(m.text, f) for m in heldout for f in m.functions} | pool_digests()
    seen: set[str] = set()
    clean, dropped = [], 0
    for module in train:
        digests = [normalised_digest(module.text, f) for f in module.functions]
        if any(d in forbidden for d in digests):
            dropped += 1
            continue
        fresh = tuple(f for f, d in zip(module.functions, digests, strict=True) if d not in seen)
        seen.update(digests)
        if fresh:
            clean.append(Module(module.package, module.path, module.text, fresh))
    write_corpus(out, sources, clean)
    write_corpus(out.with_name(out.name + ".heldout"), sources, heldout)
    return {"modules": len(clean), "functions": sum(len(m.functions) for m in clean), "heldout": len(heldout), "dropped": dropped}


def pool_digests() -> set[str]:
    """Return the normalised digests of the held-out functions of the pool that ships with strop."""
    path = resources.files("strop").joinpath("assets", "pools", "repair", "heldout_digests.txt")
    return {line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def read_module(package: str, path: str, text: str) -> Module | None:
    """Return the module, or ``None`` if it doesn't parse or has no usable function."""
    text = text.replace("\r\n", "\n")
    if "\t" in text or "\f" in text or not text.isascii():
        return None
    try:
        ast.parse(text)
        spans = find_functions(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    low, high = FUNCTION_LINES
    functions = tuple(f for f in spans if low <= f.end_line - f.start_line + 1 <= high)
    return Module(package, path, text, functions) if functions else None


def write_corpus(path: Path, sources: list[dict[str, object]], modules: list[Module]) -> None:
    """Write a corpus file atomically."""
    lines = [json.dumps({"sources": sources})]
    for m in modules:
        spans = [[f.name, f.start_line, f.end_line] for f in m.functions]
        lines.append(json.dumps({"package": m.package, "path": m.path, "text": m.text, "functions": spans}))
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(zstandard.ZstdCompressor(level=6).compress("\n".join(lines).encode()))
    partial.replace(path)


def read_corpus(path: Path) -> tuple[list[dict[str, object]], list[Module]]:
    """Read a corpus file: sources and modules.

    Raises:
        TaskError: If the file is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8").read()
        header, *rows = [json.loads(line) for line in text.split("\n")]
    except (OSError, zstandard.ZstdError, ValueError) as error:
        raise TaskError(f"corpus {str(path)!r} can't be read: {error}; build it with `make base`") from None
    return header["sources"], [
        Module(r["package"], r["path"], r["text"], tuple(FunctionSpan(n, s, e) for n, s, e in r["functions"])) for r in rows
    ]
