"""Laying examples on disk, and counting the keys of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from importer_rows import ROWS

from strop.tasks.importers.hostile import File
from strop.tasks.importers.schema import Nested, Table


def lay(files: Mapping[str, File], folder: Path) -> Path:
    """Write files below a folder."""
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.executable else 0o644)
    return folder


def lay_task_repository(root: Path) -> Path:
    """A SWE-bench 5 task repository with one instance that has every key and file."""
    row = dict(ROWS["swe-bench-5"])
    folder = root / "tasks" / row["instance_id"]
    columns = {"patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh", "problem_statement": "problem_statement.md"}
    files = {name: row.pop(column) for column, name in columns.items()} | {"hints.md": row.pop("hints_text")}
    tests = {key: row.pop(key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    row |= {"split": "test", "datasets": ["acme/pkg-bench"]}
    files |= {
        "task.yaml": "".join(f"{key}: {json.dumps(value)}\n" for key, value in row.items()),
        "tests.json": json.dumps(tests),
        "Dockerfile": "FROM scratch\n",
        "test_assets/tests/expected.png": "\x00png",
        "assets/a.txt": "a",
        "problem_assets/b.txt": "b",
    }
    lay({path: File(text.encode()) for path, text in files.items()}, folder)
    (root / "sweb.yaml").write_text("datasets: [acme/pkg-bench]\nsplits:\n- test\n- dev\n")
    return root


def used_keys(table: Table, data: Any) -> set[tuple[str, str]]:
    """Return ``(table, key)`` for every key that data of a table has, tables below it included."""
    found: set[tuple[str, str]] = set()
    for item in data if isinstance(data, list) else [data]:
        if isinstance(item, Mapping):
            found |= {(table.name, key) for key in item}
            for key, value in item.items():
                below = getattr(table.fields[key].check, "table", None)
                found |= used_keys(below, value) if below is not None else set()
    return found


def all_keys(table: Table) -> set[tuple[str, str]]:
    """Return ``(table, key)`` for every key of a table and of those below it."""
    below = [field.check.table for field in table.fields.values() if isinstance(field.check, Nested)]
    return {(table.name, key) for key in table.fields}.union(*map(all_keys, below))


def given_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of data in the notation of ``Table.paths``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{prefix}{key}"
            is_list = isinstance(item, list) and any(isinstance(entry, Mapping) for entry in item)
            for entry in item if is_list else [item]:
                yield from given_paths(entry, f"{prefix}{key}{'[]' if is_list else ''}.")
