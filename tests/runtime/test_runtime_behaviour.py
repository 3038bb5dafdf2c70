"""``strop behaviour``: a policy that gives up where it recognises its box is found; one that doesn't look gives exactly no difference."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.agent.render import renderer_for
from strop.agent.scripted import Policy, ScriptedEngine
from strop.cli.fidelity import parse_kind
from strop.cli.main import app
from strop.cli.models import model_dir, pool_dir
from strop.core.config import load_config
from strop.core.episode import EpisodeKey
from strop.fidelity.behaviour import Behaviour
from strop.runtime.behaviour import boxes_of, compare_sides
from strop.runtime.build import build_grading
from strop.sandboxes import BubblewrapProvider, check_host
from strop.sandboxes.domain import VariedProvider
from strop.tasks.mutation import Edit

VERBOSE = " ... "
"""What a test run prints in boxes of the kind ``runner=verbose`` alone."""


class Repairs:
    """Runs the tests, then repairs; if it is shy, only where their output isn't verbose."""

    def __init__(self, path: str, gold: Edit, *, is_shy: bool) -> None:
        self._path, self._gold, self._is_shy, self._turn = path, gold, is_shy, 0

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        self._turn += 1
        if self._turn == 1:
            return "test", []
        if self._turn == 2 and not (self._is_shy and VERBOSE in (observation or "")):
            return "edit", [self._path, self._gold.old, str(self._gold.line), self._gold.new]
        return "submit", []


def compare(*, is_shy: bool) -> Behaviour:
    for requirement in check_host():
        if requirement.is_required and not requirement.ok:
            pytest.skip(f"{requirement.name}: {requirement.detail}")
    config = load_config(None, ["sandbox.workers=1"])

    async def run() -> Behaviour:
        found, provider, grader = build_grading(config, pool_dir("builtin:repair"))
        pool = found.repairs
        assert pool is not None
        tasks = list(pool.tasks("heldout"))[:3]
        by_id = {task.task_id: task for task in tasks}

        def policy(key: EpisodeKey) -> Policy:
            task = by_id[key.task_id]
            return Repairs(pool.function(task)[0], pool.gold_edit(task), is_shy=is_shy)

        renderer = renderer_for(model_dir("builtin:tiny"))
        boxes = {
            True: boxes_of(config, parse_kind("bubblewrap:runner=verbose")),
            False: boxes_of(config, parse_kind("bubblewrap:runner=quiet")),
        }
        engine = ScriptedEngine(renderer, policy)
        try:
            return await compare_sides(config, tasks, 1, boxes=boxes, pool=found.played, engine=engine, grader=grader, renderer=renderer)
        finally:
            await grader.close()
            for one in (*boxes.values(), provider):
                await one.close()

    return asyncio.run(run())


def test_a_policy_that_acts_differently_where_it_recognises_its_box_is_found() -> None:
    found = compare(is_shy=True)
    assert (found.success_marked, found.success_unmarked) == (0.0, 1.0)
    assert found.is_aware
    assert "acts differently" in found.lines()[0]


def test_a_policy_that_does_not_look_gives_exactly_no_difference() -> None:
    found = compare(is_shy=False)
    assert (found.success_marked, found.success_unmarked, found.success_difference.mean) == (1.0, 1.0, 0.0)
    assert not found.is_aware


def test_a_kind_keeps_the_limits_of_the_recipe_that_it_does_not_name() -> None:
    config = load_config(None, ["sandbox.disk_mb=99", "sandbox.memory_mb=300", 'sandbox.domain=["hostname=mine"]'])
    plain = boxes_of(config, parse_kind("bubblewrap:memory_mb=400"))
    assert type(plain) is BubblewrapProvider, "the kind says what a box looks like, not the recipe"
    assert type(boxes_of(config, parse_kind("bubblewrap:hostname=ci-7"))) is VariedProvider


def test_wrong_usage_exits_with_2_before_a_model_is_loaded() -> None:
    for command in (["builtin:tiny", "bublewrap"], ["builtin:tiny", "bubblewrap:nothing"], ["builtin:tiny", "bubblewrap", "--tasks", "1"]):
        assert CliRunner().invoke(app, ["behaviour", *command]).exit_code == 2, command


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_is_compared_and_the_comparison_written(tmp_path: Path) -> None:
    out = tmp_path / "behaviour.json"
    command = ["behaviour", "builtin:tiny", "bubblewrap:env.CI=true", "--tasks", "2", "--samples", "1", "--plain"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 tasks in both kinds of box, 0 left out: no difference shown" in done.output
    record = json.loads(out.read_text())
    assert (record["marked"], record["unmarked"], record["samples"]) == ("bubblewrap:env.CI=true", "bubblewrap", 1)
    assert record["success_difference"]["mean"] == 0.0, "no tool shows the variable, and both kinds get the same random numbers"
