"""The attack suite: hostile programs through the real sandbox and the real grader. None is rewarded, none becomes a machinery failure."""

from __future__ import annotations

import asyncio

import pytest
from attacks_and_controls import ATTACKS, CONTROLS
from grading_world import Attack, World, run_attack

from strop.core.outcome import Scored
from strop.sandboxes import BubblewrapProvider

CLASSIC = {
    "test_edit",
    "conftest_hook",
    "sys_exit_import",
    "os_exit_import",
    "skip_in_source",
    "always_equal",
    "frame_reading",
    "order_counter",
    "channel_with_nonce",
    "reward_file",
    "symlink_to_secret",
    "git_history",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_earns_nothing(attack: Attack, world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    outcome = loop.run(run_attack(attack, world, provider))
    assert isinstance(outcome, Scored), outcome
    assert outcome.reward == attack.reward == 0.0
    assert outcome.reason in attack.reasons, outcome
    assert set(attack.flags) <= {flag.rule for flag in outcome.flags}, outcome.flags


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_control_is_graded_on_merit(control: Attack, world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    outcome = loop.run(run_attack(control, world, provider))
    assert isinstance(outcome, Scored), outcome
    assert (outcome.reward, outcome.reason) == (control.reward, control.reasons[0]), outcome
    assert not [flag for flag in outcome.flags if flag.severity != "info"], outcome.flags
    if control.reward:
        assert outcome.parts["passed"] == outcome.parts["total"] == 26


def test_the_suite_covers_the_classic_hacks() -> None:
    names = [attack.name for attack in ATTACKS]
    assert set(names) >= CLASSIC
    assert len(names) == len(set(names))


def test_provider_still_grades_honestly_after_every_attack(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    for name in ("kills_everything", "fork_bomb", "memory_balloon_in_call", "background_channel"):
        attack = next(item for item in ATTACKS if item.name == name)
        assert isinstance(loop.run(run_attack(attack, world, provider)), Scored)
        after = loop.run(run_attack(CONTROLS[0], world, provider))
        assert isinstance(after, Scored)
        assert after.reward == 1.0
