"""Tasks whose answer is a text, made and judged by another package: ``reasoning-gym``, and tasksets of ``verifiers``. No code, no tests.

The package lives in an environment of its own; a small script (``sides``) runs there and speaks JSON. Making tasks runs the package on the
host, as installing it did. Judging gives it a text that an agent wrote, and some judges evaluate what they get, so that runs in a box. The
box protects the machine, not the verdict: a judge that evaluates a text can be made to say anything by it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from strop.core.episode import Episode
from strop.core.errors import GradingError, SandboxError, TaskError, nearest
from strop.core.outcome import Failed, Outcome, Scored
from strop.core.task import Limits, Task
from strop.tasks.importers.hostile import File, parse_json
from strop.tasks.importers.record import Blueprint, Gold, ImportedTask, Network, Place, StepPlan, VerifierPlan, make_task
from strop.tasks.importers.schema import Field, Table, integer, map_of, plain, text
from strop.tasks.layers import BoxRunner, IsolatedRun

SIDES = {"reasoning-gym": "reasoning_gym_side.py", "verifiers": "verifiers_side.py"}
ANSWER_FILE = "answer.txt"
PLACEHOLDER = "ANSWER\n"
WORKSPACE = "environment/workspace/"
CONTROL = "0"
"""An ordinary answer, judged to see whether the judge works."""
MAX_ANSWER_BYTES = 16_384
MAX_TASKS = 100_000
TOOLS = ("list", "read", "edit", "undo", "submit")
LIMITS = Limits(max_turns=16, max_tokens=16_384, max_new_tokens=2_048, wall_s=300.0, exec_s=5.0)
HOW = f"\n\nPut your answer, and nothing else, in place of the word ANSWER in the file {ANSWER_FILE}. Then submit."
_MAKE_TIMEOUT_S = 600.0
_SCORE_TIMEOUT_S = 60.0
_MAX_REPLY_BYTES = 256 << 20
_NEEDED = Field(check=text(empty=False), required=True)
_COUNT = Field(check=integer(minimum=0), required=True)
_CONFIG = Field(check=map_of(plain), required=True)

TABLES: Mapping[str, Table] = {
    "reasoning-gym": Table(
        name="a reasoning-gym task",
        fields={
            "dataset": _NEEDED,
            "version": _NEEDED,
            "config": _CONFIG,
            "seed": Field(check=integer(), required=True),
            "size": _COUNT,
            "index": _COUNT,
            "question": _NEEDED,
            "answer": Field(check=text(), nullable=True),
        },
    ),
    "verifiers": Table(
        name="a task of a verifiers taskset",
        fields={
            "taskset": Field(check=text(pattern=r"[\w.]+:\w+", expected="'module:Class'"), required=True),
            "version": _NEEDED,
            "config": _CONFIG,
            "index": _COUNT,
            "key": _NEEDED,
            "question": _NEEDED,
            "data": Field(check=map_of(plain), required=True),
        },
    ),
}


def make_tasks(
    format_name: str,
    name: str,
    *,
    size: int,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    python: str = "",
    split: str = "train",
) -> list[ImportedTask]:
    """Make tasks with another package.

    Args:
        format_name: ``"reasoning-gym"`` or ``"verifiers"``.
        name: A dataset of reasoning-gym (``"chain_sum"``), or a taskset (``"module:Class"``).
        size: How many.
        seed: Of a dataset; tasksets have none.
        config: Settings of the dataset or taskset.
        python: Interpreter that has the package; by default our own.
        split: Where the tasks go.

    Raises:
        TaskError: The package isn't there (with the command that installs it), knows no such thing, or fails.
    """
    if not 1 <= size <= MAX_TASKS:
        raise TaskError(f"size is {size}, expected 1 to {MAX_TASKS}")
    request: dict[str, Any] = {"size": size, "config": dict(config or {})}
    request |= {"dataset": name, "seed": seed} if format_name == "reasoning-gym" else {"taskset": name}
    answer = _ask(format_name, python or sys.executable, request)
    tasks = []
    for index, row in enumerate(answer["rows"]):
        fields = {**request, **row, "index": index, "version": answer["version"]}
        if format_name == "verifiers":
            del fields["size"]
        tasks.append(import_answer_task(fields, f"{name}, task {index}", format_name=format_name, split=split))
    return tasks


def import_answer_task(fields: Mapping[str, Any], where: str, *, format_name: str, split: str = "train") -> ImportedTask:
    """Return the task of stored fields.

    Raises:
        TaskError: A key is unknown, missing or wrong.
    """
    found = TABLES[format_name].read(fields, where)
    source = found.get("dataset") or found["taskset"]
    name = f"{source}-{found['seed']}-{found['index']}" if "seed" in found else f"{source}-{found['index']}"
    name = re.sub(r"[^\w.-]", "_", name)
    instruction = found["question"].rstrip() + HOW
    version = found["version"]
    task = make_task(
        format_name, name, instruction, split=split, limits=LIMITS, tools=TOOLS, source=source, version=version, cluster=source
    )
    files = {WORKSPACE + ANSWER_FILE: File(PLACEHOLDER.encode())}
    return ImportedTask(format=format_name, name=name, fields=found, files=files, task=task)


def blueprint(task: ImportedTask) -> Blueprint:
    """Return what a runner needs to know: a folder with one file, no network, an answer."""
    place = Place(network=Network(mode="no-network"))
    verifier = VerifierPlan(is_separate=True, place=place, timeout_s=_SCORE_TIMEOUT_S)
    answer = task.fields.get("answer")
    return Blueprint(
        place=place,
        steps=(StepPlan(instruction=task.task.instruction, verifier=verifier),),
        gold=Gold(kind="answer", value=answer) if answer else Gold(),
    )


def score_request(task: ImportedTask) -> dict[str, Any]:
    """Return what a side script needs to judge an answer, the answer apart."""
    wanted = ("dataset", "taskset", "config", "seed", "size", "index", "question", "key")
    return {key: task.fields[key] for key in wanted if key in task.fields}


def side_of(format_name: str) -> Path:
    """Return the script of a package.

    Raises:
        TaskError: No package makes tasks of that format.
    """
    if format_name not in SIDES:
        raise TaskError(f"no package makes tasks of format {format_name!r}.{nearest(format_name, SIDES)}")
    return Path(__file__).parent / "sides" / SIDES[format_name]


def _ask(format_name: str, python: str, request: Mapping[str, Any]) -> dict[str, Any]:
    argv = [python, str(side_of(format_name)), "make"]
    try:
        done = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, check=False, timeout=_MAKE_TIMEOUT_S)
    except OSError as error:
        raise TaskError(f"{python!r} can't be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"{format_name} gave no answer within {_MAKE_TIMEOUT_S:.0f} s", retryable=True) from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise TaskError(f"{format_name} failed in {python!r}: {last[0][:300]}")
    return _reply(done.stdout, format_name, python)


def _reply(output: bytes, format_name: str, python: str) -> dict[str, Any]:
    """The last line is the answer; anything before it is what packages print when they are imported."""
    lines = [line for line in output[:_MAX_REPLY_BYTES].splitlines() if line.strip()]
    answer = parse_json(lines[-1], f"the answer of {format_name}") if lines else {"error": "no answer"}
    if "missing" in answer:
        package = answer["missing"]
        raise TaskError(f"{package} isn't installed for {python!r} ({answer['error']}); run: {python} -m pip install {package}")
    if "unknown" in answer:
        raise TaskError(f"{format_name} has no dataset {answer['unknown']!r}.{nearest(answer['unknown'], answer['known'])}")
    if "error" in answer:
        raise TaskError(f"{format_name}: {answer['error']}")
    return answer


def packages_of(python: str) -> str:
    """Return the folder of an interpreter's packages, for a box whose Python has the same version.

    Raises:
        TaskError: It can't be run, or has another version than the boxes' Python, which is ours.
    """
    code = "import json, sys, sysconfig; print(json.dumps([list(sys.version_info[:2]), sysconfig.get_path('purelib')]))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        version, folder = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise TaskError(f"{python!r} can't be run: {error}") from None
    if tuple(version) != sys.version_info[:2]:
        ours = ".".join(map(str, sys.version_info[:2]))
        raise TaskError(f"{python!r} is Python {version[0]}.{version[1]}; answers are judged in a box with Python {ours}")
    return folder


class Pool(Protocol):
    """A pool of imported tasks."""

    def record(self, task: Task) -> ImportedTask:
        """What is behind a task."""
        ...

    def base_dir(self, task: Task) -> str:
        """Its workspace."""
        ...


class AnswerGrader:
    """A ``Grader`` for tasks of ``make_tasks``: the package that made a task judges the answer, in a box without network.

    Args:
        pool: The pool of the tasks.
        runner: Starts boxes.
        python: Interpreter that has the packages, of the same version as ours; by default our own.

    Raises:
        TaskError: The interpreter can't be used.
    """

    def __init__(self, pool: Pool, runner: BoxRunner, *, python: str = "") -> None:
        self._pool = pool
        self._runner = runner
        self._python = python or sys.executable
        self._packages = packages_of(self._python)

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        """Return the package's score of what stands in the answer file; an empty or unchanged one scores 0."""
        content = episode.changes.get(ANSWER_FILE)
        if content is None or content == PLACEHOLDER.encode():
            return Scored(reward=0.0, reason="unchanged")
        if len(content) > MAX_ANSWER_BYTES:
            return Scored(reward=0.0, reason="oversize")
        try:
            return await self._judge(task, content.decode("utf-8", "replace").strip())
        except (GradingError, SandboxError, TaskError, OSError) as error:
            return Failed(error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Nothing to close: the runner belongs to the caller."""

    async def _judge(self, task: Task, answer: str) -> Outcome:
        record = self._pool.record(task)
        done = await self._run(task, record, answer)
        if done.killed_by or done.exit_code != 0:
            control = await self._run(task, record, CONTROL)
            if control.killed_by or control.exit_code != 0:
                raise GradingError(f"{record.format} can't judge an ordinary answer either: {control.stderr[-300:] or control.killed_by}")
            # An ordinary answer is judged in the same box without trouble, so this one made the trouble.
            return Scored(reward=0.0, reason={"timeout": "hang", "": "crash"}.get(done.killed_by, "resource"))
        reply = _reply(done.stdout, record.format, self._python)
        score = reply.get("score")
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            raise GradingError(f"{record.format} gave the score {score!r}, expected a number")
        parts = {str(name): float(value) for name, value in (reply.get("parts") or {}).items()}
        return Scored(reward=float(score), parts={"score": float(score), **parts}, reason="" if score else "answer", layers=("isolated",))

    async def _run(self, task: Task, record: ImportedTask, answer: str) -> IsolatedRun:
        return await self._runner.run_isolated(
            [self._pool.base_dir(task)],
            ["/mnt/side.py", "score", "/mnt/packages"],
            stdin=json.dumps({**score_request(record), "answer": answer}).encode(),
            timeout_s=_SCORE_TIMEOUT_S,
            extra_ro={"/mnt/side.py": str(side_of(record.format)), "/mnt/packages": self._packages},
            max_stdout_bytes=1 << 20,
        )
