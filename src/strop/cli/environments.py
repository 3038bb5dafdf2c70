"""``strop env``: make tasks of a repository, check them, look at them, be the agent. Commands import the heavy code that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.exchange import add_commands
from strop.cli.guard import guarded

env_app = typer.Typer(help="Make, check and play tasks of your own repositories.", no_args_is_help=True, rich_markup_mode=None)
DEFAULT_POOL = Path("environments")

Pool = Annotated[Path, typer.Option("--pool", metavar="DIR", help="Pool of repository tasks.")]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Task id, or a part of it that only one task has.")]


@env_app.command("build")
@guarded
def build(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Git checkout, folder, source archive, or package NAME[==VERSION].")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Pool to make or go on with.")] = DEFAULT_POOL,
    mutations: Annotated[int, typer.Option(min=0, help="Tasks by one mutation, per source.")] = 30,
    combined: Annotated[int, typer.Option(min=0, help="Tasks by two mutations, per source.")] = 8,
    deletions: Annotated[int, typer.Option(min=0, help="Tasks by feature deletion, per source.")] = 12,
    history: Annotated[int, typer.Option(min=0, help="Tasks from commits or releases, per source.")] = 10,
    releases: Annotated[
        list[str] | None,
        typer.Option("--release", metavar="VERSION|ARCHIVE", help="Earlier release, oldest first; the steps between them make history."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes every choice.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Drafts examined at the same time; 0 means one for each core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> int:
    """Make gated tasks of sources: mutations, deleted features, history. Goes on where it was interrupted."""
    from strop.cli.envbuild import build_pool

    limits = {"mutation": mutations, "combined": combined, "deletion": deletions, "history": history}
    return build_pool(sources, out, limits=limits, releases=releases or [], seed=seed, workers=workers, as_json=as_json)


@env_app.command("gate")
@guarded
def gate(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="Pool of repository tasks.")] = DEFAULT_POOL,
    task: Annotated[str | None, typer.Option(help="Only tasks with this in their id.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many tasks; 0 means all.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side is graded, in another order each time.")] = 3,
    workers: Annotated[int, typer.Option(min=0, help="Tasks at the same time; 0 means one for each core.")] = 0,
) -> int:
    """Check the tasks of a pool again: the solution scores 1, no change scores 0, nothing gives it away."""
    from strop.cli.envplay import gate_pool

    return gate_pool(pool, part=task, limit=limit, rounds=rounds, workers=workers)


@env_app.command("show")
@guarded
def show(
    task: TaskName,
    pool: Pool = DEFAULT_POOL,
    files: Annotated[bool, typer.Option("--files", help="List every file of the workspace.")] = False,
) -> int:
    """Show a task: instruction, files, solution, what decides, how it got here."""
    from strop.cli.envplay import show_task

    return show_task(pool, task, files=files)


@env_app.command("list")
@guarded
def list_tasks(
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="Pool of repository tasks.")] = DEFAULT_POOL,
    kind: Annotated[str | None, typer.Option(help="Only mutation, combined, deletion or history.")] = None,
) -> int:
    """List the tasks of a pool."""
    from strop.cli.envplay import list_pool

    return list_pool(pool, kind)


@env_app.command("run")
@guarded
def run(
    task: TaskName,
    pool: Pool = DEFAULT_POOL,
    agent: Annotated[str, typer.Option(help="oracle (the solution), noop (nothing), or shell (you, in the box).")] = "shell",
    seed: Annotated[int, typer.Option(help="Fixes the order of the grading runs.")] = 0,
) -> int:
    """Play a task and grade what was done."""
    from strop.cli.envplay import play_task

    return play_task(pool, task, agent=agent, seed=seed)


add_commands(env_app)
