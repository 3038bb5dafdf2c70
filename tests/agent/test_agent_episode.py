"""The loop: token-exact streams, limits, statistics and failures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from agent_kit import BUGGY, KEY, DirSandbox, OneTaskPool, Plays, Stage, make_task

from strop.agent import compact, episode
from strop.agent.baselines import NoChange
from strop.agent.episode import run_episode
from strop.agent.render import ActionRenderer, CompactRenderer
from strop.agent.scripted import Policy, ScriptedEngine
from strop.core import metrics
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import EngineError, SandboxError, TaskError
from strop.core.task import Limits, Task
from strop.ports import Engine, ExecResult, Generation

REPAIR = [("read", "3", "1"), ("edit", "3", "<", "4", ">"), ("test",), ("submit",)]


def check_stream(played: Episode, renderer: ActionRenderer, task: Task) -> None:
    """The stream is the prompt, then actions and answers in turn; the mask covers the actions and nothing else."""
    (trace,) = played.traces
    ids = trace.token_ids.tolist()
    at = len(renderer.render_start(task, system_prompt=True))
    assert ids[:at] == renderer.render_start(task, system_prompt=True)
    mask = np.zeros(len(ids), dtype=bool)
    for number, turn in enumerate(played.turns):
        assert turn.start == at
        mask[turn.start : turn.end] = True
        call, arguments, text = renderer.parse(ids[turn.start : turn.end])
        assert (call, arguments, text) == (turn.call, turn.arguments, turn.text)
        at = turn.end
        if number + 1 < len(played.turns):
            cut_off = [] if ids[at - 1] in renderer.stop_ids else list(renderer.stop_ids[:1])
            answer = cut_off + renderer.render_observation(turn.observation)
            assert ids[at : at + len(answer)] == answer
            at += len(answer)
    assert at == len(ids)
    assert np.array_equal(trace.loss_mask, mask)


def test_a_repair(stage: Stage) -> None:
    policy = Plays(*REPAIR)
    played = stage.play(policy)
    check_stream(played, stage.renderer, make_task())
    assert played.stop_reason == "submitted"
    assert played.changes == {"pkg/numbers.py": BUGGY.replace("x < high", "x > high").encode()}
    assert [(turn.call, turn.status) for turn in played.turns] == [(action[0], "ok") for action in REPAIR]
    assert policy.seen == [None, *(turn.observation for turn in played.turns[:-1])]
    assert played.turns[2].observation.endswith("OK")
    expected = {"turns": 4, "edits": 1, "tests": 1, "malformed": 0, "tool_errors": 0, "submitted": 1, "submitted_on_red": 0}
    assert played.stats == {**expected, "first_edit_green": 1}
    assert played.costs["cost/sampled_tokens"] == played.traces[0].loss_mask.sum()
    assert played.costs["cost/prompt_tokens"] + played.costs["cost/sampled_tokens"] == len(played.traces[0])
    assert 0 < played.costs["cost/sandbox_s"] <= played.costs["env/s"]
    metrics.validate(played.costs)
    assert stage.provider.boxes[0].is_stopped


def test_the_same_episode_twice_is_the_same_stream(stage: Stage) -> None:
    actions = [("test",), ("edit", "3", "x", "6", "object()"), ("test",), ("undo",), ("submit",)]
    first, second = (stage.play(Plays(*actions)) for _ in range(2))
    assert "object at 0x..." in first.turns[2].observation
    assert np.array_equal(first.traces[0].token_ids, second.traces[0].token_ids)
    assert first.stats == second.stats
    assert first.changes == second.changes == {}


def test_wrong_and_malformed_turns_are_answered_and_trained(stage: Stage) -> None:
    played = stage.play(Plays(("raed", "3", "1"), ("read", "x" * 400), ("", ""), ("submit",)))
    check_stream(played, stage.renderer, make_task())
    assert [turn.status for turn in played.turns] == ["tool_error", "malformed", "malformed", "ok"]
    assert played.turns[0].observation == "error: no tool 'raed'. Did you mean read?"
    tools = "Tools: list, search, read, edit, test, undo, submit"
    assert played.turns[1].observation == f"error: malformed call: it was cut off. {tools}"
    assert played.turns[2].observation == f"error: malformed call: expected one tool call. {tools}"
    assert played.turns[1].end - played.turns[1].start == Limits().max_new_tokens
    assert played.stats["malformed"] == 2
    assert played.stats["tool_errors"] == 1
    assert played.stats["submitted_on_red"] == 1


@pytest.mark.parametrize(
    ("actions", "on_red", "first_edit_green"),
    [
        ([], 1, None),
        ([("test",)], 1, None),
        ([("edit", "3", "<", "4", ">")], 1, None),
        ([("edit", "3", "<", "4", ">"), ("test",)], 0, 1),
        ([("edit", "3", "<", "4", ">"), ("test",), ("undo",)], 1, 1),
        ([("edit", "3", "<", "2", ">"), ("test",), ("undo",), ("edit", "3", "<", "4", ">"), ("test",)], 0, 0),
        ([("edit", "3", "<", "2", ">"), ("undo",), ("edit", "3", "<", "4", ">"), ("test",)], 0, None),
        ([("edit", "3", "<", "4", "<="), ("edit", "3", "<=", "4", ">"), ("test",)], 0, None),
    ],
)
def test_red_submissions_and_first_edits(stage: Stage, actions: list[tuple[str, ...]], on_red: int, first_edit_green: int | None) -> None:
    stats = stage.play(Plays(*actions, ("submit",))).stats
    assert stats["submitted_on_red"] == on_red
    assert stats.get("first_edit_green") == first_edit_green


def test_first_edit_right_needs_the_digest_of_the_original(stage: Stage) -> None:
    gold = hashlib.sha256(BUGGY.replace("x < high", "x > high").encode()).hexdigest()
    task = make_task(provenance={"gold_sha256": gold})
    assert stage.play(Plays(*REPAIR), task).stats["first_edit_right"] == 1
    assert stage.play(Plays(("edit", "3", "<", "4", ">="), ("submit",)), task).stats["first_edit_right"] == 0
    assert stage.play(NoChange(), task).stats["first_edit_right"] == 0


def test_without_the_system_prompt(stage: Stage) -> None:
    played = stage.play(NoChange(), system_prompt=False)
    assert compact.SYSTEM not in played.traces[0].token_ids
    assert played.changes == {}


# ----------------------------------------------------------------------------------------------------------------- limits


def test_turn_limit(stage: Stage) -> None:
    task = make_task(limits=Limits(max_turns=3, max_tokens=4000))
    played = stage.play(Plays(), task)
    assert played.stop_reason == "max_turns"
    assert played.is_truncated
    assert played.stats["turns"] == 3
    assert played.stats["submitted"] == 0
    check_stream(played, stage.renderer, task)


def test_no_partial_answer_is_ever_fed(stage: Stage) -> None:
    full = stage.play(Plays(("list",), ("read", "3", "1"), ("submit",)))
    second = full.turns[1]
    for max_tokens in range(full.turns[0].start + 1, len(full.traces[0]) + 2):
        task = make_task(limits=Limits(max_tokens=max_tokens, exec_s=20.0))
        played = stage.play(Plays(("list",), ("read", "3", "1"), ("submit",)), task)
        assert len(played.traces[0]) <= max_tokens
        check_stream(played, stage.renderer, task)
        if max_tokens >= len(full.traces[0]):
            assert played.stop_reason == "submitted"
        else:
            assert played.stop_reason == "max_tokens"
            assert len(played.turns) == (1 if max_tokens <= second.start else 2 if max_tokens <= full.turns[2].start else 3)


def test_a_prompt_that_does_not_fit_is_an_error_of_the_task(stage: Stage) -> None:
    with pytest.raises(TaskError, match=r"the prompt of demo:clamp#1 has \d+ tokens, limits.max_tokens is 20") as caught:
        stage.play(NoChange(), make_task(limits=Limits(max_tokens=20)))
    assert caught.value.ids == {"task": KEY.task_id, "phase": "eval.test", "step": "0", "sample": "0"}
    assert stage.provider.boxes == []


def test_wall_limit_is_recorded(stage: Stage) -> None:
    ticks = iter(range(0, 10_000, 10))
    task = make_task(limits=Limits(wall_s=70.0, max_tokens=4000))
    played = stage.play(Plays(), task, clock=lambda: float(next(ticks)))
    assert played.stop_reason == "wall"
    assert len(played.turns) == 2
    check_stream(played, stage.renderer, task)


# --------------------------------------------------------------------------------------------------------------- failures


def test_a_broken_box_raises_with_the_ids_and_cleans_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(self: DirSandbox, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        raise SandboxError("the worker died", retryable=True, ids={"box": "7"})

    monkeypatch.setattr(DirSandbox, "run_python", dies)
    with pytest.raises(SandboxError, match="the worker died") as caught:
        stage.play(Plays(("test",)))
    assert caught.value.retryable
    assert caught.value.ids == {"task": KEY.task_id, "phase": "eval.test", "step": "0", "sample": "0", "box": "7"}
    assert stage.provider.boxes[0].is_stopped


def test_a_host_file_error_is_an_error_of_the_sandbox(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DirSandbox) -> dict[str, bytes | None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DirSandbox, "changes", full)
    with pytest.raises(SandboxError, match="No space left on device"):
        stage.play(NoChange())
    assert stage.provider.boxes[0].is_stopped


def test_an_engine_that_fails_or_hangs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = stage.engine(NoChange())
    asyncio.run(closed.close())
    with pytest.raises(EngineError, match="closed"):
        stage.play(NoChange(), engine=closed)

    class Hanging:
        is_closed = False

        async def generate(self, new_ids: Sequence[int], **options: object) -> Generation:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            Hanging.is_closed = True

    class HangingEngine(ScriptedEngine):
        async def open(self, key: EpisodeKey) -> Hanging:  # type: ignore[override]
            return Hanging()

    monkeypatch.setattr(episode, "MACHINERY_DEADLINE_S", 0.05)
    with pytest.raises(EngineError, match=r"generating took longer than 0.05 s") as caught:
        stage.play(NoChange(), engine=HangingEngine(stage.renderer, lambda key: NoChange()))
    assert caught.value.retryable
    assert Hanging.is_closed
    assert all(box.is_stopped for box in stage.provider.boxes)


def test_a_cancelled_episode_leaves_no_box(stage: Stage) -> None:
    async def cancel() -> None:
        task = make_task()
        engine = stage.engine(Plays(("test",)))
        pool = OneTaskPool(task, stage.base)
        running = asyncio.create_task(
            run_episode(task, KEY, engine=engine, sandbox_provider=stage.provider, pool=pool, renderer=stage.renderer, temperature=1.0)
        )
        while not stage.provider.boxes:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert all(box.is_stopped for box in stage.provider.boxes)


def test_versions_of_a_scripted_stream_follow_swaps(renderer: CompactRenderer) -> None:
    async def play() -> None:
        engine = ScriptedEngine(renderer, lambda key: Plays(("list",), ("test",), ("submit",)))
        session = await engine.open(KEY)
        await session.generate([1, 40], max_new_tokens=40, stop_ids=[2], temperature=1.0)
        await engine.swap({}, 3)
        await session.generate(renderer.render_observation("x"), max_new_tokens=40, stop_ids=[2], temperature=1.0)
        session.feed([7])
        trace = session.trace()
        first = 2 + len(renderer.render_action("list", {}))
        assert [(span.start, span.end, span.version) for span in trace.versions] == [(0, first, 0), (first, len(trace), 3)]
        assert not trace.loss_mask[-1]
        assert trace.routes is None

    asyncio.run(play())


def test_callables_are_what_the_ports_ask_for(renderer: CompactRenderer) -> None:
    make: Callable[[EpisodeKey], Policy] = lambda key: NoChange()  # noqa: E731
    engine = ScriptedEngine(renderer, make)
    assert isinstance(engine, Engine)
    assert isinstance(renderer, ActionRenderer)
