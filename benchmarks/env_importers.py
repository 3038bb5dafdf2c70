"""Importers against their formats: every key read, unknown keys refused, round trips identical, and Harbor's own word on what is exported.

    python benchmarks/env_importers.py [--harbor build/venv-harbor/bin/python]

With ``--harbor`` (``make test-harbor`` makes the environment) the tables are held against Harbor's own models, everything exported goes
through its loader and its lint, and what its templates make is imported. Writes docs/results/env-importers.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tasks" / "importers"))

from importer_harbor import TRAJECTORY, harbor_files, simple_harbor_files
from importer_kit import all_keys, given_paths, lay, lay_task_repository, used_keys
from importer_rows import ANSWERS, ROWS

from strop.core.errors import TaskError
from strop.tasks.importers import answers, atif, harbor, harbor_export
from strop.tasks.importers.formats import import_path, row_line
from strop.tasks.importers.harbor_tables import TASK
from strop.tasks.importers.hostile import read_folder
from strop.tasks.importers.pool import ImportPool, write_files, write_pool
from strop.tasks.importers.record import ImportedTask
from strop.tasks.importers.row_tables import ROW_TABLES
from strop.tasks.importers.schema import Table
from strop.tasks.importers.task_repository import export_instance
from strop.ui.results import write_result

SIDE = Path(__file__).with_name("harbor_side.py")
_FREE = ("env", "metadata", "headers", "min_reward", "arguments", "extra", "tool_definitions", "image_assets", "env_vars", "docker_specs")
_FREE_ROWS = ("detected_issues", "expected_output_json", "config", "data")


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where a table stands in data; free-form parts are left out."""
    if isinstance(document, dict):
        yield path
        for key, value in document.items():
            if key not in (*_FREE, *_FREE_ROWS):
                yield from places(value, (*path, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from places(value, (*path, number))


def refused_keys(document: Any, read: Any) -> tuple[int, list[str]]:
    """Plant an unknown key into every table of a document; returns how many were planted, and where one was not refused by name."""
    missed, planted = [], 0
    for path in places(document):
        broken = copy.deepcopy(document)
        inner: Any = broken
        for key in path:
            inner = inner[key]
        known = next(iter(inner), "key")
        inner[f"{known}x"] = 1
        planted += 1
        try:
            read(broken)
        except TaskError as error:
            if f"unknown key '{known}x'." not in str(error) and "content parts" not in str(error):
                missed.append(f"{'.'.join(map(str, path))}: {error}")
        else:
            missed.append(f"{'.'.join(map(str, path))}: accepted")
    return planted, missed


def unread_keys() -> tuple[int, list[str]]:
    """Keys of the tables that no document with everything in it has: ``(keys, unread)``."""
    tables: list[tuple[Table, Any]] = [(ROW_TABLES[name], row) for name, row in ROWS.items()]
    tables += [(answers.TABLES[name], row) for name, row in ANSWERS.items()]
    tables += [(TASK, harbor.import_task(harbor_files(), "x").fields)]
    total, unread = 0, []
    for table, document in tables:
        keys = all_keys(table)
        total += len(keys)
        unread += [f"{name}.{key}" for name, key in sorted(keys - used_keys(table, document))]
    paths = set(atif.TRAJECTORY.paths())
    total += len(paths)
    unread += sorted(paths - set(given_paths(TRAJECTORY)))
    return total, unread


def round_trips(folder: Path) -> tuple[int, list[str], list[ImportedTask]]:
    """Import, export, import: through the task's own format, through Harbor, through the pool on disk."""
    tasks: list[ImportedTask] = []
    lay(harbor_files(), folder / "source" / "harbor" / "everything")
    lay(simple_harbor_files(), folder / "source" / "harbor" / "simple")
    tasks += import_path(folder / "source" / "harbor").tasks
    for name, row in ROWS.items():
        (folder / "source" / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        tasks += import_path(folder / "source" / f"{name}.jsonl").tasks
    lay_task_repository(folder / "source" / "repository")
    repository = import_path(folder / "source" / "repository").tasks
    answered = [answers.import_answer_task(row, "row", format_name=name) for name, row in ANSWERS.items()]
    done, wrong = 0, []
    for number, task in enumerate([*tasks, *repository, *answered]):
        ways: dict[str, list[ImportedTask]] = {}
        native, exported = folder / "native" / str(number), folder / "harbor" / str(number)
        if task.format == harbor.FORMAT:
            write_files(native / task.name.replace("/", "_"), harbor.export_files(task))
            ways["native"] = import_path(native).tasks
        elif task in answered:
            pass  # a package makes these; there is no file of their own format
        elif task.files:
            write_files(native / "tasks" / task.name, export_instance(task))
            (native / "sweb.yaml").write_bytes((folder / "source" / "repository" / "sweb.yaml").read_bytes())
            ways["native"] = import_path(native).tasks
        else:
            native.mkdir(parents=True)
            (native / "row.jsonl").write_text(row_line(task), encoding="utf-8")
            ways["native"] = import_path(native / "row.jsonl").tasks
        if task.format != "verifiers":
            write_files(exported / (task.name.rpartition("/")[2] or "x"), harbor_export.export_harbor(task))
            ways["harbor"] = import_path(exported).tasks
        write_pool(folder / "pool" / str(number), [task], source="benchmark")
        pool = ImportPool(folder / "pool" / str(number), folder / "cache")
        ways["pool"] = [pool.record(task.task)]
        for kind, found in ways.items():
            done += 1
            if found != [task]:
                wrong.append(f"{task.format} {task.name} through {kind}")
    return done, wrong, [*tasks, *repository, *answered]


def ask(python: str, *arguments: str) -> Any:
    """Ask Harbor."""
    done = subprocess.run([python, str(SIDE), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"harbor_side.py {arguments[0]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def with_harbor(python: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Hold everything against Harbor itself; returns figures and what is wrong."""
    wrong: list[str] = []
    said = ask(python, "schema")
    for name, table in (("task", TASK), ("trajectory", atif.TRAJECTORY)):
        theirs = {path.replace("[]", "") for path in said[name]}
        # Of the sub-agents' own trajectories, of the alternatives of a message and of the legacy key, each side lists other parts.
        ours = {path.replace("[]", "") for path in table.paths()}
        skipped = ("subagent_trajectories.", "steps.message.", "steps.observation.results.content.")
        lacking = {path for path in theirs - ours if not path.startswith(skipped) and not path.endswith(".allow_internet")}
        lacking -= {f"{path}.allow_internet" for path in theirs}
        wrong += [f"{name}: Harbor knows {path}, we don't" for path in sorted(lacking)]
        wrong += [f"{name}: we know {path}, Harbor doesn't" for path in sorted(ours - theirs)]
    folders = sorted(str(path.parent) for path in (folder / "harbor").glob("*/*/task.toml"))
    checked = ask(python, "check", *folders)
    for path, row in checked.items():
        # What wasn't exported from a row is its author's own, findings included.
        is_ours = harbor_export.MARK in Path(path, "task.toml").read_text(encoding="utf-8")
        if row["error"] or not row["valid"]:
            wrong.append(f"{path}: {row['error'] or 'no valid directory'}")
        elif is_ours:
            wrong += [f"{path}: {finding}" for finding in row["default"]]
    templates = ask(python, "templates", str(folder / "templates"))
    found = import_path(folder / "templates")
    wrong += [f"template {where}: {why}" for where, why in found.refused]
    for path in templates:
        files = read_folder(path)
        task = harbor.import_task(files, Path(path).name)
        if harbor.import_task(harbor.export_files(task), Path(path).name) != task:
            wrong.append(f"template {path}: another task after export")
    exported = {"exported_directories": len(checked), "templates_imported": len(found.tasks), "templates": len(templates)}
    other = sorted({finding.partition(":")[0] for row in checked.values() for finding in row["other"]})
    return {
        **exported,
        "harbor_keys": len(said["task"]),
        "atif_keys": len(said["trajectory"]),
        "rules_off_by_default_that_speak": other,
    }, wrong


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harbor", default="", help="Python of an environment with Harbor")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    keys, unread = unread_keys()
    planted, missed = refused_keys(harbor.import_task(harbor_files(), "x").fields, lambda data: TASK.read(data, "task.toml"))
    tables = {**ROW_TABLES, **answers.TABLES}
    for document, table in [(TRAJECTORY, atif.TRAJECTORY), *((row, tables[name]) for name, row in (*ROWS.items(), *ANSWERS.items()))]:
        more, there = refused_keys(document, lambda data, table=table: table.read(data, "row"))
        planted, missed = planted + more, missed + there
    with tempfile.TemporaryDirectory() as name:
        trips, changed, tasks = round_trips(Path(name))
        details, wrong = with_harbor(arguments.harbor, Path(name)) if arguments.harbor else ({}, [])
    problems = [*(f"unread: {key}" for key in unread), *(f"not refused: {key}" for key in missed), *changed, *wrong]
    print(f"{keys} keys, {len(unread)} unread; {planted} unknown keys planted, {len(missed)} not refused")
    print(f"{trips} round trips of {len(tasks)} tasks, {len(changed)} not identical; Harbor: {details or 'not asked'}")
    print("\n".join(problems) or "no problem")
    if not arguments.no_write:
        refused, same = planted - len(missed), trips - len(changed)
        figure = f"{keys - len(unread)} of {keys} keys, {refused} of {planted} refused, {same} of {trips} identical"
        path = write_result(
            "env-importers",
            bar="importers: every key read, unknown ones refused, round trips identical",
            goal="all",
            figure=figure,
            met=not problems and bool(arguments.harbor),
            command="make test-harbor",
            notes="" if arguments.harbor else "Harbor itself wasn't asked.",
            details={"formats": sorted({task.format for task in tasks}), "problems": problems, **details},
        )
        print(path)
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
