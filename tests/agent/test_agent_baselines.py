"""Baselines that know nothing, and the reader of episodes."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from agent_kit import KEY, Plays, Stage, make_task
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strop.agent.baselines import RandomEdits, draw_order, is_green
from strop.agent.transcript import headline, render_transcript, rich_transcript
from strop.core.episode import Episode, EpisodeKey, Turn
from strop.core.outcome import Failed, Flag, Scored, Ungraded
from strop.core.task import Limits

# -------------------------------------------------------------------------------------------------------------- baselines


@dataclass(frozen=True)
class Change:
    line: int
    old: str
    new: str


CANDIDATES = [Change(2, "<", ">"), Change(2, "<", "<="), Change(3, "low", "high"), Change(4, "<", ">"), Change(6, "x", "low")]


def play_random(stage: Stage, seed: int, max_turns: int = 16) -> Episode:
    task = make_task(limits=Limits(max_turns=max_turns, max_tokens=6000, exec_s=20.0))
    return stage.play(RandomEdits("pkg/numbers.py", CANDIDATES, seed=seed, key=KEY), task)


def test_random_edits_find_the_repair_or_leave_the_tree_as_it_was(stage: Stage) -> None:
    calls = set()
    for seed in range(3):
        played = play_random(stage, seed)
        names = [turn.call for turn in played.turns]
        assert played.stop_reason == "submitted"
        assert names[-2:] == ["test", "submit"]
        assert names[:-1] == (["edit", "test", "undo"] * 5)[: len(names) - 1]
        edits = [tuple(turn.arguments.values()) for turn in played.turns if turn.call == "edit"]
        assert len(set(edits)) == len(edits)
        assert edits[-1] == ("pkg/numbers.py", "<", "4", ">")
        assert list(played.changes) == ["pkg/numbers.py"]
        calls.add(tuple(edits))
    assert len(calls) > 1


def test_random_edits_use_their_turns_and_give_up_only_without_candidates(stage: Stage) -> None:
    policy = RandomEdits("3", [CANDIDATES[0]], seed=0)
    played = stage.play(policy)
    assert [turn.call for turn in played.turns] == ["edit", "test", "undo", "submit"]
    assert played.changes == {}
    one = stage.play(RandomEdits("3", [CANDIDATES[0]] * 2, seed=0), make_task(limits=Limits(max_turns=4, max_tokens=4000, exec_s=20.0)))
    assert [turn.call for turn in one.turns] == ["edit", "test", "undo", "edit"]
    assert one.stop_reason == "max_turns"


def test_an_edit_that_does_not_apply_is_skipped(stage: Stage) -> None:
    played = stage.play(RandomEdits("3", [Change(1, "nothing", "x")], seed=0))
    assert [turn.call for turn in played.turns] == ["edit", "submit"]


@given(st.integers(0, 2**32), st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_draw_order(seed: int, weights: list[float]) -> None:
    candidates = [Change(n, "a", "b") for n in range(len(weights))]
    order = draw_order(candidates, seed=seed, weights=weights)
    assert order == draw_order(candidates, seed=seed, weights=weights)
    assert sorted(edit.line for edit in order) == [n for n, weight in enumerate(weights) if weight > 0]


def test_draw_order_follows_the_weights() -> None:
    candidates = [Change(0, "a", "b"), Change(1, "a", "b")]
    first = sum(draw_order(candidates, seed=seed, weights=[3.0, 1.0])[0].line == 0 for seed in range(2000))
    assert 1430 < first < 1570  # 1500 expected, 3.6 standard deviations
    with pytest.raises(ValueError, match=">= 0"):
        draw_order(candidates, seed=0, weights=[1.0, -1.0])


def test_is_green() -> None:
    assert is_green("Ran 8 tests\n\nOK")
    assert is_green("OK (skipped=1)\n")
    assert not is_green("OK\nRan 8 tests\n\nFAILED (failures=1)")
    assert not is_green("OK\n[killed: ran longer than 5 s]")


# ----------------------------------------------------------------------------------------------------------------- reader


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (None, "not graded"),
        (Scored(reward=1.0, parts={"passed": 24}), "reward 1"),
        (Scored(reward=0.0, reason="tests", flags=(Flag(rule="test_edit", severity="hack", evidence="tests/x.py"),)), "reward 0 (tests)"),
        (Ungraded(reason="the judge said nothing"), "ungraded: the judge said nothing"),
        (Failed(error="SandboxError: gone"), "failed: SandboxError: gone"),
    ],
)
def test_transcript(stage: Stage, outcome: object, text: str) -> None:
    played = stage.play(Plays(("edit", "3", "<", "4", "> [bold]"), ("", "x"), ("edit", "3", "> [bold]", "4", ""), ("submit",)))
    graded = Episode(
        key=played.key,
        traces=played.traces,
        turns=played.turns,
        stop_reason=played.stop_reason,
        changes=played.changes,
        outcome=outcome,  # type: ignore[arg-type]
        costs=played.costs,
        stats=played.stats,
    )
    plain = render_transcript(graded, stage.renderer)
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(rich_transcript(graded, stage.renderer))
    for shown in (plain, stream.getvalue()):
        assert text in shown
        assert "<|user|>The tests fail." in shown
        assert "edit 3 < 4 '> [bold]'" in shown
        assert "edit 3 '> [bold]' 4 ''" in shown
        assert "    4|    if x > [bold] high:" in shown
        assert "turn 2  malformed" in shown
        assert "changed: pkg/numbers.py" in shown
        assert "stats: turns 4, edits 2" in shown
    has_flags = isinstance(outcome, Scored) and len(outcome.flags) > 0
    assert ("hack test_edit: tests/x.py" in plain) == has_flags


def test_transcript_of_an_unfinished_stream_says_so(stage: Stage) -> None:
    played = stage.play(Plays(), make_task(limits=Limits(max_turns=1, max_tokens=4000)))
    assert "the last answer was not shown to the agent" in render_transcript(played, stage.renderer)


@pytest.mark.parametrize(
    ("stop_reason", "is_truncated"), [("submitted", False), ("failed", False), ("max_turns", True), ("max_tokens", True), ("wall", True)]
)
def test_only_a_limit_truncates(stop_reason: str, is_truncated: bool) -> None:
    key = EpisodeKey(phase="rl", step=0, task_id="t", sample=0)
    episode = Episode(key=key, traces=(), turns=(), stop_reason=stop_reason, outcome=Failed(error="gone"))
    assert episode.is_truncated == is_truncated
    assert ("(truncated)" in headline(episode)) == is_truncated


def test_what_a_terminal_would_obey_is_shown_as_text() -> None:
    turn = Turn(
        trace=0, start=0, end=1, call="test", arguments={}, text="\x1b[2J", observation="\x1b]0;pwned\x07\x1b[2J\x9b1m\tok", status="ok"
    )
    key = EpisodeKey(phase="rl", step=0, task_id="t\x1b[1m", sample=0)
    outcome = Failed(error="\x1b[31mred")
    stream = io.StringIO()
    shown = rich_transcript(Episode(key=key, traces=(), turns=(turn,), stop_reason="submitted", outcome=outcome), None)  # type: ignore[arg-type]
    Console(file=stream, width=200, color_system=None, force_terminal=False).print(shown)
    text = stream.getvalue()
    assert not [character for character in text if (ord(character) < 32 and character not in "\n\t") or 127 <= ord(character) < 160]
    assert "\\x1b]0;pwned\\x07" in text
