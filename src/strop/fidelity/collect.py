"""Asks boxes: starts one after the other, of both kinds in mixed order, and keeps their answers to every probe.

Order matters: load, uptime and caches drift while an audit runs, so the kinds take turns, in an order drawn anew for every pair.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from strop.core.random import generator
from strop.fidelity import inside
from strop.fidelity.probes import PROBES, UNREADABLE, Value, checked, read_answers
from strop.ports import ExecResult, Sandbox, SandboxProvider

TIMEOUT_S = 30.0
_SOURCE = Path(inside.__file__).read_text(encoding="utf-8")
_CHUNK = 13  # probes of one call: what a box may print is cut at 10,000 characters
_TEST_ARGV = ("-m", "unittest", "discover", "-q", "-s", "tests")
_MIXED = "import sys\nfor i in range(4):\n print('o', i)\n print('e', i, file=sys.stderr)"
_WORD = re.compile(r"[A-Za-z_]+|0+|[^\sA-Za-z_0-9]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A workspace to ask about; ``name`` is the group that its boxes belong to, ``words`` what its files say."""

    name: str
    base: str
    words: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """All that one box answered.

    Attributes:
        is_production: The kind of the box.
        group: Name of its task: boxes of one group never stand on both sides of a fold.
        values: Answer by probe name; every probe has one.
    """

    is_production: bool
    group: str
    values: Mapping[str, Value]


def make_tasks(root: Path, number: int) -> list[Task]:
    """Write ``number`` small repositories with tests of which some fail; they differ in every name that a box could learn."""
    tasks = []
    stems = ("ledger", "parcel", "walnut", "orchard", "turbine", "almanac", "quarry", "lattice", "harbour", "beacon", "meadow", "cobalt")
    for index in range(number):
        stem = f"{stems[index % len(stems)]}{index // len(stems) or ''}"
        base = root / f"task{index}"
        for name, text in _files(stem, index).items():
            path = base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        words = frozenset(word for text in _files(stem, index).values() for word in re.findall(r"[A-Za-z_]+", text))
        tasks.append(Task(name=stem, base=str(base), words=words | {stem, f"test_{stem}"}))
    return tasks


def _files(stem: str, index: int) -> dict[str, str]:
    parts = ("add", "bend", "clip", "drop", "edge", "fold")
    functions = "".join(f"def {part}_{stem}(x):\n    return x * {index + 2} + {at}\n\n\n" for at, part in enumerate(parts))
    cases = "".join(
        f"    def test_{part}(self):\n        self.assertEqual({part}_{stem}(1), {index + 2 + at + at % 2})\n\n"
        for at, part in enumerate(parts)
    )
    imports = ", ".join(f"{part}_{stem}" for part in parts)
    return {
        f"{stem}/__init__.py": "",
        f"{stem}/core.py": functions.rstrip() + "\n",
        f"{stem}/boom.py": f"from {stem}.core import add_{stem}\n\nprint(add_{stem}(None))\n",
        "tests/__init__.py": "",
        f"tests/test_{stem}.py": f"import unittest\n\nfrom {stem}.core import {imports}\n\n\n"
        f"class Case(unittest.TestCase):\n{cases.rstrip()}\n",
        "README": f"{stem}: a small repository\n",
    }


async def collect(
    train: SandboxProvider,
    production: SandboxProvider,
    tasks: Sequence[Task],
    boxes: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Observation]:
    """Ask ``boxes`` boxes of each kind.

    Args:
        train: Starts boxes as training has them.
        production: Starts boxes as production has them.
        tasks: Workspaces, taken in turn; both kinds get the same ones equally often.
        boxes: How many of each kind.
        seed: Fixes the order.
        progress: Called with the number of boxes that have answered, and of all.

    Raises:
        SandboxError: A box can't be started, or its machinery failed.
    """
    for provider in (train, production):  # what only the first box of a provider pays for
        await observe(provider, tasks[0], is_production=False)
    rng = generator("fidelity", "order", seed)
    found: list[Observation] = []
    for index in range(boxes):
        sides = [(train, False), (production, True)]
        for provider, is_production in sides if rng.random() < 0.5 else reversed(sides):
            found.append(await observe(provider, tasks[index % len(tasks)], is_production=is_production))
            progress(len(found), 2 * boxes)
    return found


async def observe(provider: SandboxProvider, task: Task, *, is_production: bool) -> Observation:
    """Start a box, ask it everything, stop it.

    Raises:
        SandboxError: It can't be started, or its machinery failed.
    """
    box = await provider.start(task.base)
    try:
        values = await _static(box) | await _dynamic(box) | await _transcript(box, task.words)
    finally:
        await box.stop()
    return Observation(is_production=is_production, group=task.name, values={name: values.get(name, UNREADABLE) for name in PROBES})


