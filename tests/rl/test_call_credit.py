"""Credit for single calls: careless ones pay, choosing a tool doesn't, and the verdict's credit stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_toys import make_episode, make_trace

from strop.core.episode import Episode, Turn
from strop.core.outcome import Scored
from strop.core.random import generator
from strop.rl.advantage import assign_credit
from strop.rl.call_credit import call_credit, stands, wasted

Call = tuple[str, str, str]
"""Tool, argument, status."""

CALLS = st.lists(
    st.tuples(st.sampled_from(["edit", "test", "dance"]), st.sampled_from("ab"), st.sampled_from(["ok", "tool_error", "malformed"]))
)


def episode(calls: Sequence[Call], sample: int = 0, reward: float = 0.0, task: str = "t") -> Episode:
    """An episode of one prompt token, then one sampled token and one observed token for each call."""
    turns = [
        Turn(
            trace=0,
            start=1 + 2 * n,
            end=2 + 2 * n,
            call=tool,
            arguments={"old": argument.strip()} if tool != "test" else {},
            text="",
            observation=f"answer to {tool} {argument.strip()}" if tool != "test" else f"took {n} ms",
            status=status,
        )
        for n, (tool, argument, status) in enumerate(calls)
    ]
    trace = make_trace([2] * (1 + 2 * len(calls)), [0, *[1, 0] * len(calls)])
    return replace(make_episode(task, sample, Scored(reward=reward), traces=[trace]), turns=tuple(turns))


def _credit(episodes: Sequence[Episode], **options):
    return call_credit([(e, e.outcome.reward) for e in episodes], **options)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("calls", "flags"),
    [
        ([("edit", "a", "ok"), ("test", "", "ok"), ("test", "", "ok")], [0, 0, 1]),
        ([("test", "", "ok"), ("edit", "a", "ok"), ("undo", "", "ok"), ("test", "", "ok")], [0, 0, 0, 1]),
        ([("edit", "a", "ok"), ("undo", "", "ok"), ("edit", "b", "ok"), ("test", "", "ok")], [0, 0, 0, 0]),
        ([("edit", "a", "ok"), ("edit", "a", "ok"), ("edit", "b", "tool_error"), ("", "", "malformed")], [0, 1, 1, 1]),
        ([("read", "3", "ok"), ("read", "4", "ok"), ("read", "3", "ok")], [0, 0, 1]),
        ([("undo", "", "tool_error"), ("edit", "a", "ok"), ("undo", "", "ok"), ("edit", "a", "ok")], [1, 0, 0, 1]),
    ],
)
def test_what_counts_as_wasted(calls: list[Call], flags: list[int]) -> None:
    assert wasted(episode(calls).turns).astype(int).tolist() == flags


def test_a_repetition_is_known_by_its_answer_whatever_its_spelling() -> None:
    first, second = episode([("edit", "a", "ok"), ("edit", "a", "ok")]).turns
    again = replace(second, arguments={"line": "03", "file": "x.py", "old": "a"})
    assert wasted([replace(first, arguments={"file": "1", "old": "a", "line": "3"}), again]).tolist() == [False, True]
    elsewhere = replace(again, observation="ok, in another line")
    assert wasted([first, elsewhere]).tolist() == [False, False]


def test_a_call_that_names_no_tool_pays_although_all_of_its_kind_are_wasted() -> None:
    one = episode([("", "", "malformed"), ("test", "", "ok"), ("edit", "a", "ok"), ("edit", "b", "ok")])
    assert _credit([one], wasted_call_cost=0.4)[one.key].tolist() == pytest.approx([-0.3, 0.0, 0.0, 0.0])


def test_calls_that_leave_training_set_no_price_for_those_that_stay() -> None:
    good = [episode([("edit", "a", "ok"), ("edit", "b", "ok")], sample, reward=1.0 - sample, task="good") for sample in range(2)]
    alone = [episode([("edit", "a", "tool_error")] * 4, 0, task=f"alone{n}") for n in range(6)]
    samples = assign_credit([*good, *alone], wasted_call_cost=0.4).samples
    assert [sample.advantage.tolist() for sample in samples] == [[0, 0.5, 0, 0.5, 0], [0, -0.5, 0, -0.5, 0]]


def test_a_call_is_measured_against_its_own_tool() -> None:
    one = episode([("edit", "a", "ok"), ("edit", "b", "tool_error"), ("test", "", "ok")], 0)
    two = episode([("edit", "a", "ok"), ("edit", "b", "ok"), ("test", "", "ok")], 1)
    credit = _credit([one, two], wasted_call_cost=0.4)
    assert credit[one.key].tolist() == pytest.approx([0.1, -0.3, 0.0])
    assert credit[two.key].tolist() == pytest.approx([0.1, 0.1, 0.0])


@given(st.lists(CALLS, max_size=5), st.booleans())
def test_credit_of_a_tool_adds_up_to_zero_in_any_order(episodes: list[list[Call]], is_control: bool) -> None:
    played = [episode(calls, sample) for sample, calls in enumerate(episodes)]
    credit = _credit(played, wasted_call_cost=0.5, permutation=generator("p", 0) if is_control else None)
    assert [len(credit[e.key]) for e in played] == [len(e.turns) for e in played]
    for tool in ("edit", "test"):
        mine = [
            v for e in played for turn, v in zip(e.turns, credit[e.key], strict=True) if turn.call == tool and turn.status != "malformed"
        ]
        assert sum(mine) == pytest.approx(0.0, abs=1e-9)


def test_it_stands_on_the_tokens_of_the_call_beside_the_credit_of_the_verdict() -> None:
    won = episode([("edit", "a", "tool_error"), ("edit", "b", "ok")], 0, reward=1.0)
    lost = episode([("edit", "a", "ok"), ("edit", "b", "ok")], 1)
    samples = assign_credit([won, lost], wasted_call_cost=0.4).samples
    assert samples[0].advantage.tolist() == pytest.approx([0, 0.5 - 0.3, 0, 0.5 + 0.1, 0])
    assert samples[1].advantage.tolist() == pytest.approx([0, -0.5 + 0.1, 0, -0.5 + 0.1, 0])


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equal_verdicts_trains_for_the_price_of_calls_alone(reward: float) -> None:
    group = [episode([("edit", "a", "tool_error")], 0, reward), episode([("edit", "a", "ok")], 1, reward)]
    credit = assign_credit(group, wasted_call_cost=0.4, right_edit_credit=1.0)
    assert (credit.trained, credit.dropped, credit.groups_no_signal) == (2, {}, 1)
    assert [sample.advantage[sample.trace.loss_mask].tolist() for sample in credit.samples] == [pytest.approx([-0.2]), pytest.approx([0.2])]
    assert assign_credit(group, right_edit_credit=1.0).dropped == {"no_signal": 2}


def test_right_edits_are_measured_among_groups_with_a_signal() -> None:
    mixed = [episode([("edit", "a", "ok")], 0, 1.0), episode([("edit", "b", "ok")], 1)]
    even = [replace(one, key=replace(one.key, task_id="other")) for one in (episode([("edit", "a", "ok")], n) for n in range(2))]
    alone, beside = (assign_credit(some, wasted_call_cost=0.4, right_edit_credit=1.0).samples for some in (mixed, mixed + even))
    by_key = {sample.key: sample.advantage.tolist() for sample in beside}
    assert all(by_key[sample.key] == sample.advantage.tolist() for sample in alone)
    assert all(not any(by_key[one.key]) for one in even)


TOLD = "The tests fail.\n\n" + "FAIL: test_1 (test_a.TestA.test_1)\n" * 3


@pytest.mark.parametrize(
    ("calls", "observation", "flags"),
    [
        ([("test", "", "ok"), ("edit", "a", "ok"), ("test", "", "ok")], TOLD[17:], [1, 0, 0]),
        ([("test", "", "ok")], TOLD[17:] + "Ran 8 tests", [0]),
        ([("edit", "a", "ok"), ("undo", "", "ok"), ("test", "", "ok")], TOLD[17:], [0, 0, 1]),
        ([("test", "", "ok")], "FAIL", [0]),
    ],
)
def test_what_the_instruction_says_needs_no_call(calls: list[Call], observation: str, flags: list[int]) -> None:
    turns = [replace(turn, observation=observation) if turn.call == "test" else turn for turn in episode(calls).turns]
    assert wasted(turns, TOLD).astype(int).tolist() == flags
    assert not wasted(turns).any()


def test_a_control_breaks_the_tie_between_calls_and_their_credit() -> None:
    played = [episode([("edit", "a", "tool_error" if n % 2 else "ok")], n) for n in range(64)]
    real, control = (
        np.concatenate(list(_credit(played, wasted_call_cost=1.0, permutation=shuffle).values())) for shuffle in (None, generator("p", 1))
    )
    assert sorted(real) == sorted(control)
    assert abs(np.corrcoef(real, control)[0, 1]) < 0.4


UNDO = ("undo", "", "ok")


@pytest.mark.parametrize(
    ("calls", "flags"),
    [
        ([("edit", "a", "ok"), UNDO, ("edit", "b", "ok"), ("test", "", "ok"), ("submit", "", "ok")], [0, 0, 1, 0, 0]),
        ([("edit", "a", "ok"), ("edit", "b", "ok"), UNDO], [1, 0, 0]),
        ([("edit", "a", "tool_error"), ("edit", "b", "ok"), ("undo", "", "tool_error")], [0, 1, 0]),
        ([UNDO, ("edit", "a", "ok")], [0, 1]),
        ([], []),
    ],
)
def test_which_edits_stand_at_the_end(calls: list[Call], flags: list[int]) -> None:
    assert stands(episode(calls).turns).astype(int).tolist() == flags


def test_the_edit_that_repaired_earns_and_the_ones_undone_on_the_way_pay_for_it() -> None:
    won = episode([("edit", "a", "ok"), UNDO, ("edit", "b", "ok")], 0, reward=1.0)
    lost = episode([("edit", "c", "ok"), UNDO, ("edit", "d", "tool_error"), ("edit", "e", "ok")], 1)
    credit = _credit([won, lost], right_edit_credit=1.0)
    assert credit[won.key].tolist() == pytest.approx([-0.25, 0, 0.75])
    assert credit[lost.key].tolist() == pytest.approx([-0.25, 0, 0, -0.25])


@given(st.lists(st.tuples(CALLS, st.sampled_from([0.0, 1.0])), max_size=5), st.booleans())
def test_credit_of_right_edits_adds_up_to_zero_on_edits_alone(episodes: list[tuple[list[Call], float]], is_control: bool) -> None:
    played = [episode(calls, sample, reward) for sample, (calls, reward) in enumerate(episodes)]
    credit = _credit(played, right_edit_credit=0.5, permutation=generator("p", 0) if is_control else None)
    values = np.concatenate([*credit.values(), [0.0]])
    assert values.sum() == pytest.approx(0.0, abs=1e-9)
    for e in played:
        assert all(v == 0 for turn, v in zip(e.turns, credit[e.key], strict=True) if turn.call != "edit" or turn.status != "ok")


def test_a_control_breaks_the_tie_between_edits_and_the_verdict() -> None:
    played = [episode([("edit", "a", "ok"), UNDO, ("edit", "b", "ok")], n, reward=float(n % 2)) for n in range(64)]
    options = [None, generator("p", 1)]
    real, control = (np.concatenate(list(_credit(played, right_edit_credit=1.0, permutation=one).values())) for one in options)
    assert sorted(real) == sorted(control)
    assert abs(np.corrcoef(real, control)[0, 1]) < 0.4
