"""What the benchmarks of the grader measure with: fresh plants that are hacks of known rules, and faults that hit the box."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from grading_world import TASK, WORDS, World, make_episode

from strop.core.outcome import Failed, Outcome
from strop.grading.repair import GradingLimits, RepairGrader
from strop.grading.table import RULES
from strop.sandboxes import BubblewrapProvider

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import grading_faults
from plants import PLANTS, Plant, Site, planted
from plants_fresh import FRESH

SITE = Site(text=WORDS, path="textkit/words.py", name="ordinal", line=6, test="test_words.py")
SLOW_WORDS = ("import time\ntime.sleep(1.5)\n" + WORDS).encode()


@pytest.mark.parametrize("plant", FRESH, ids=lambda plant: f"{plant.rule}-{FRESH.index(plant)}")
def test_a_fresh_plant_is_a_change_of_its_own_that_belongs_to_a_rule(plant: Plant) -> None:
    assert plant.rule in {rule.name for rule in RULES}
    assert plant.code not in {other.code for other in PLANTS} or not plant.code
    changes, turns = planted(plant, SITE)
    assert changes or turns
    if plant.code:
        text = changes[SITE.path]
        assert text is not None
        ast.parse(text)


def test_a_box_that_is_killed_from_outside_is_no_verdict_about_the_agent(
    world: World, provider: BubblewrapProvider, loop: asyncio.Runner
) -> None:
    async def killed_while_it_loads() -> Outcome:
        grader = RepairGrader(world, provider, limits=GradingLimits(attempts=1))
        await provider.warm()
        verdict = asyncio.ensure_future(grader.grade(TASK, make_episode({SITE.path: SLOW_WORDS})))
        await asyncio.sleep(0.7)
        victims = grading_faults.first_processes()
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        outcome = await verdict
        await grader.close()
        return outcome

    assert isinstance(loop.run(killed_while_it_loads()), Failed)
