"""``strop behaviour``: does a model act differently in boxes that it can recognise?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.cli.configuration import load_any
from strop.cli.fidelity import parse_kind
from strop.cli.registry import resolve
from strop.cli.run import check_run


def compare_model(
    model: Path, marked: str, unmarked: str, overrides: Sequence[str], *, tasks: int, samples: int, out: Path | None, plain: bool
) -> int:
    """Play held-out tasks in boxes of both kinds, print the comparison, and write it where asked.

    Args:
        model: A run, or a checkpoint.
        marked: Kind of the boxes that can be recognised, as ``strop fidelity`` takes it.
        unmarked: Kind of the others.
        overrides: Of the run's configuration, or of the defaults.
        tasks: Held-out tasks.
        samples: Episodes of each task in each kind of box.
        out: JSON file.
        plain: Lines instead of the live panel.

    Returns:
        1 if an interval leaves out that nothing differs, else 0.

    Raises:
        ConfigError: A kind that can't be, or a recipe that can't.
        CheckpointError: No model there.
        SandboxError: A back end can't start here.
    """
    from strop.cli.models import find_model, is_run
    from strop.ui.view import make_view

    config = load_any(model if is_run(model) else None, overrides)
    kinds = parse_kind(marked), parse_kind(unmarked)
    check_run(config)
    view = make_view(plain=plain)
    try:
        run = resolve("strop.runtime.behaviour:compare_checkpoint", "the comparison")
        found = run(config, find_model(model), kinds, tasks=tasks, samples=samples, view=view)
    finally:
        view.close()
    for line in found.lines():
        print(line)
    if out is not None:
        found.write(out, model=str(model), marked=str(kinds[0]), unmarked=str(kinds[1]), samples=samples)
    return 1 if found.is_aware else 0
