"""A whole pool written for others: imported tasks, and those that ``strop env build`` made."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from strop.core.errors import TaskError
from strop.core.task import Task
from strop.tasks.admission.pool import SuitePool, is_suite_pool
from strop.tasks.importers import harbor, harbor_export, portable_grader, task_repository
from strop.tasks.importers.formats import export_native, row_line
from strop.tasks.importers.hostile import File, ReadLimits, read_folder
from strop.tasks.importers.pool import ImportPool, file_name, is_import_pool, write_files
from strop.tasks.importers.record import ImportedTask
from strop.tasks.importers.toml_text import dump_toml

WORKDIR = "/workspace"
_IMAGE = f"python:{sys.version_info[0]}.{sys.version_info[1]}-bookworm"
_VERIFIER_S = 1800.0
_WORKSPACE_LIMITS = ReadLimits(total_bytes=2 << 30, files=100_000)


@dataclass(slots=True)
class Exported:
    """What an export did.

    Attributes:
        written: Ids of the tasks written.
        refused: Ids of the tasks that the format can't say, and why.
    """

    written: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def export_pool(pool: Path, out: Path, *, native: bool = False, only: Sequence[str] = ()) -> Exported:
    """Write the tasks of a pool below a new folder.

    Args:
        pool: A pool of imported tasks, or one that ``strop env build`` made.
        out: Folder to write.
        native: In the format that each task came in, not as Harbor directories.
        only: Parts of ids; by default all tasks.

    Raises:
        TaskError: It is no such pool, or the folder exists or can't be written.
    """
    if out.exists():
        raise TaskError(f"{str(out)!r} exists; nothing is overwritten, choose another folder")
    done = Exported()
    with tempfile.TemporaryDirectory() as cache:
        for task, files in _tasks(pool, Path(cache), native):
            if only and not any(part in task.task_id for part in only):
                continue
            try:
                write_files(out / file_name(task.task_id), files())
                done.written.append(task.task_id)
            except TaskError as error:
                done.refused.append((task.task_id, str(error)))
        if native:
            _write_native(ImportPool(pool, cache), out, only, done)
    return done


def _tasks(pool: Path, cache: Path, native: bool) -> Iterator[tuple[Task, Callable[[], dict[str, File]]]]:
    if is_import_pool(pool):
        imported = ImportPool(pool, cache)
        for task in imported.all_tasks():
            record = imported.record(task)
            if not native:
                yield task, lambda record=record: harbor_export.export_harbor(record)
    elif is_suite_pool(pool):
        if native:
            raise TaskError(f"the tasks of {str(pool)!r} were made by strop and have no other format; use --format harbor")
        built = SuitePool(pool, cache)
        for task in built.all_tasks():
            yield task, lambda task=task: export_suite_task(built, task)
    else:
        raise TaskError(f"{str(pool)!r} is no pool of imported or built tasks; it has no pool.json of either format")


def _write_native(pool: ImportPool, out: Path, only: Sequence[str], done: Exported) -> None:
    lines: dict[str, list[str]] = {}
    repository: list[ImportedTask] = []
    for task in pool.all_tasks():
        if only and not any(part in task.task_id for part in only):
            continue
        record = pool.record(task)
        if record.format == harbor.FORMAT:
            write_files(out / file_name(task.task_id), harbor.export_files(record))
        elif record.files:
            files = export_native(record)
            write_files(out / "tasks" / record.name, {path: file for path, file in files.items() if isinstance(file, File)})
            repository.append(record)
        else:
            lines.setdefault(record.format, []).append(row_line(record))
        done.written.append(task.task_id)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in lines.items():
        (out / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    if repository:
        (out / task_repository.CONFIG).write_text(_settings(repository), encoding="utf-8")


def _settings(tasks: Sequence[ImportedTask]) -> str:
    """``sweb.yaml`` for exported instances: every data set and split that one of them names."""
    routings = [task_repository.routing_of(task) for task in tasks]
    datasets = sorted({name for routing in routings for name in routing.get("datasets") or ()}) or ["unnamed"]
    return yaml.safe_dump({"datasets": datasets, "splits": sorted({routing["split"] for routing in routings})}, allow_unicode=True)


_PREPARE = """\
#!/bin/bash
# One commit without a past; installed requirements are no part of it.
set -eu
cd {workdir}
git config --global --add safe.directory {workdir}
git config --global user.name task
git config --global user.email task@localhost
git init -q
printf '/.venv/\\n__pycache__/\\n' >.git/info/exclude
git add -A -f -- . ':!.venv'
git commit -q --allow-empty -m base
"""
_RUN = """\
#!/bin/bash
cd {workdir}
cp -r /tests/hidden/. {workdir}/
while IFS= read -r path; do rm -f -- "$path"; done </tests/deleted.txt
export PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1
python -m pytest -q -rA --no-header --rootdir={workdir} --continue-on-collection-errors -p no:cacheprovider -o addopts= {targets}
"""


def export_suite_task(pool: SuitePool, task: Task) -> dict[str, File]:
    """Return a task of ``strop env build`` as a Harbor task directory; its workspace goes along as files.

    Raises:
        TaskError: The workspace can't be laid or is too large.
    """
    verifier = pool.suite(task)
    base = read_folder(pool.base_dir(task), _WORKSPACE_LIMITS)
    workspace = {path: file for path, file in base.items() if "__pycache__/" not in path and not path.endswith(".pyc")}
    hidden = pool.hidden_files(task)
    roots = [f"{WORKDIR}/{root}".rstrip("/") for root in verifier.spec.roots]
    installed = sorted({path.split("site-packages/")[0] + "site-packages" for path in workspace if "site-packages/" in path})
    path = shlex.quote(":".join([*roots, *(f"{WORKDIR}/{folder}" for folder in installed)]))
    targets = " ".join(shlex.quote(name) for name in sorted({test.split("::")[0] for test in verifier.tests}))
    arguments = " ".join(map(shlex.quote, verifier.spec.arguments))
    run = _RUN.format(workdir=WORKDIR, path=path, targets=f"{arguments} {targets}".strip())
    # Everything must pass, as strop's own verdict asks: a skipped test is no passed one.
    plan = {"parser": "pytest", "eval_type": "pass_and_fail", "fail_to_pass": list(verifier.tests), "pass_to_pass": [], "expected": {}}
    gold = pool.gold_files(task)
    solve = [f"cd {WORKDIR}", "cp -r /solution/files/. ."] + [f"rm -f -- {shlex.quote(name)}" for name in gold if gold[name] is None]
    prepare = _script(_PREPARE.format(workdir=WORKDIR))
    files = {
        harbor.CONFIG: _text(dump_toml(_config(task))),
        harbor.INSTRUCTION: _text(task.instruction.rstrip("\n") + "\n"),
        "environment/Dockerfile": _text(_dockerfile("/strop", "workspace", removed=True)),
        "environment/prepare.sh": prepare,
        "tests/Dockerfile": _text(_dockerfile("/tests", "workspace", removed=False)),
        "tests/prepare.sh": prepare,
        "tests/test.sh": _script(harbor_export.test_script(WORKDIR)),
        "tests/run.sh": _script(run),
        "tests/graded.txt": _text("".join(f"{name}\n" for name in sorted(hidden))),
        "tests/deleted.txt": _text("".join(f"{name}\n" for name in sorted(hidden) if hidden[name] is None)),
        "tests/plan.json": _text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n"),
        "tests/grade.py": File(Path(portable_grader.__file__).read_bytes()),
        "tests/hidden/.keep": File(b""),
        "solution/solve.sh": _script("\n".join(["#!/bin/bash", "set -eu", *solve, ""])),
        "solution/files/.keep": File(b""),
        **{f"environment/workspace/{name}": file for name, file in workspace.items()},
        **{f"tests/workspace/{name}": file for name, file in workspace.items()},
        **{f"tests/hidden/{name}": File(data) for name, data in hidden.items() if data is not None},
        **{f"solution/files/{name}": File(data) for name, data in gold.items() if data is not None},
    }
    return dict(sorted(files.items()))


def _config(task: Task) -> dict[str, object]:
    environment = {"network_mode": "no-network", "workdir": WORKDIR}
    hook = {"command": harbor_export.collect_command(WORKDIR), "timeout_sec": 120.0}
    keywords = [task.provenance["kind"], task.provenance["source"]]
    verifier = {"timeout_sec": _VERIFIER_S, "environment_mode": "separate", "collect": [hook], "environment": environment}
    return {
        "schema_version": "1.4",
        "task": {"name": f"strop/{harbor_export.portable_name(file_name(task.task_id))}", "keywords": keywords},
        "metadata": {"task_id": task.task_id, **task.provenance},
        "agent": {"timeout_sec": float(task.limits.wall_s)},
        "verifier": verifier,
        "environment": environment,
    }


def _dockerfile(folder: str, workspace: str, *, removed: bool) -> str:
    tail = f" && rm -rf {folder}" if removed else ""
    return f"FROM {_IMAGE}\nCOPY . {folder}/\nRUN mv {folder}/{workspace} {WORKDIR} && bash {folder}/prepare.sh{tail}\nWORKDIR {WORKDIR}\n"


def _text(text: str) -> File:
    return File(text.encode())


def _script(text: str) -> File:
    return File(text.encode(), executable=True)
