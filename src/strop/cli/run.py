"""``strop run``, ``eval`` and ``replay``: resolve, check the host, open the run directory, hand over to the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.configuration import load_any, to_toml
from strop.cli.fidelity import require_fidelity
from strop.cli.guard import during
from strop.cli.registry import resolve
from strop.core.config import RunConfig, load_config
from strop.core.errors import ConfigError

PIPELINE = "strop.runtime.pipeline"


def run_recipe(recipe: Path, overrides: Sequence[str], out: Path | None, *, resume: bool, clean: bool, dry_run: bool, plain: bool) -> int:
    """Run a recipe into ``out``; see ``strop run --help``.

    Raises:
        ConfigError: Anything wrong with the recipe, the overrides, the host or the directory.
        CheckpointError: The fidelity report that the recipe requires isn't there.
        FidelityError: It doesn't let the recipe's boxes through.
    """
    config = load_config(recipe, overrides)
    target = out if out is not None else Path("runs") / recipe.stem
    check_run(config)
    check_pool(config)
    require_fidelity(config)
    if dry_run:
        print(to_toml(config), end="")
        print(f"dry run: configuration and host are fine; would write into {target}", file=sys.stderr)
        return 0
    from strop.store import RunDir
    from strop.ui.view import make_view

    with RunDir.create(target, config, resume=resume, clean=clean) as run:
        words = ["strop run", str(recipe), *(f"--set '{override}'" for override in overrides), f"--out {target}", "--resume"]
        view = make_view(plain=plain)
        try:
            with during(run.logs, f"Continue with: {' '.join(words)}"):
                resolve(f"{PIPELINE}:run_pipeline", "the pipeline")(config, run, run.is_resumed, view)
        finally:
            view.close()
    print(f"report: {target / 'report.html'}\nserve:  strop serve {target}")
    return 0


def evaluate_model(model: Path, overrides: Sequence[str], *, plain: bool) -> int:
    """Evaluate a run's model or a checkpoint, with the run's configuration or the defaults."""
    from strop.cli.models import find_model, is_run
    from strop.ui.view import make_view

    config = load_any(model if is_run(model) else None, overrides)
    check_run(config)
    checkpoint = find_model(model)
    view = make_view(plain=plain)
    try:
        rows = resolve(f"{PIPELINE}:evaluate_checkpoint", "the evaluation")(config, checkpoint, view)
        view.table(rows, title=f"held-out evaluation of {checkpoint}")
    finally:
        view.close()
    return 0


def replay_run(path: Path, *, plain: bool) -> int:
    """Replay a run; exit code 1 when anything differs."""
    from strop.store import RunDir
    from strop.ui.view import make_view

    with RunDir.open(path) as run:
        check_run(run.config)
        view = make_view(plain=plain)
        try:
            differences = resolve(f"{PIPELINE}:replay_run", "the replay")(run, view)
        finally:
            view.close()
    for difference in differences:
        print(f"differs: {difference}", file=sys.stderr)
    if not differences:
        print("every token, reward and digest is the same")
    return 1 if differences else 0


def check_pool(config: RunConfig) -> None:
    """Hold a recipe against its tasks before anything is written.

    Raises:
        ConfigError: The tasks are of an unknown kind, or need or lack what the recipe gives or asks for.
        TaskError: The pool is damaged, or nothing here can decide its tasks.
    """
    from strop.cli import models
    from strop.runtime.tasks import check_tasks, open_tasks

    check_tasks(config, open_tasks(config, models.pool_dir(config.tasks.pool)))


def check_run(config: RunConfig) -> None:
    """Fail early, with one message, on what would fail later: names of rules, plug-ins, model, pool, and the host's sandbox.

    Raises:
        ConfigError: A name or directory that doesn't exist.
        SandboxError: The host can't isolate agent code; says the command that fixes it.
    """
    from strop.cli import models, registry
    from strop.cli.doctor import check_sandbox
    from strop.grading.quarantine import Quarantine
    from strop.sandboxes.domain import check_settings

    Quarantine.of(config.grading)
    check_settings(config.sandbox.domain)
    registry.ENGINES.load(config.engine.backend)
    registry.SANDBOXES.load(config.sandbox.backend)
    models.model_dir(config.model.base)
    models.pool_dir(config.tasks.pool)
    if config.engine.backend != "embedded":
        raise ConfigError(f"engine.backend = {config.engine.backend!r}: a run generates with 'embedded'; other engines can't be chosen yet")
    check_sandbox()
