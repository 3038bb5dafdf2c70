"""The command ``strop``. Heavy code is imported by the commands that need it, so that ``--help`` is instant."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an old interpreter may run an uninstalled checkout
    sys.exit("error: strop needs Python 3.11 or newer; this is %d.%d (%s)" % (*sys.version_info[:2], sys.executable))  # noqa: UP031

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.guard import guarded

app = typer.Typer(
    help="Turn an open-weights Mixture-of-Experts model into a specialist agent for one environment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, compare and document configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example rl.steps=10; repeatable.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Model = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run directory, or checkpoint in Hugging Face layout.")]


@app.command()
@guarded
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="TOML file, for example recipes/quickstart.toml.")],
    overrides: Set = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run directory; by default runs/<recipe>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that directory.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove the run in that directory first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration, stop.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live panel.")] = False,
) -> int:
    """Run a recipe from the base to a served, evaluated model."""
    from strop.cli.run import run_recipe

    return run_recipe(recipe, overrides or [], out, resume=resume, clean=clean, dry_run=dry_run, plain=plain)


@app.command("eval")
@guarded
def evaluate(
    model: Model,
    overrides: Set = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live panel.")] = False,
) -> int:
    """Evaluate a run's model, or a checkpoint, on held-out tasks."""
    from strop.cli.run import evaluate_model

    return evaluate_model(model, overrides or [], plain=plain)


@app.command()
@guarded
def episodes(
    run: Run,
    phase: Annotated[str | None, typer.Option(help="Phase, for example rl or 'eval.*'.")] = None,
    step: Annotated[int | None, typer.Option(help="Step.")] = None,
    task: Annotated[str | None, typer.Option(help="Part of the task id.")] = None,
    reward: Annotated[float | None, typer.Option(help="Exact reward.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many; 0 shows all.")] = 40,
    show: Annotated[str | None, typer.Option(metavar="KEY", help="Read one episode: phase/step/task/sample.")] = None,
) -> int:
    """List the episodes of a run, or read one."""
    from strop.cli.episodes import list_episodes, show_episode

    return show_episode(run, show) if show else list_episodes(run, phase=phase, step=step, task=task, reward=reward, limit=limit)


@app.command()
@guarded
def replay(run: Run, plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live panel.")] = False) -> int:
    """Do a run again and compare every token, reward and digest."""
    from strop.cli.run import replay_run

    return replay_run(run, plain=plain)


@app.command()
@guarded
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
) -> int:
    """Serve a run's model, or a checkpoint, to any OpenAI client."""
    from strop.cli.serve import serve_model

    return serve_model(model, host, port)


@app.command()
@guarded
def doctor() -> int:
    """Say what this machine lacks, what that costs, and how to fix it."""
    from strop.cli.doctor import print_report

    return print_report()


@app.command()
@guarded
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="HTML file; by default report.html of the run.")] = None,
) -> int:
    """Write the HTML report of a run."""
    from strop.cli.episodes import write_report

    return write_report(run, out)


@config_app.command("show")
@guarded
def config_show(
    source: Annotated[Path | None, typer.Argument(metavar="[RECIPE|RUN]", help="By default the built-in defaults.")] = None,
    overrides: Set = None,
) -> int:
    """Print a configuration as resolved, in TOML."""
    from strop.cli.configuration import show

    return show(source, overrides or [])


@config_app.command("diff")
@guarded
def config_diff(
    first: Annotated[Path, typer.Argument(metavar="RECIPE|RUN")],
    second: Annotated[Path | None, typer.Argument(metavar="[RECIPE|RUN]", help="By default the built-in defaults.")] = None,
) -> int:
    """Print the keys in which two configurations differ."""
    from strop.cli.configuration import diff

    return diff(first, second)


@config_app.command("reference")
@guarded
def config_reference(
    metrics: Annotated[bool, typer.Option("--metrics", help="The metrics instead of the configuration.")] = False,
    write: Annotated[Path | None, typer.Option("--write", metavar="DIR", help="Write both pages into a directory.")] = None,
) -> int:
    """Print the reference of every configuration key (or metric), in Markdown."""
    from strop.cli.configuration import reference

    return reference(metrics=metrics, write=write)


@app.command()
@guarded
def version() -> int:
    """Print the version."""
    from strop import __version__

    print(f"strop {__version__}")
    return 0


def main() -> int:
    """Entry point of the command; leaves through ``SystemExit`` with 0, 1, 2 or 130."""
    app(prog_name="strop")
    return 0
