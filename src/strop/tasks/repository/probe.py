"""Finds how a repository is installed and how its tests run, by trying: requirements, then a listing, then three runs in three orders.

The three runs are also the first half of the gate: what fails or varies on the untouched source is never asked of anybody.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.layers import BoxRunner
from strop.tasks.repository.environment import RUNNERS, Environment, install
from strop.tasks.repository.layout import Layout, find_layout
from strop.tasks.repository.metadata import Metadata, clean_requirements, read_metadata
from strop.tasks.repository.source import Source
from strop.tasks.repository.suite import (
    OUTCOMES,
    VENV,
    Coverage,
    Listing,
    SuiteRun,
    SuiteSpec,
    file_of,
    list_suite,
    run_suite,
    shuffled,
)
from strop.tasks.trees import link_tree, make_once, write_tree

MIN_TESTS = 5
MIN_SHARE = 0.5
SUITE_CPU_S = 180.0
MAX_TESTS = 4000
_ROUNDS = 3
_MODULE_OF = {
    "yaml": "PyYAML",
    "attr": "attrs",
    "dateutil": "python-dateutil",
    "bs4": "beautifulsoup4",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "pkg_resources": "setuptools<81",
    "setuptools": "setuptools",
    "distutils": "setuptools",
    "google": "protobuf",
    "jose": "python-jose",
    "OpenSSL": "pyOpenSSL",
    "pytest_asyncio": "pytest-asyncio",
}
_MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A repository whose suite runs.

    Attributes:
        source: Where it comes from.
        metadata: What it declares.
        layout: Where packages and tests lie.
        files: Its files, generated ones included.
        environment: Its installed requirements.
        tree: Host folder with files and ``.venv``, read only for everybody.
        spec: How its tests run.
        tests: Tests that passed three times in three orders, in the order of the suite.
        milliseconds: Processor time of each of them.
        coverage: Which of them call which functions.
        excluded: Tests that are left out, by reason, with an example.
    """

    source: Source
    metadata: Metadata
    layout: Layout
    files: Mapping[str, bytes]
    environment: Environment
    tree: Path
    spec: SuiteSpec
    tests: tuple[str, ...]
    milliseconds: tuple[int, ...]
    coverage: Coverage
    excluded: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def suite_s(self) -> float:
        """Processor seconds of all its tests, start-up left out."""
        return sum(self.milliseconds) / 1000


