"""What goes into the grading box and what comes out: the plan of a verdict's calls, its request, and how the answers are read.

Pure functions. Expected values stay in ``Plan.expected`` on the host; the request holds inputs only. The answers are compared as bytes, so
nothing that the box wrote is ever parsed beyond splitting lines.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import marshal
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from strop.core.errors import GradingError
from strop.core.random import generator
from strop.tasks.values import canonical
from strop.tasks.verifier import Case, Verifier

ROOT = "/workspace"
MAX_CHARS = 64_000
"""Longest answer to one call."""

BOOT = (
    "import marshal,os,sys\n"
    "d=b''.join(iter(lambda:os.read(0,1<<20),b''))\n"
    f"if sys.version_info[:2]!={tuple(sys.version_info[:2])}:\n"
    f" sys.exit('the box runs Python '+sys.version+', the grader {sys.version_info[:2]}')\n"
    "n=int.from_bytes(d[:4],'big')\n"
    "c,m=marshal.loads(d[4:4+n])\n"
    "exec(c,{'__name__':'__grading__','REQUEST':d[4+n:],'MODULES':m})\n"
)
"""Code for ``python -c``: reads the bundle and the request from standard input and runs the driver in a namespace of its own."""

_NEEDED = {"strop.core.errors": {"StropError", "TaskError"}, "strop.tasks.verifier": {"observe"}}
"""Definitions of these modules that the box needs; making the others (data classes above all) would cost more than all the calls."""
_TRAVELS = ("strop", "strop.core", "strop.core.errors", "strop.tasks", "strop.tasks.values", "strop.tasks.verifier")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The calls of one verdict.

    Example: 3 cases of which 2 are visible, ``runs == ((2, 0, 1, 0), (0, 1), (1, 2))``: a shuffled run over all cases with case 0 repeated
    as a decoy, the visible cases in the order of the test file, and a part in another order; each in a fresh process.

    Attributes:
        runs: Case numbers in calling order; each run has a fresh process. The first holds every case.
        fixed_run: Number of the run over the visible cases in their fixed order (the order test compares it with the first), or -1.
        expected: Answer line of each case, visible cases first.
        num_visible: How many of the cases are visible.
        nonce: Begins every line of the driver.
        request: What the box is told: JSON with the inputs.
    """

    runs: tuple[tuple[int, ...], ...]
    expected: tuple[bytes, ...]
    num_visible: int
    nonce: str
    request: bytes
    fixed_run: int = -1


