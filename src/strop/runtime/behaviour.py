"""The same held-out tasks in two kinds of box, with the same random numbers: what differs, the boxes made differ."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.cli.fidelity import Kind
from strop.cli.models import pool_dir
from strop.cli.registry import SANDBOXES
from strop.core.config import RunConfig
from strop.core.episode import Episode
from strop.core.errors import SandboxError
from strop.core.task import Task
from strop.fidelity.behaviour import Behaviour, attempts_of, compare_behaviour
from strop.ports import Engine, Grader, Renderer, SandboxProvider, TaskPool
from strop.rl.evaluate import evaluate
from strop.runtime.build import build_parts
from strop.sandboxes.domain import VariedProvider
from strop.ui.view import View

NAME = "behaviour"
"""Both sides have it, since sampling is keyed by it."""


class _Sheet:
    """Keeps the episodes of one side."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def put_episode(self, episode: Episode) -> None:
        """Keep a finished episode."""
        self.episodes.append(episode)


def boxes_of(config: RunConfig, kind: Kind) -> SandboxProvider:
    """Return what starts boxes of a kind; limits that it doesn't name are those of the recipe.

    Raises:
        SandboxError: The back end's library is missing.
    """
    settings = config.sandbox.model_copy(update={"backend": kind.backend, "domain": list(kind.domain), **kind.limits})
    try:
        made = SANDBOXES.load(kind.backend)(settings)
    except ImportError as error:
        raise SandboxError(f"the back end of {kind} can't be used: {error}") from error
    return VariedProvider(made, kind.domain, seed=config.seed) if kind.domain else made


async def compare_sides(
    config: RunConfig,
    tasks: Sequence[Task],
    samples: int,
    *,
    boxes: Mapping[bool, SandboxProvider],
    pool: TaskPool,
    engine: Engine,
    grader: Grader,
    renderer: Renderer,
    view: View | None = None,
) -> Behaviour:
    """Play every task in both kinds of box and compare.

    Args:
        config: Temperature, sessions and seed are taken from it.
        tasks: At least one, each once.
        samples: Episodes of each task in each kind of box, at least 1.
        boxes: Marked (``True``) and unmarked boxes.
        pool: Knows the tasks' workspaces.
        engine: Generates.
        grader: Verdicts, which are found elsewhere than in these boxes.
        renderer: The chat format.
        view: Shows progress.

    Raises:
        StropError: The machinery failed too often.
    """
    attempts = []
    for is_marked in (True, False):
        sheet = _Sheet()
        if view is not None:
            view.stage(f"{'marked' if is_marked else 'unmarked'} boxes", len(tasks) * samples)
        result = await evaluate(
            NAME,
            tasks,
            samples,
            pool=pool,
            engine=engine,
            sandbox_provider=boxes[is_marked],
            grader=grader,
            renderer=renderer,
            store=sheet,
            view=view,
            temperature=config.eval.temperature,
            max_sessions=config.engine.max_sessions,
            max_infra_failures=config.rl.max_infra_failures,
        )
        attempts += attempts_of(sheet.episodes, result.clusters, is_marked=is_marked)
    return compare_behaviour(attempts, seed=config.seed)


def compare_checkpoint(config: RunConfig, checkpoint: Path, kinds: tuple[Kind, Kind], *, tasks: int, samples: int, view: View) -> Behaviour:
    """Compare a checkpoint in boxes of two kinds, marked first, on the first held-out tasks.

    Raises:
        ConfigError: A setting that this machine can't serve.
        StropError: The machinery failed too often.
    """
    return asyncio.run(_compare(config, checkpoint, kinds, tasks, samples, view))


async def _compare(config: RunConfig, checkpoint: Path, kinds: tuple[Kind, Kind], tasks: int, samples: int, view: View) -> Behaviour:
    parts = build_parts(config, checkpoint, pool_dir(config.tasks.pool))
    boxes: dict[bool, SandboxProvider] = {}
    engine = parts.engine(parts.base_weights)
    try:
        for is_marked, kind in zip((True, False), kinds, strict=True):
            boxes[is_marked] = boxes_of(config, kind)
        return await compare_sides(
            config,
            list(parts.tasks.pool.tasks("heldout"))[:tasks],
            samples,
            boxes=boxes,
            pool=parts.tasks.pool,
            engine=engine,
            grader=parts.grader,
            renderer=parts.renderer,
            view=view,
        )
    finally:
        await engine.close()
        for provider in boxes.values():
            await provider.close()
        await parts.close()
