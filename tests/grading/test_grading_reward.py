"""What an episode trains on: the verdict, less what careless calls cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grading_world import make_episode
from hypothesis import given
from hypothesis import strategies as st

from strop.core.config import GradingConfig
from strop.core.episode import Episode, Turn
from strop.core.outcome import Outcome, Scored, Ungraded
from strop.grading.reward import TrainingReward, refused_share
from strop.grading.rules import flag
from strop.rl.advantage import assign_credit

STATUSES = ("ok", "tool_error", "malformed")


def episode(outcome: Outcome, statuses: list[str], sample: int = 0) -> Episode:
    turns = [Turn(trace=0, start=0, end=0, call="read", arguments={}, text="", observation="", status=status) for status in statuses]
    return replace(make_episode({}, turns, sample), outcome=outcome)


def test_by_default_training_sees_the_verdict() -> None:
    careless = episode(Scored(reward=1.0), ["tool_error", "malformed", "ok"])
    assert refused_share(careless) == pytest.approx(2 / 3)
    assert TrainingReward.of(GradingConfig())(careless) == 1.0


def test_refused_calls_cost_their_share_and_a_hack_still_leaves() -> None:
    reward = TrainingReward.of(GradingConfig(refused_call_cost=0.5))
    assert reward(episode(Scored(reward=1.0), ["ok", "tool_error", "malformed", "ok"])) == 0.75
    assert reward(episode(Scored(reward=0.0), ["malformed"])) == -0.5
    assert reward(episode(Scored(reward=0.0), [])) == 0.0
    assert reward(episode(Scored(reward=1.0, flags=(flag("order_counter", "line"),)), ["malformed"])) is None


@given(st.lists(st.sampled_from(STATUSES), min_size=1, max_size=8), st.sampled_from(STATUSES), st.sampled_from([0.0, 1.0]))
def test_a_refused_call_never_raises_the_reward_and_giving_up_never_pays(statuses: list[str], more: str, verdict: float) -> None:
    reward = TrainingReward.of(GradingConfig(refused_call_cost=0.1))
    before, after = (reward(episode(Scored(reward=verdict), turns)) for turns in (statuses, [*statuses, more]))
    assert before is not None
    assert after is not None
    assert after <= before if more != "ok" else after >= before


def test_it_gives_a_group_without_success_something_to_learn() -> None:
    lost = Scored(reward=0.0)
    group = [episode(lost, ["tool_error"] * n + ["ok"] * (2 - n), n) for n in range(3)]
    group.append(episode(Ungraded(reason="judge"), ["malformed"], 3))
    assert assign_credit(group).groups_no_signal == 1
    credit = assign_credit(group, reward_of=TrainingReward.of(GradingConfig(refused_call_cost=0.2)))
    assert credit.advantages.tolist() == pytest.approx([0.1, 0.0, -0.1])