def make_plan(verifier: Verifier, *, key: Sequence[object], cpu_s: float, load_cpu_s: float, num_decoys: int = 2) -> Plan:
    """Choose order, decoys and parts.

    Args:
        verifier: The cases.
        key: The choice depends on this alone (not the nonce), so that grading again makes the same calls.
        cpu_s: Processor seconds of one run.
        load_cpu_s: Processor seconds of loading the module.
        num_decoys: Inputs repeated at random places of a shuffled run.

    Raises:
        GradingError: No cases, or an expected value that no answer could be as long as.
    """
    cases = (*verifier.visible, *verifier.hidden)
    expected = tuple(map(expected_line, cases))
    if not verifier.hidden:
        raise GradingError(f"verifier of {verifier.module}.{verifier.qualname} has no hidden cases")
    for index, line in enumerate(expected):
        if len(line) > MAX_CHARS:
            raise GradingError(
                f"verifier of {verifier.module}.{verifier.qualname}: case {index} expects {len(line)} characters, {MAX_CHARS} allowed"
            )
    rng = generator("grading", *key)
    count = len(cases)

    def with_decoys(order: list[int]) -> tuple[int, ...]:
        for index in rng.integers(0, len(order), num_decoys):
            order.insert(int(rng.integers(0, len(order) + 1)), order[int(index)])
        return tuple(order)

    first = [int(i) for i in rng.permutation(count)]
    # The last run begins with the last case of the first: its answer is that of a single call in a fresh process.
    rest = [int(i) for i in rng.permutation(first[:-1])]
    fixed = [tuple(range(len(verifier.visible)))] if verifier.visible else []
    runs = (with_decoys(first), *fixed, with_decoys([first[-1], *rest[: count // 2]]))
    nonce = secrets.token_hex(12)
    request: dict[str, Any] = {
        "nonce": nonce,
        "module": verifier.module,
        "qualname": verifier.qualname,
        "root": ROOT,
        "drain": verifier.drain,
        "cases": [[list(case.args), dict(case.kwargs)] for case in cases],
        "runs": runs,
        "cpu_s": cpu_s,
        "load_cpu_s": load_cpu_s,
        "max_chars": MAX_CHARS,
    }
    return Plan(
        runs=runs,
        expected=expected,
        num_visible=len(verifier.visible),
        nonce=nonce,
        request=json.dumps(request).encode(),
        fixed_run=1 if fixed else -1,
    )


def expected_line(case: Case) -> bytes:
    """Return the answer that meets ``case``, as the driver writes it."""
    return (f"e {case.raises}" if case.raises is not None else f"v {canonical(case.expected)}").encode("ascii", "backslashreplace")


@cache
def _bundle() -> bytes:
    """The driver and the modules it needs, as code objects."""
    modules = [(name, _code(name) if name.count(".") == 2 else compile("", name, "exec")) for name in _TRAVELS]
    data = marshal.dumps((_code("strop.grading.box_driver"), modules))
    return len(data).to_bytes(4, "big") + data


def _code(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if source is None:
        raise GradingError(f"source of {name} isn't installed; it has to go into the grading box")
    tree = ast.parse(source)
    wanted = _NEEDED.get(name)
    if wanted:
        tree.body = [node for node in tree.body if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name in wanted]
    # The flag replaces the statement, which would import a module from disk in every box.
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return compile(tree, f"<{name}>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True, optimize=2)


def box_input(plan: Plan) -> bytes:
    """Return what the box reads from standard input."""
    return _bundle() + plan.request


def _lines(stream: bytes) -> Iterator[bytes]:
    """Complete lines one by one: a flood of line ends must not become millions of objects."""
    start = 0
    while (end := stream.find(b"\n", start)) >= 0:
        yield stream[start:end]
        start = end + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the lines of a box say.

    Attributes:
        stage: ``""`` (no agent code was loaded), ``"ready"`` (it was being loaded), ``"broken"`` (it failed), ``"loaded"`` or ``"done"``.
        error: Name of the exception that broke the loading.
        answers: Answer by ``(run, position)``.
        endings: How each run ended (``"ok"``, ``"cpu"``, ``"exit3"``, ``"signal9"``).
        anomaly: The first line that the driver wouldn't have written there, ``""`` if there is none.
    """

    stage: str
    error: str
    answers: Mapping[tuple[int, int], bytes]
    endings: Mapping[int, str]
    anomaly: str


def read_answers(plan: Plan, stream: bytes) -> Reading:
    """Read the result channel, up to the first anomaly. Accepts any bytes; a last line without its end doesn't count.

    Lines without the nonce, repeated answers, answers to calls that weren't made and lines after the end are anomalies.
    """
    slots = {f"{run}.{position}".encode(): (run, position) for run, order in enumerate(plan.runs) for position in range(len(order))}
    ends = {f"{run}.end".encode(): run for run in range(len(plan.runs))}
    nonce = plan.nonce.encode()
    stage, error, anomaly = "", "", ""
    answers: dict[tuple[int, int], bytes] = {}
    endings: dict[int, str] = {}
    for line in _lines(stream):
        head, _, rest = line.partition(b" ")
        word, _, text = rest.partition(b" ")
        if head != nonce or stage == "done":
            pass
        elif (word == b"ready" and stage == "") or (word == b"loaded" and stage == "ready"):
            stage = word.decode()
            continue
        elif word == b"broken" and stage == "ready":
            stage, error = "broken", text[:80].decode("ascii", "replace")
            continue
        elif word == b"done" and stage == "loaded":
            stage = "done"
            continue
        elif stage == "loaded" and word in slots and slots[word] not in answers and slots[word][0] not in endings:
            answers[slots[word]] = text
            continue
        elif stage == "loaded" and word in ends and ends[word] not in endings:
            endings[ends[word]] = text[:20].decode("ascii", "replace")
            continue
        anomaly = line[:160].removeprefix(nonce).decode("ascii", "backslashreplace") or "an empty line"
        break
    return Reading(stage=stage, error=error, answers=answers, endings=endings, anomaly=anomaly)
