"""Where a repository keeps its packages and its tests. Pure functions over paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NOT_PACKAGES = frozenset(
    [
        "test",
        "tests",
        "testing",
        "doc",
        "docs",
        "example",
        "examples",
        "benchmark",
        "benchmarks",
        "bench",
        "tools",
        "scripts",
        "script",
        "ci",
        "news",
        "changes",
        "changelog",
        "requirements",
        "tasks",
        "utils_dev",
        "dev",
        ".github",
        "licenses",
        "license",
        "samples",
        "demo",
        "demos",
        "build",
        "dist",
        "noxfile",
        "setup",
        "conftest",
        "conf",
        "fabfile",
        "manage",
        "versioneer",
        "ez_setup",
        "runtests",
        "run_tests",
        "get-pip",
        "tasks",
    ]
)
_ROOTS = ("src", "lib", "python", "")
_TEST_NAME = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are.

    Attributes:
        root: Folder that goes on ``sys.path``: ``"src"``, or ``""`` for the top.
        packages: Top-level packages and modules, as paths: ``("src/attr", "src/attrs")``.
        sources: Python files of the packages that aren't tests.
        tests: Files that hold tests.
    """

    root: str
    packages: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]


def is_test_path(path: str) -> bool:
    """Whether a file belongs to the tests: in a folder of tests, or named like one."""
    *folders, name = path.split("/")
    return any(folder.lower() in ("test", "tests") for folder in folders) or bool(_TEST_NAME.fullmatch(name)) or name == "conftest.py"


def is_test_module(path: str) -> bool:
    """Whether pytest should look for tests in a file."""
    name = path.rpartition("/")[2]
    return bool(_TEST_NAME.fullmatch(name)) and not name.startswith("_")


def find_layout(files: Iterable[str], name: str) -> Layout:
    """Find packages and tests.

    Args:
        files: Every path.
        name: Distribution name; a package of that name wins over others at the top.
    """
    paths = sorted(path for path in files if path.endswith(".py"))
    root, packages = _packages(paths, name)
    inside = tuple(f"{package}/" for package in packages if not package.endswith(".py"))
    sources = [path for path in paths if (path.startswith(inside) or path in packages) and not is_test_path(path)]
    tests = [path for path in paths if is_test_module(path)]
    return Layout(root, packages, tuple(sources), tuple(tests))


def _packages(paths: list[str], name: str) -> tuple[str, tuple[str, ...]]:
    for root in _ROOTS:
        prefix = f"{root}/" if root else ""
        inside = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
        tops: dict[str, int] = {}
        for path in inside:
            first, slash, rest = path.partition("/")
            stem = first.removesuffix(".py").lower()
            if stem in _NOT_PACKAGES or stem.startswith((".", "test_")) or (not slash and first == "setup.py"):
                continue
            if not slash or rest == "__init__.py" or "/" in rest or root:
                tops[first] = tops.get(first, 0) + 1
        whole = {top: count for top, count in tops.items() if top.endswith(".py") or _is_package(inside, top)}
        if whole:
            wanted = {re.sub(r"[-.]+", "_", name).lower(), name.replace("-", "").lower(), name.lower().removeprefix("python-")}
            named = [top for top in whole if top.removesuffix(".py").lower().lstrip("_") in wanted]
            # Beside the package of that name, other modules at the top are tools; other packages may be part of it.
            beside = [top for top in whole if top not in named and (root or not named or not top.endswith(".py"))]
            chosen = [*named, *beside]
            return root, tuple(sorted(prefix + top for top in chosen))
    return "", ()


def _is_package(paths: list[str], top: str) -> bool:
    return f"{top}/__init__.py" in paths or any(path.startswith(f"{top}/") and path.endswith("/__init__.py") for path in paths)


def module_name(path: str, layout: Layout) -> str:
    """Return the dotted name of a source file: ``"src/attr/_make.py"`` -> ``"attr._make"``."""
    inside = path.removeprefix(f"{layout.root}/") if layout.root else path
    return inside.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def num_source_lines(files: Mapping[str, bytes], layout: Layout) -> int:
    """Lines of the packages' own code, tests left out."""
    return sum(files[path].count(b"\n") for path in layout.sources)
