"""The command ``strop``. Heavy code is imported by the commands that need it, so that ``--help`` is instant."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an old interpreter may run an uninstalled checkout
    sys.exit("error: strop needs Python 3.11 or newer; this is %d.%d (%s)" % (*sys.version_info[:2], sys.executable))  # noqa: UP031

from pathlib import Path
from typing import Annotated

import typer

from strop.cli.environments import env_app
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
sandbox_app = typer.Typer(help="Check sandbox back ends.", no_args_is_help=True, rich_markup_mode=None)
numerics_app = typer.Typer(help="Check what a run certifies about its numbers.", no_args_is_help=True, rich_markup_mode=None)
routes_app = typer.Typer(help="Record and show what a run's routers did.", no_args_is_help=True, rich_markup_mode=None)
model_app = typer.Typer(help="Make models of models.", no_args_is_help=True, rich_markup_mode=None)
_GROUPS = (
    *((config_app, "config"), (sandbox_app, "sandbox"), (numerics_app, "numerics"), (routes_app, "routes"), (model_app, "model")),
    (env_app, "env"),
)
for group, group_name in _GROUPS:
    app.add_typer(group, name=group_name)

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example rl.steps=10; repeatable.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live panel.")]
Phase = Annotated[str | None, typer.Option(help="Phase, for example rl or 'eval.*'.")]
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
    plain: Plain = False,
) -> int:
    """Run a recipe from the base to a served, evaluated model."""
    from strop.cli.run import run_recipe

    return run_recipe(recipe, overrides or [], out, resume=resume, clean=clean, dry_run=dry_run, plain=plain)


@app.command("eval")
@guarded
def evaluate(
    model: Model,
    overrides: Set = None,
    plain: Plain = False,
) -> int:
    """Evaluate a run's model, or a checkpoint, on held-out tasks."""
    from strop.cli.run import evaluate_model

    return evaluate_model(model, overrides or [], plain=plain)


@app.command()
@guarded
def episodes(
    run: Run,
    phase: Phase = None,
    step: Annotated[int | None, typer.Option(min=0, max=2**53, help="Step.")] = None,
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
def hacks(
    run: Run,
    rule: Annotated[str | None, typer.Option(help="Only findings of one rule, for example order_counter.")] = None,
    phase: Phase = None,
    contrast: Annotated[bool, typer.Option("--contrast", help="Also compare the samples of each task with each other.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many findings; 0 shows all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    audit: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask this OpenAI-compatible endpoint as well; it sees no verdict.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model of the endpoint.")] = "default",
    sample: Annotated[int, typer.Option(min=0, help="Episodes that the endpoint is asked about; 0 means all.")] = 50,
) -> int:
    """Show what a run's episodes were flagged for, with the evidence."""
    from strop.cli.hacks import show_hacks

    question = (audit, model, sample) if audit else None
    return show_hacks(run, rule=rule, phase=phase, contrast=contrast, limit=limit, as_json=as_json, audit=question)


@app.command()
@guarded
def replay(run: Run, plain: Plain = False) -> int:
    """Do a run again and compare every token, reward and digest."""
    from strop.cli.run import replay_run

    return replay_run(run, plain=plain)


@app.command()
@guarded
def regrade(
    run: Run,
    reward: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Another registered grader; by default the run's own, and changes are then a failure."),
    ] = None,
    phase: Annotated[str | None, typer.Option(help="Phase, for example rl or 'eval.*'; by default all.")] = None,
) -> int:
    """Grade the stored episodes of a run again; print what changed and why."""
    from strop.cli.audit import regrade_run

    return regrade_run(run, reward=reward, phase=phase)


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


@sandbox_app.command("check")
@guarded
def sandbox_check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Registered back end, for example bubblewrap, or package.module:Class.")],
    only: Annotated[list[str] | None, typer.Option("--only", metavar="CHECK", help="Only this check; repeatable.")] = None,
) -> int:
    """Run the conformance suite against a sandbox back end."""
    from strop.cli.audit import check_sandbox_backend

    return check_sandbox_backend(name, only or [])


@numerics_app.command("verify")
@guarded
def numerics_verify(
    path: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="Run directory, or certificate file.")],
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN", help="The run of a certificate file that lies elsewhere.")] = None,
) -> int:
    """Check a certificate by its digests against its run."""
    from strop.cli.audit import verify_numerics

    return verify_numerics(path, run)


@numerics_app.command("certify")
@guarded
def numerics_certify(run: Run) -> int:
    """Compute a run's evidence again here and hold it against its certificate, or write one."""
    from strop.cli.drift import certify

    return certify(run)


