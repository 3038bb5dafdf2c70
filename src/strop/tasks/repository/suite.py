"""Running tests of a workspace in a fresh box, and reading what came out. The host's side of ``driver.py``.

The result channel is read as bytes: a line is a nonce, a number, a letter and milliseconds. Only a collecting or tracing run carries text,
and that is never used for a verdict.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from strop.core.errors import SandboxError, TaskError
from strop.core.random import generator
from strop.tasks.layers import BoxRunner, IsolatedRun

VENV = f".venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
"""Where a workspace's installed requirements lie, as in many a real checkout."""
PASSED = "p"
OUTCOMES: Mapping[str, str] = {
    "p": "passed",
    "f": "failed",
    "e": "error in set-up or tear-down",
    "s": "skipped",
    "x": "failed as expected",
    "X": "passed although expected to fail",
    "m": "missing",
}
MAX_STREAM_BYTES = 64 << 20
_GRACE_S = 10.0
_QUIET = (
    "-q",
    "--no-header",
    "--rootdir=/workspace",
    "--continue-on-collection-errors",
    "--assert=plain",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "-o",
    "addopts=",
    "-o",
    "required_plugins=",
    "-o",
    "xfail_strict=false",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteSpec:
    """How the tests of a workspace are run.

    Attributes:
        roots: Workspace folders on ``sys.path``: ``("src",)`` or ``("",)``.
        arguments: More arguments of pytest.
    """

    roots: tuple[str, ...] = ("",)
    arguments: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"roots": list(self.roots), "arguments": list(self.arguments)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteSpec:
        """Inverse of ``to_json``."""
        return cls(roots=tuple(data["roots"]), arguments=tuple(data["arguments"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """How a run ended.

    Attributes:
        outcomes: Letter of each requested test (``OUTCOMES``); ``"m"`` where nothing was reported.
        milliseconds: Processor time of each test that was reported, which other work of the machine doesn't change.
        ending: ``"ok"``, ``"timeout"``, ``"memory"``, ``"processes"``, ``"output"``, ``"forged"``, ``"broken"`` (pytest itself),
            ``"lost"``, ``"exitN"`` or ``"signalN"``.
        is_loaded: Whether the tests were found, so that agent code was loaded.
        is_ready: Whether the box got as far as starting the tests; false is a failure of the machinery.
        traces: What a collecting or tracing run told, raw.
        text: What was printed, capped.
        duration_s: Wall seconds.
    """

    outcomes: tuple[str, ...]
    milliseconds: Mapping[int, int]
    ending: str
    is_loaded: bool
    is_ready: bool
    traces: tuple[str, ...]
    text: str
    duration_s: float

    def passed(self) -> frozenset[int]:
        """Numbers of the tests that passed; nothing counts after a bad ending."""
        return frozenset(index for index, letter in enumerate(self.outcomes) if letter == PASSED) if self.ending == "ok" else frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What the suite holds.

    Attributes:
        tests: Node ids in the order of the suite.
        errors: Node id and message of what couldn't be collected.
        text: What was printed.
    """

    tests: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]
    text: str


@cache
def _driver() -> str:
    return resources.files("strop.tasks.repository").joinpath("driver.py").read_text(encoding="utf-8")


def file_of(node_id: str) -> str:
    """Return the file of a test: ``"tests/test_a.py::TestB::test_c[1]"`` -> ``"tests/test_a.py"``."""
    return node_id.partition("::")[0]


def function_of(node_id: str) -> str:
    """Return a test without its parameters: ``"tests/test_a.py::test_c[1-x]"`` -> ``"tests/test_a.py::test_c"``."""
    return re.sub(r"\[.*", "", node_id, flags=re.DOTALL)


def shuffled(tests: Sequence[str], *key: object) -> list[str]:
    """Return tests in another order: files, within them classes and functions; what shares a class stays together, as fixtures expect.

    The order depends on ``key`` alone.
    """
    rng = generator("suite-order", *key)

    def by_head(items: Sequence[tuple[tuple[str, ...], str]], depth: int) -> list[str]:
        groups: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for parts, test in items:
            groups.setdefault(parts[depth] if depth < len(parts) - 1 else f"\0{test}", []).append((parts, test))
        order = [list(groups)[int(i)] for i in rng.permutation(len(groups))]
        return [test for name in order for test in ([groups[name][0][1]] if name[0] == "\0" else by_head(groups[name], depth + 1))]

    return by_head([(tuple(function_of(test).split("::")), test) for test in dict.fromkeys(tests)], 0)


async def run_suite(
    runner: BoxRunner,
    layers: Sequence[str],
    spec: SuiteSpec,
    tests: Sequence[str],
    *,
    cpu_s: float,
    controls: Sequence[int] = (),
    trace: bool = False,
    explain: bool = False,
) -> SuiteRun:
    """Run tests in the order given.

    Args:
        runner: Starts boxes.
        layers: Host directories of the workspace, topmost first.
        spec: How the suite runs.
        tests: Node ids.
        cpu_s: Processor seconds for all of them; ten times as many pass on the clock before a run counts as hanging.
        controls: Numbers of tests that are made to fail at their end (see ``driver.spoil``).
        trace: Also record which functions each test calls.
        explain: Print tracebacks.

    Raises:
        SandboxError: The machinery failed.
    """
    options = (*_QUIET, "--tb=short" if explain else "--tb=no", *spec.arguments)
    files = list(dict.fromkeys(file_of(test) for test in tests))
    request = _request(spec, options, files, tests=list(tests), controls=list(controls), trace=trace, collect=False, cpu_s=cpu_s)
    return await _run(runner, layers, request, len(tests))


async def list_suite(runner: BoxRunner, layers: Sequence[str], spec: SuiteSpec, files: Sequence[str], *, cpu_s: float = 120.0) -> Listing:
    """Collect the tests of files.

    Raises:
        SandboxError: The machinery failed.
        TaskError: pytest gave no list.
    """
    options = (*_QUIET, "--collect-only", "--tb=short", *spec.arguments)
    request = _request(spec, options, list(files), tests=[], controls=[], trace=True, collect=True, cpu_s=cpu_s)
    run = await _run(runner, layers, request, 0)
    try:
        found = json.loads(run.traces[0])
        tests = tuple(item for item in map(str, found["tests"]) if item.isprintable())  # others would spoil a terminal, or a request
        errors = tuple((str(name), str(message)) for name, message in found["errors"])
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        raise TaskError(f"the tests can't be listed ({run.ending}): {_last_lines(run.text)}") from None
    return Listing(tests=tests, errors=errors, text=run.text)


def _request(spec: SuiteSpec, options: Sequence[str], files: list[str], *, cpu_s: float, **more: Any) -> dict[str, Any]:
    return {
        "cpu_s": max(1, round(cpu_s)),
        "wall_s": 10 * cpu_s + 30,
        "nonce": secrets.token_hex(12),
        "site": [f"/workspace/{VENV}"],
        "roots": [f"/workspace/{root}".rstrip("/") for root in spec.roots],
        "arguments": list(options),
        "files": files,
        **more,
    }


async def _run(runner: BoxRunner, layers: Sequence[str], request: dict[str, Any], count: int) -> SuiteRun:
    problem = ""
    for _ in range(2):
        run = await runner.run_isolated(
            layers,
            ["-c", _driver()],
            stdin=json.dumps(request).encode(),
            timeout_s=request["wall_s"] + _GRACE_S,
            max_stdout_bytes=MAX_STREAM_BYTES,
            writable=True,
        )
        result = read_run(request["nonce"], count, run)
        if result.is_ready:
            return result
        problem = f"exit code {run.exit_code}, killed by {run.killed_by or '-'}: {run.stderr.strip()[-300:] or 'no message'}"
    raise SandboxError(f"the box ended before any test was started ({problem})", retryable=True)


def read_run(nonce: str, count: int, run: IsolatedRun) -> SuiteRun:
    """Read the channel of a run. Accepts any bytes; a line that the supervisor wouldn't have written makes the ending ``"forged"``."""
    outcomes = ["m"] * count
    spent: dict[int, int] = {}
    traces: list[str] = []
    ending, is_ready, is_loaded = "", False, False
    head = nonce.encode() + b" "
    start = 0
    while (end := run.stdout.find(b"\n", start)) >= 0 and not ending:
        line, start = run.stdout[start:end], end + 1
        words = line.removeprefix(head).split(b" ")
        if not line.startswith(head):
            ending = "forged"
        elif words[0] in (b"ready", b"loaded"):
            is_ready, is_loaded = True, is_loaded or words[0] == b"loaded"
        elif words[0] == b"end":
            ending = words[1].decode("ascii", "replace")[:20] if len(words) > 1 else "forged"
        elif words[0] == b"trace":
            traces.append(line[len(head) + 6 :].decode("ascii", "replace"))
        elif len(words) == 3 and words[0].isdigit() and int(words[0]) < count and outcomes[int(words[0])] == "m" and words[2].isdigit():
            outcomes[int(words[0])] = words[1].decode("ascii", "replace")
            spent[int(words[0])] = int(words[2])
        else:
            ending = "forged"
    if run.killed_by and ending not in ("ok", "forged"):
        ending = run.killed_by
    if ending == f"signal{signal.SIGXCPU.value}":
        ending = "timeout"
    return SuiteRun(
        outcomes=tuple(outcomes),
        milliseconds=spent,
        ending=ending or ("output" if run.stdout_truncated else "lost"),
        is_loaded=is_loaded,
        is_ready=is_ready,
        traces=tuple(traces),
        text=run.stderr,
        duration_s=run.duration_s,
    )


def _last_lines(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " / ".join(line.strip() for line in lines[-3:])[-300:] or "nothing was printed"


@dataclass(slots=True)
class Coverage:
    """Which tests call which functions.

    Attributes:
        functions: (path, line of its first decorator or ``def``) -> numbers of the tests that call it.
    """

    functions: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: SuiteRun) -> Coverage:
        """Read the traces of a run; damaged lines are passed over: what they could do is make the tests of a task be chosen badly."""
        found = cls()
        places: dict[int, tuple[str, int]] = {}
        for text in run.traces:
            test, _, rest = text.partition(" ")
            try:
                hit, fresh = json.loads(rest)
                for item in fresh:
                    number, line, path = item.split(" ", 2)
                    places[int(number)] = (path, int(line))
                for number in hit:
                    found.functions.setdefault(places[number], set()).add(int(test))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
        return found

    def tests_of(self, path: str, first: int, last: int) -> set[int]:
        """Numbers of the tests that call any function which begins within the lines ``[first, last]`` of a file."""
        return set().union(*(tests for (name, line), tests in self.functions.items() if name == path and first <= line <= last))