async def _static(box: Sandbox) -> dict[str, Value]:
    names = [*inside.PROBES]
    values: dict[str, Value] = {}
    for start in range(0, len(names), _CHUNK):
        chunk = names[start : start + _CHUNK]
        before = time.time()
        result = await box.run_python(["-c", _SOURCE, *chunk], timeout_s=TIMEOUT_S)
        values |= read_answers(result.output, chunk)
        if "clock_s" in chunk:
            values["clock_offset_s"] = _offset(values.pop("clock_s"), before, time.time())
    return values


def _offset(clock: Value, before: float, after: float) -> Value:
    """Seconds that a box's clock lies outside the time in which it was read; 0 if it lies inside."""
    if not isinstance(clock, float):
        return UNREADABLE
    return round(clock - min(max(clock, before - 0.05), after + 0.05), 3)


async def _dynamic(box: Sandbox) -> dict[str, Value]:
    async def shell(script: str, timeout_s: float = TIMEOUT_S) -> ExecResult:
        return await box.exec(["sh", "-c", script], timeout_s=timeout_s)

    commands = [(await box.exec(["true"], timeout_s=TIMEOUT_S)).duration_s * 1000 for _ in range(3)]
    writes = await shell("i=0; while [ $i -lt 40 ]; do echo line > strop-probe-$i; i=$((i+1)); done; ls -U; rm -f strop-probe-*")
    listed = [name for name in writes.output.split() if name.startswith("strop-probe-")]
    errors = await shell("no-such-command; echo $?; cat /no/such/file; echo $?; (cd /no/where); echo $?")
    codes = [await shell("kill -9 $$"), await box.exec(["/no/such/program"], timeout_s=TIMEOUT_S)]
    long = (await shell("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done")).output
    mixed = await box.run_python(["-c", _MIXED], timeout_s=TIMEOUT_S)
    late = await shell("echo begun; sleep 20", timeout_s=0.1)
    return {
        "latency_exec_ms": statistics.median(commands),
        "latency_exec_p90_ms": max(commands),
        "latency_python_ms": mixed.duration_s * 1000,
        "latency_write_ms": writes.duration_s * 1000,
        "error_text": checked(errors.output.splitlines()),
        "exit_codes": tuple(f"{at}:{result.exit_code}" for at, result in enumerate(codes)),
        "truncation": checked([f"length {len(long)}", *(_plain(line) for line in long.splitlines() if not line.startswith("line "))][:10]),
        "output_order": checked(mixed.output),
        "timeout": checked([str(late.exit_code), late.killed_by, late.output]),
        "listing_order": "sorted" if listed == sorted(listed) else "unsorted",
    }


async def _transcript(box: Sandbox, words: frozenset[str]) -> dict[str, Value]:
    tests = (await box.run_python(_TEST_ARGV, timeout_s=TIMEOUT_S)).output
    commands = await box.exec(
        [
            "sh",
            "-c",
            "ls -la; wc -c README; grep -rn return . | head -5; sort --version | head -1; sed --version | head -1; python3 --version",
        ],
        timeout_s=TIMEOUT_S,
    )
    package = next((path.split("/")[0] for path in box.list_files() if path.endswith("/boom.py")), "missing")
    boom = await box.run_python(["-m", f"{package}.boom"], timeout_s=TIMEOUT_S)
    return {
        "transcript_tests": ngrams(tests, words),
        "transcript_test_order": disorder(re.findall(r"^(?:FAIL|ERROR): (\w+)", tests, re.MULTILINE)),
        "transcript_commands": ngrams(commands.output, words),
        "transcript_traceback": ngrams(boom.output, words),
    }


def _plain(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def ngrams(text: str, words: frozenset[str]) -> Value:
    """Return the single words and pairs of ``text``, digits made equal, without ``words``: what is left is the box's, not the task's.

    Example: ``ngrams("3 failed in foo.py", {"foo"})`` has ``"failed"``, ``"0 failed"``, ``"in"``, ... but nothing with ``foo``.
    """
    found = _WORD.findall(_plain(text[:20_000]))
    pairs = [f"{a} {b}" for a, b in pairwise(found) if a not in words and b not in words]
    return checked(sorted({*(word for word in found if word not in words), *pairs})[:200])


def disorder(names: Sequence[str]) -> Value:
    """Return the share of pairs that stand in other than alphabetical order, or ``"none"`` with fewer than two names."""
    pairs = [(a, b) for at, a in enumerate(names[:50]) for b in names[at + 1 : 50]]
    return sum(a > b for a, b in pairs) / len(pairs) if pairs else "none"