@numerics_app.command("localise")
@guarded
def numerics_localise(run: Run, rank: Annotated[int, typer.Option(min=0, help="The suspect rank.")] = 0) -> int:
    """Name the first layer and operation in which a rank went wrong."""
    from strop.cli.drift import localise

    return localise(run, rank)


@numerics_app.command("calibrate")
@guarded
def numerics_calibrate(run: Run) -> int:
    """Measure how far results move when nothing is wrong, and keep it with the machine's class."""
    from strop.cli.drift import calibrate

    return calibrate(run)


@numerics_app.command("price")
@guarded
def numerics_price(
    model: Model,
    dtype: Annotated[str, typer.Option(help="Number type to price every line in: fp64, tf32, bf16, fp16, int8, mxfp8, nvfp4.")] = "bf16",
    overrides: Annotated[list[str] | None, typer.Option("--override", metavar="OP=TYPE", help="Only this line; repeatable.")] = None,
) -> int:
    """Print the drift and the time that each line of the precision policy is worth."""
    from strop.cli.drift import price

    return price(model, dtype, overrides or [])


@routes_app.command("record")
@guarded
def routes_record(
    run: Run,
    limit: Annotated[int, typer.Option(min=0, help="Most streams of each phase; 0 takes all.")] = 0,
) -> int:
    """Keep the routes of a run's model on its own data, for routes.anchor of a later run."""
    from strop.cli.routes import record

    return record(run, limit)


@routes_app.command("report")
@guarded
def routes_report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="HTML file; by default routes.html of the run.")] = None,
) -> int:
    """Draw expert load, agreement with the anchor, churn and the price of replay."""
    from strop.cli.routes import report

    return report(run, out)


@model_app.command("upcycle")
@guarded
def model_upcycle(
    source: Annotated[str, typer.Argument(metavar="DENSE", help="Dense checkpoint in Hugging Face layout, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.")],
    experts: Annotated[int, typer.Option(min=2, help="Experts of a layer.")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the routers.")] = 0,
) -> int:
    """Make an MoE of a dense checkpoint, with the same outputs at step 0."""
    from strop.cli.routes import upcycle

    return upcycle(source, target, experts, top_k, seed)


@app.command()
@guarded
def fidelity(
    train: Annotated[str, typer.Argument(metavar="TRAIN", help="Kind of the training boxes: BACKEND[:KEY[=VALUE],...].")],
    production: Annotated[str, typer.Argument(metavar="PROD", help="Kind of the production boxes; for KEY see docs/how-to/fidelity.md.")],
    boxes: Annotated[int, typer.Option(min=4, help="Boxes of each kind; fewer than 130 can't show that kinds are alike.")] = 130,
    tasks: Annotated[int, typer.Option(min=2, max=100, help="Repositories that the boxes are over; folds never divide one.")] = 13,
    max_auc: Annotated[float, typer.Option(min=0.5, max=1, help="Fail if the upper bound of the AUC is larger.")] = 0.6,
    permutations: Annotated[int, typer.Option(min=19, help="Permuted label vectors of the test.")] = 200,
    seed: Annotated[int, typer.Option(help="Fixes order, folds, permutations and draws.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the report as JSON; a recipe can require it.")] = None,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write the report as an HTML page.")] = None,
) -> int:
    """Say whether training boxes can be told from production boxes, by what, and what to do about it."""
    from strop.cli.fidelity import audit

    options = {"boxes": boxes, "tasks": tasks, "permutations": permutations, "seed": seed}
    return audit(train, production, **options, max_auc=max_auc, out=out, page=page)


@app.command()
@guarded
def behaviour(
    model: Model,
    marked: Annotated[str, typer.Argument(metavar="MARKED", help="Kind of box that can be recognised: BACKEND[:KEY[=VALUE],...].")],
    unmarked: Annotated[str, typer.Argument(metavar="UNMARKED", help="Kind of box that can't.")] = "bubblewrap",
    tasks: Annotated[int, typer.Option(min=2, help="Held-out tasks, the first of the pool.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task in each kind of box.")] = 4,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the comparison as JSON.")] = None,
    overrides: Set = None,
    plain: Plain = False,
) -> int:
    """Say whether a model acts differently in boxes that it can recognise: success and hack rate on the same tasks."""
    from strop.cli.behaviour import compare_model

    return compare_model(model, marked, unmarked, overrides or [], tasks=tasks, samples=samples, out=out, plain=plain)


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
