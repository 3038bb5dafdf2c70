"""``strop env import`` and ``strop env export``: tasks that others made, and ours for others."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.guard import guarded
from strop.core.errors import ConfigError, nearest

EXPORTS = ("harbor", "native")
_SHOWN = 20


def add_commands(app: typer.Typer) -> None:
    """Add ``import`` and ``export`` to the commands of ``strop env``."""
    app.command("import")(guarded(import_tasks))
    app.command("export")(guarded(export_tasks))


def import_tasks(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH|FILE|PACKAGE:NAME",
            help="Folder, archive, or file of JSON or JSON lines (also .gz, .zst); or reasoning-gym:DATASET, or verifiers:MODULE:CLASS.",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="POOL", help="Pool to write; by default only the table is printed.")] = None,
    format_name: Annotated[str, typer.Option("--format", metavar="FORMAT", help="By default found from what is there.")] = "",
    split: Annotated[str, typer.Option("--split", metavar="SPLIT", help="Where the tasks go: train, heldout or hard.")] = "train",
    size: Annotated[int, typer.Option(min=1, help="How many tasks a package makes.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the tasks that a package makes.")] = 0,
    config: Annotated[str, typer.Option("--config", metavar="JSON", help="Settings of a package's dataset or taskset.")] = "{}",
    python: Annotated[str, typer.Option("--python", metavar="PATH", help="Interpreter that has the package; by default strop's own.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> int:
    """Read tasks that others made: Harbor, SWE-bench, SWE-smith, SWE-rebench, R2E-Gym, reasoning-gym, verifiers."""
    from strop.tasks.importers.answers import SIDES, make_tasks
    from strop.tasks.importers.formats import Imported, blueprint, import_path
    from strop.tasks.importers.hostile import parse_json
    from strop.tasks.importers.pool import write_pool
    from strop.tasks.index import SPLITS

    if split not in SPLITS:
        raise ConfigError(f"split {split!r} doesn't exist.{nearest(split, SPLITS)}")
    package, _, name = source.partition(":")
    if package in SIDES and name:
        settings = parse_json(config, "--config")
        if not isinstance(settings, dict):
            raise ConfigError(f"--config is {config!r}, expected a JSON object")
        found = Imported(tasks=make_tasks(package, name, size=size, seed=seed, config=settings, python=python, split=split))
    else:
        found = import_path(source, format_name=format_name, split=split)
    formats = Counter(task.format for task in found.tasks)
    needs = Counter(need for task in found.tasks for need in blueprint(task).needs())
    if out is not None and found.tasks:
        write_pool(out, found.tasks, source=source if package in SIDES else Path(source).name, refused=found.refused)
    if as_json:
        report = {"read": formats, "needs": needs, "refused": [{"where": where, "reason": why} for where, why in found.refused]}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        for name, count in formats.most_common():
            print(f"{name:16} {count:7} read")
        print(f"{'refused':16} {len(found.refused):7}")
        for where, why in found.refused[:_SHOWN]:
            print(f"  {where}: {why}")
        if len(found.refused) > _SHOWN:
            print(f"  ... and {len(found.refused) - _SHOWN} more; --json prints all")
        if needs:
            print("needed of a sandbox: " + ", ".join(f"{need} ({count})" for need, count in sorted(needs.items())))
        for task in found.tasks[:_SHOWN]:
            if not task.task.instruction.strip():
                print(f"note: {task.task.task_id} has an empty instruction")
        if out is not None and found.tasks:
            print(f"written: {out}")
    return 0 if found.tasks and not found.refused else 1


def export_tasks(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="Pool of imported tasks, or of tasks that strop env build made.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")],
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="harbor, or native: the format a task came in.")
    ] = "harbor",
    only: Annotated[list[str] | None, typer.Option("--task", metavar="TASK", help="Only tasks with this in their id; repeatable.")] = None,
) -> int:
    """Write tasks for others: Harbor task directories, or the format that they came in."""
    if format_name not in EXPORTS:
        raise ConfigError(f"export format {format_name!r} is unknown.{nearest(format_name, EXPORTS)}")
    from strop.tasks.importers.exporting import export_pool

    if not pool.is_dir():
        raise ConfigError(f"task pool {str(pool)!r}: no such directory")
    done = export_pool(pool, out, native=format_name == "native", only=only or ())
    print(f"exported {len(done.written):7}")
    print(f"refused  {len(done.refused):7}")
    for name, why in done.refused[:_SHOWN]:
        print(f"  {name}: {why}")
    if done.written:
        print(f"written: {out}")
    return 0 if done.written and not done.refused else 1
