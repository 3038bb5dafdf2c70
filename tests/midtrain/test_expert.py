"""The scripted expert and what is learned from it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.episode import Episode, EpisodeKey, Turn
from strop.core.task import Task
from strop.midtrain.base.names import NameMaker
from strop.midtrain.base.writer import Document
from strop.midtrain.expert import Expert, Habits
from strop.midtrain.trajectories import as_sample, batches
from strop.tasks.mutation import Edit, apply_edit, candidate_edits, find_functions

SOURCE = "def clamp(x, low, high):\n    if x > low:\n        return low\n    return min(x, high)"
GOLD = Edit("comparison", 2, ">", "<")
OK = "----------\nRan 8 tests\n\nOK"
RED = "----------\nRan 8 tests\n\nFAILED (failures=3)"


def play(habits: Habits, seed: int) -> tuple[list[tuple[str, list[str]]], bool]:
    """Let the expert work on SOURCE in a world that answers like the tools; returns its calls and whether it ended repaired."""
    (span,) = find_functions(SOURCE)
    expert = Expert(
        function="clamp", path="pkg/maths.py", gold=GOLD, candidates=candidate_edits(SOURCE, span), habits=habits, seed=seed, key="k"
    )
    text, undo, calls, observation = SOURCE, [], [], None
    for _ in range(60):
        name, args = expert.act(observation)
        calls.append((name, args))
        if name == "submit":
            break
        if name == "search":
            observation = "[2] pkg/other.py:9:    clamp(1)\n[4] pkg/maths.py:1:def clamp(x, low, high):"
        elif name == "edit":
            undo.append(text)
            try:
                text = apply_edit(text, Edit("", int(args[2]), args[1], args[3]))
                observation = "ok"
            except Exception:
                undo.pop()
                observation = "error: OLD not found"
        elif name == "undo":
            text = undo.pop()
            observation = "ok"
        elif name == "test":
            observation = OK if text == apply_edit(SOURCE, GOLD) else RED
        else:
            observation = "..."
    return calls, text == apply_edit(SOURCE, GOLD)


def test_a_careful_expert_repairs_and_submits_on_green() -> None:
    for seed in range(20):
        calls, repaired = play(Habits(skip_test=0, submit_red=0, forget_undo=0), seed)
        assert repaired
        assert calls[-1][0] == "submit"
        assert calls[-2][0] == "test"
        assert calls[0][0] in ("search", "list")
        assert ("read", ["4", "1"]) in calls


def test_it_never_tries_a_wrong_edit_twice() -> None:
    for seed in range(20):
        calls, _ = play(Habits(right=0.1, skip_test=0, submit_red=0, forget_undo=0), seed)
        edits = [tuple(args) for name, args in calls if name == "edit" and tuple(args[1:]) != (">", "2", "<")]
        assert len(edits) == len(set(edits))


def test_habits_show_and_choices_are_keyed() -> None:
    careless = [play(Habits(right=0, submit_red=1, skip_test=0), seed) for seed in range(10)]
    assert not any(repaired for _, repaired in careless)
    assert all(len([c for c in calls if c[0] == "test"]) == 1 for calls, _ in careless)
    untested = [play(Habits(skip_test=1), seed)[0] for seed in range(10)]
    assert not any(name == "test" for calls in untested for name, _ in calls)
    assert play(Habits(), 3) == play(Habits(), 3)
    assert len({str(play(Habits(), seed)) for seed in range(12)}) > 3


def rewritten(rename: float, drop: float = 0.0) -> tuple[str, Document]:
    from base_kit import own_modules
    from tokenizers import Tokenizer

    from strop.agent.compact import content_tokenizer
    from strop.midtrain.base.build import TEXT_KINDS, TextCollector
    from strop.midtrain.base.documents import DocumentMaker
    from strop.midtrain.base.tokenizer import train_tokenizer
    from strop.midtrain.trajectories import rewrite_episode

    collector = TextCollector()
    maker = DocumentMaker(own_modules(), collector, seed=5)  # type: ignore[arg-type]
    for index in range(300):
        maker.make(index, TEXT_KINDS[index % len(TEXT_KINDS)])
    tokenizer: Tokenizer = content_tokenizer(train_tokenizer(collector.texts, 2048))

    def turn(call: str, observation: str, **arguments: str) -> Turn:
        return Turn(trace=0, start=0, end=1, call=call, arguments=arguments, text="", observation=observation, status="ok")

    episode = Episode(
        key=EpisodeKey(phase="midtrain", step=0, task_id="t", sample=0),
        traces=(),
        turns=(
            turn("search", "[4] pkg/maths.py:1:def clamp(x, low, high):", pattern="def clamp"),
            turn("edit", "ok\n3|        return high", file="4", old="low", line="3", new="high"),
            turn("undo", "ok\n3|        return low"),
            turn("edit", "ok\n2|    if x < low:", file="4", old=">", line="2", new="<"),
            turn("submit", ""),
        ),
        stop_reason="submitted",
    )
    task = Task(
        task_id="t",
        instruction="The tests fail: clamp(1) != 2, see clamped",
        workspace="",
        tools=("list", "submit"),
        verifier="",
        split="train",
    )
    document = rewrite_episode(
        episode,
        task,
        GOLD,
        function="clamp",
        tokenizer=tokenizer,
        names=NameMaker(["get_cell", "wrap_text"]),
        rng=np.random.default_rng(1),
        rename=rename,
        drop_system_prompt=drop,
    )
    return tokenizer.decode(document.token_ids.tolist(), skip_special_tokens=False), document


def test_rewriting_renames_everywhere_and_masks_wrong_edits() -> None:
    plain, document = rewritten(rename=0.0)
    assert plain.startswith("<|bos|><|system|>Tools: list, submit<|end|><|user|>The tests fail: clamp(1)")
    assert plain.endswith("<|call|>submit<|end|>")
    learned = document.weights > 0
    assert not learned[~document.is_action].any()
    # Tool name and the four arguments of the wrong edit: only the name is learned.
    assert 0 < (document.is_action & ~learned).sum() < 12
    renamed, _ = rewritten(rename=1.0)
    assert "clamp(" not in renamed
    assert "see clamped" in renamed
    assert "<|system|>" not in rewritten(rename=0.0, drop=1.0)[0]


def test_a_document_is_a_valid_sample() -> None:
    _, document = rewritten(rename=0.0)
    sample = as_sample(document, EpisodeKey(phase="midtrain", step=0, task_id="d", sample=0))
    assert np.array_equal(sample.advantage, document.weights)
    assert not sample.trace.loss_mask[0]


@given(st.lists(st.integers(5, 400), min_size=1, max_size=80), st.integers(50, 2000), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_every_document_is_used_once_an_epoch(lengths: list[int], budget: int, epochs: int) -> None:
    documents = [Document(np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.bool_)) for n in lengths]
    plan = batches(documents, batch_tokens=budget, epochs=epochs, rng=np.random.default_rng(0))
    used = sorted(index for step in plan for index in step)
    assert used == sorted(list(range(len(lengths))) * epochs)
    assert all(sum(lengths[i] for i in step[:-1]) < budget for step in plan)
