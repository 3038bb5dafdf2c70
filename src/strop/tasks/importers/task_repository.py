"""SWE-bench 5 task repositories: ``sweb.yaml`` and one folder per instance, read strictly and written again unchanged.

    sweb.yaml                 the data sets that it publishes, and their splits
    tasks/<instance_id>/
        task.yaml             short fields
        tests.json            FAIL_TO_PASS and PASS_TO_PASS
        problem_statement.md  gold.patch  test.patch  eval.sh  Dockerfile
        hints.md              only where there are hints
        test_assets/  assets/  problem_assets/   and whatever else the Dockerfile copies

Source: SWE-bench/SWE-bench @ 7a21e05, ``swebench/task``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from strop.core.errors import TaskError
from strop.tasks.importers.hostile import File, ReadLimits, as_text, parse_json, parse_yaml, read_file, read_folder
from strop.tasks.importers.record import ImportedTask
from strop.tasks.importers.row_tables import SWEB_YAML, TASK_YAML
from strop.tasks.importers.rows import import_row

CONFIG = "sweb.yaml"
FORMAT = "swe-bench-5"
COLUMNS_IN_FILES = {
    "patch": "gold.patch",
    "test_patch": "test.patch",
    "eval_script": "eval.sh",
    "problem_statement": "problem_statement.md",
}
HINTS = "hints.md"
TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_ROUTING = ("split", "datasets")
"""Keys that say where an instance is published. They are no column of its row, so the record keeps them in a file of its own."""
_KEPT = "task.yaml"


def is_task_repository(path: Path) -> bool:
    """Whether a folder is one."""
    return (path / CONFIG).is_file() and (path / "tasks").is_dir() and not (path / "tasks").is_symlink()


def read_settings(path: Path, limits: ReadLimits) -> dict[str, Any]:
    """Return the checked ``sweb.yaml``.

    Raises:
        TaskError: It is wrong or can't be read.
    """
    return SWEB_YAML.read(parse_yaml(read_file(path / CONFIG, limits.file_bytes), CONFIG), CONFIG)


def import_instance(folder: Path, settings: Mapping[str, Any], limits: ReadLimits, *, split: str = "train") -> ImportedTask:
    """Return the task of one instance folder.

    Raises:
        TaskError: A file is missing, a key unknown or wrong.
    """
    what = f"tasks/{folder.name}"
    files = read_folder(folder, limits)
    missing = [name for name in ("task.yaml", "tests.json", "Dockerfile", *COLUMNS_IN_FILES.values()) if name not in files]
    if missing:
        raise TaskError(f"{what} lacks {', '.join(missing)}")
    short = parse_yaml(files["task.yaml"].data, f"{what}/task.yaml")
    tests = parse_json(files["tests.json"].data, f"{what}/tests.json")
    if not isinstance(tests, dict) or sorted(tests) != sorted(TESTS):
        raise TaskError(f"{what}/tests.json must have the keys {' and '.join(TESTS)} and no others")
    if isinstance(short, Mapping) and (twice := [key for key in TESTS if key in short]):
        raise TaskError(f"{what}/task.yaml: the key {twice[0]!r} belongs into tests.json")
    fields = TASK_YAML.read({**short, **tests} if isinstance(short, Mapping) else short, f"{what}/task.yaml")
    if fields["instance_id"] != folder.name:
        raise TaskError(f"{what}/task.yaml: instance_id is {fields['instance_id']!r}, expected the folder's name")
    if unpublished := [name for name in fields.get("datasets") or () if name not in settings["datasets"]]:
        raise TaskError(f"{what}/task.yaml: the data set {unpublished[0]!r} isn't in {CONFIG}: {', '.join(settings['datasets'])}")
    row = {key: value for key, value in fields.items() if key not in _ROUTING}
    row |= {column: as_text(files[name], f"{what}/{name}") for column, name in COLUMNS_IN_FILES.items()}
    if HINTS in files:
        row["hints_text"] = as_text(files[HINTS], f"{what}/{HINTS}")
    routing = {key: fields[key] for key in _ROUTING if key in fields}
    held = {"task.yaml", "tests.json", HINTS, *COLUMNS_IN_FILES.values()}
    others = {path: file for path, file in files.items() if path not in held}
    return import_row(row, what, format_name=FORMAT, split=split, files={**others, _KEPT: File(json.dumps(routing).encode())})


def routing_of(task: ImportedTask) -> dict[str, Any]:
    """Return the split and the data sets of an instance.

    Raises:
        TaskError: It is no task of a task repository.
    """
    if task.format != FORMAT or _KEPT not in task.files:
        raise TaskError(f"task {task.name!r} ({task.format}) didn't come from a SWE-bench 5 task repository")
    return parse_json(task.files[_KEPT].data, _KEPT)


def export_instance(task: ImportedTask) -> dict[str, File]:
    """Return the files of an instance folder.

    Raises:
        TaskError: It is no task of a task repository.
    """
    routing = routing_of(task)
    fields = dict(task.fields)
    files = {path: file for path, file in task.files.items() if path != _KEPT}
    for column, name in COLUMNS_IN_FILES.items():
        files[name] = File(fields.pop(column).encode(), executable=False)
    if "hints_text" in fields:
        files[HINTS] = File(fields.pop("hints_text").encode())
    tests = {key: fields.pop(key) for key in TESTS}
    short = {**fields, **routing}
    files["tests.json"] = File((json.dumps(tests, indent=2, ensure_ascii=False) + "\n").encode())
    files["task.yaml"] = File(yaml.safe_dump(short, allow_unicode=True, sort_keys=True).encode())
    return dict(sorted(files.items()))