def lay_tree(files: Mapping[str, bytes], metadata: Metadata, environment: Environment, target: Path) -> Path:
    """Write a workspace once: files with checked byte code, requirements by hard links, and what an installed package says about itself.

    Raises:
        TaskError: It can't be written.
    """

    def fill(folder: Path) -> None:
        write_tree(files, folder)
        link_tree(environment.folder, folder / VENV, {})
        if metadata.name:
            info = folder / VENV / f"{re.sub(r'[-_.]+', '_', metadata.name)}-{metadata.version}.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata.name}\nVersion: {metadata.version}\n", encoding="utf-8")
            (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
            (info / "entry_points.txt").write_text(metadata.entry_points, encoding="utf-8")

    return make_once(target, fill)


async def probe(source: Source, runner: BoxRunner, pool: Path, work: Path, *, cpu_s: float = SUITE_CPU_S) -> Repository:
    """Make a source's suite run.

    Args:
        source: The source.
        runner: Starts boxes.
        pool: Folder whose ``environments`` keeps what is installed.
        work: Folder for trees.
        cpu_s: Processor seconds that the whole suite may take.

    Raises:
        TaskError: It holds no package or no tests, can't be imported, or its suite fails before anything was changed.
        SandboxError: The machinery failed.
    """
    metadata = read_metadata(source.files)
    layout = find_layout(source.files, metadata.name or source.name)
    if not layout.packages:
        raise TaskError(f"source {source.name!r} holds no Python package or module")
    if not layout.tests:
        raise TaskError(f"source {source.name!r} holds no tests (no files named test_*.py or *_test.py); an archive may leave them out")
    files = {**generated_files(source.files, metadata), **source.files}
    spec = SuiteSpec(roots=tuple(dict.fromkeys((layout.root, ""))), arguments=_kept_arguments(files))
    environment, tree, listing = await _listed(source, files, metadata, layout, spec, runner, (pool, work), cpu_s)
    if not listing.tests:
        first = next((message for _, message in listing.errors), "nothing was collected")
        kind = "no test can be imported" if listing.errors else "no tests"
        raise TaskError(f"source {source.name!r}: {kind}: {first}")
    tests, first, runs, excluded = await _stable(runner, tree, spec, listing.tests[:MAX_TESTS], cpu_s)
    for name, _ in listing.errors:
        _note(excluded, "can't be collected", name)
    asked = len(listing.tests[:MAX_TESTS])
    if len(tests) < MIN_TESTS or len(tests) < MIN_SHARE * asked:
        why = "; ".join(f"{count} {reason} (first {example})" for reason, (count, example) in excluded.items())
        raise TaskError(
            f"the suite of {source.name!r} fails before anything was changed: {len(tests)} of {asked} tests pass three times, at least "
            f"{MIN_TESTS} and {MIN_SHARE:.0%} are needed: {why or 'no reason'}{_hint(environment)}"
        )
    place = {test: number for number, test in enumerate(tests)}
    coverage = Coverage.read(first)
    for key, numbers in list(coverage.functions.items()):
        coverage.functions[key] = {place[runs[n]] for n in numbers if n < len(runs) and runs[n] in place}
    spent = {runs[index]: value for index, value in first.milliseconds.items()}
    return Repository(
        source=source,
        metadata=metadata,
        layout=layout,
        files=files,
        environment=environment,
        tree=tree,
        spec=spec,
        tests=tuple(tests),
        milliseconds=tuple(spent.get(test, 0) for test in tests),
        coverage=coverage,
        excluded=excluded,
    )


async def _listed(
    source: Source,
    files: Mapping[str, bytes],
    metadata: Metadata,
    layout: Layout,
    spec: SuiteSpec,
    runner: BoxRunner,
    places: tuple[Path, Path],
    cpu_s: float,
) -> tuple[Environment, Path, Listing]:
    """Install, lay the tree and list the tests; missing modules are installed, and an older pytest is tried where a newer one fails."""
    extra: list[str] = []
    runners = list(RUNNERS)
    for number in range(_ROUNDS + len(RUNNERS)):
        environment = install(metadata, extra, places[0] / "environments", runner=runners[0])
        tree = lay_tree(
            files, metadata, environment, places[1] / "trees" / f"{source.name}-{source.digest[:8]}-{environment.folder.name[:8]}"
        )
        try:
            listing = await list_suite(runner, [str(tree)], spec, layout.tests, cpu_s=cpu_s)
        except TaskError as error:
            if len(runners) == 1:
                raise TaskError(f"source {source.name!r}: {error}") from None
            runners.pop(0)
            continue
        missing = _missing_modules(listing, layout)
        fresh = [item for item in missing if item not in extra and item not in dict(environment.missing)]
        if not fresh or number >= _ROUNDS:
            return environment, tree, listing
        extra += fresh
    raise TaskError(f"source {source.name!r}: its tests still lack modules: {', '.join(extra)}")


def _missing_modules(listing: Listing, layout: Layout) -> list[str]:
    own = {path.rpartition("/")[2].removesuffix(".py") for path in layout.packages}
    text = "\n".join([*(message for _, message in listing.errors), listing.text])
    names = {match.split(".")[0] for match in _MISSING.findall(text)}
    wanted: list[str] = [_MODULE_OF.get(str(name), str(name)) for name in sorted(names - own - {"tests", "test", "conftest"})]
    return clean_requirements(wanted)[:8]


async def _stable(
    runner: BoxRunner, tree: Path, spec: SuiteSpec, listed: Sequence[str], cpu_s: float
) -> tuple[list[str], SuiteRun, list[str], dict[str, tuple[int, str]]]:
    """Run the suite in its own order (traced) and in two others.

    Returns:
        Tests that passed each time, the first run, the tests that it was asked for, and what was excluded.
    """
    excluded: dict[str, tuple[int, str]] = {}
    first, tests = await _first_run(runner, tree, spec, list(listed), cpu_s, excluded)
    asked = tests
    for number, letter in enumerate(first.outcomes):
        if letter != "p":
            _note(excluded, OUTCOMES[letter], asked[number])
    tests = [asked[number] for number in sorted(first.passed())]
    for order in range(2):
        if not tests:
            break
        mixed = shuffled(tests, "probe", order)
        run = await run_suite(runner, [str(tree)], spec, mixed, cpu_s=cpu_s)
        if run.ending != "ok":
            raise TaskError(f"the suite ends before its last test in another order ({run.ending})")
        good = {mixed[number] for number in run.passed()}
        for test in tests:
            if test not in good:
                _note(excluded, "depends on the order or varies", test)
        tests = [test for test in tests if test in good]
    return tests, first, asked, excluded


async def _first_run(
    runner: BoxRunner, tree: Path, spec: SuiteSpec, tests: list[str], cpu_s: float, excluded: dict[str, tuple[int, str]]
) -> tuple[SuiteRun, list[str]]:
    """Run the suite in its own order, again without a test that ends the run; returns the run and the tests that it was asked for."""
    ending = ""
    for _ in range(_ROUNDS):
        run = await run_suite(runner, [str(tree)], spec, tests, cpu_s=cpu_s, trace=True)
        if run.ending == "ok":
            return run, tests
        ending = run.ending
        hung = max((number for number, letter in enumerate(run.outcomes) if letter != "m"), default=-1) + 1
        if hung >= len(tests):
            break
        _note(excluded, f"ends the run ({run.ending})", tests[hung])
        bad_file = file_of(tests[hung])
        tests = [test for number, test in enumerate(tests) if number != hung and (run.is_loaded or file_of(test) != bad_file)]
        if not tests:
            break
    where = "; ".join(f"{reason}: {example}" for reason, (_, example) in excluded.items())
    raise TaskError(f"the suite ends before its last test ({ending}): {where}")


def _note(excluded: dict[str, tuple[int, str]], reason: str, example: str) -> None:
    count, first = excluded.get(reason, (0, example))
    excluded[reason] = (count + 1, first)


def _hint(environment: Environment) -> str:
    counted = Counter(reason for _, reason in environment.missing)
    return f"; not installed: {', '.join(item for item, _ in environment.missing)} ({next(iter(counted))})" if counted else ""


def _kept_arguments(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """What of a repository's own pytest options a run needs: the import mode, and nothing else."""
    for path in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        match = re.search(rb"--import-mode[= ](\w+)", files.get(path, b""))
        if match:
            return (f"--import-mode={match[1].decode()}",)
    return ()


def generated_files(files: Mapping[str, bytes], metadata: Metadata) -> dict[str, bytes]:
    """Version modules that a build back end writes and a checkout lacks."""
    try:
        tool: Any = tomllib.loads(files.get("pyproject.toml", b"").decode("utf-8", "replace")).get("tool", {})
    except tomllib.TOMLDecodeError:
        return {}
    scm = tool.get("setuptools_scm", {}) if isinstance(tool, dict) else {}
    hooks = tool.get("hatch", {}).get("build", {}).get("hooks", {}).get("vcs", {}) if isinstance(tool.get("hatch", {}), dict) else {}
    paths = [scm.get("write_to"), scm.get("version_file"), hooks.get("version-file")]
    version = metadata.version if metadata.version != "0" else "0.0.0"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    text = f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {numbers!r}\n"
    return {path: text.encode() for path in paths if isinstance(path, str) and path.endswith(".py") and ".." not in path and path[0] != "/"}
