"""The promotion gate and the pointer, with planted faults for every reason to refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.config import PromotionConfig
from strop.core.errors import CheckpointError, StropError
from strop.production.pointer import CurrentPointer
from strop.production.promotion import Decision, Evaluation, TaskResult, decide, results_by_task

GATE = PromotionConfig()


def evaluation(name: str, rate: float, *, tasks: int = 64, seed: int = 0, settings: dict[str, str] | None = None) -> Evaluation:
    rng = np.random.default_rng(seed)
    results = tuple(
        TaskResult(task_id=f"t{i:03}", cluster=f"f{i // 2}", successes=tuple((rng.random(4) < rate).astype(float).tolist()))
        for i in range(tasks)
    )
    return Evaluation(name=name, tasks=results, settings=settings or {"temperature": "1.0"})


def test_a_clearly_better_model_is_promoted():
    decision = decide(evaluation("old", 0.2), evaluation("new", 0.6, seed=1), GATE)
    assert decision.promote
    assert decision.interval is not None
    assert decision.interval.clusters == 32
    assert 0.25 < decision.gain < 0.55
    assert "new is better than old: gain +0." in decision.reason


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (evaluation("old", 0.6), evaluation("new", 0.2, seed=1), "new is worse than old: gain -"),
        (evaluation("old", 0.5), evaluation("new", 0.5), r"does not gain more than 0 .*gain \+0\.000"),
        (evaluation("old", 0.5, tasks=24), evaluation("new", 0.56, tasks=24, seed=3), "not enough evidence|does not gain|worse"),
        (evaluation("old", 0.2, tasks=16), evaluation("new", 0.9, tasks=16), "8 independent clusters of tasks, at least 10"),
        (evaluation("old", 0.2), evaluation("new", 0.9, tasks=62), "only old has 't062', 't063'"),
        (evaluation("old", 0.2, tasks=50), evaluation("new", 0.9), r"only new has 't050', .* and 9 more"),
        (evaluation("old", 0.2), evaluation("new", 0.9, settings={"temperature": "0.5"}), "'temperature': old has '1.0', new has '0.5'"),
        (evaluation("old", 0.2), evaluation("new", 0.9, settings={"temperature": "1.0", "split": "x"}), "'split': old has None"),
        (Evaluation(name="old", tasks=()), Evaluation(name="new", tasks=()), "evaluated on no task"),
    ],
)
def test_everything_doubtful_is_refused_with_its_reason(old, new, match):
    decision = decide(old, new, GATE)
    assert not decision.promote
    with pytest.raises(AssertionError, match=match):
        raise AssertionError(decision.reason)


def altered(base: Evaluation, index: int, **changes) -> Evaluation:
    tasks = list(base.tasks)
    tasks[index] = dataclasses.replace(tasks[index], **changes)
    return dataclasses.replace(base, tasks=tuple(tasks))


def test_missing_verdicts_are_not_evidence():
    old, new = evaluation("old", 0.2), evaluation("new", 0.9, seed=1)
    decision = decide(old, altered(new, 5, successes=()), GATE)
    assert not decision.promote
    assert "no scored sample of 't005'" in decision.reason
    decision = decide(altered(old, 5, missing=20), new, GATE)
    assert not decision.promote
    assert "20 of 276 samples of old have no verdict, at most 5%" in decision.reason
    assert decide(altered(old, 5, missing=2), new, GATE).promote
    decision = decide(old, altered(new, 5, cluster="elsewhere"), GATE)
    assert "cluster of 't005' is not the same" in decision.reason
    assert math.isnan(decision.gain)


def test_a_small_gain_says_how_much_evidence_it_needs():
    old = evaluation("old", 0.5, tasks=40)
    tasks = tuple(
        dataclasses.replace(t, successes=(min(1.0, t.mean + 0.3),) if i % 3 == 0 else (max(0.0, t.mean - 0.1),))
        for i, t in enumerate(old.tasks)
    )
    decision = decide(old, dataclasses.replace(old, name="new", tasks=tasks), PromotionConfig(min_gain=0.001))
    assert not decision.promote
    assert "needs about" in decision.reason


def test_the_margin_counts():
    old, new = evaluation("old", 0.5), evaluation("new", 0.7, seed=1)
    assert decide(old, new, GATE).promote
    assert not decide(old, new, PromotionConfig(min_gain=0.3)).promote
    assert decide(old, dataclasses.replace(old, name="new"), PromotionConfig(min_gain=-0.02)).promote  # non-inferiority


@settings(max_examples=12, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_decisions_are_antisymmetric_and_independent_of_order(a, b, seed, random):
    one, two = evaluation("one", a, tasks=24, seed=seed), evaluation("two", b, tasks=24, seed=seed + 1)
    forward, backward = decide(one, two, GATE), decide(two, one, GATE)
    assert not (forward.promote and backward.promote)
    assert forward.gain == pytest.approx(-backward.gain)
    shuffled = list(one.tasks)
    random.shuffle(shuffled)
    assert decide(dataclasses.replace(one, tasks=tuple(shuffled)), two, GATE) == forward


def test_no_false_promotion_beyond_the_confidence():
    wrong = sum(decide(evaluation("old", 0.4, seed=s), evaluation("new", 0.4, seed=s + 5000), GATE).promote for s in range(60))
    assert wrong <= 6  # 2.5 % of 60 is 1.5


def test_evaluations_survive_a_file_and_damage_is_named(tmp_path):
    base = evaluation("old", 0.4)
    path = tmp_path / "eval.json"
    path.write_text(base.to_json())
    assert Evaluation.from_json(path) == base
    for text in ("{", "[]", '{"name": "x", "settings": {}, "tasks": [{"task_id": "a"}]}', '{"name": "x", "settings": {}, "tasks": 5}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"eval\.json' can't be read"):
            Evaluation.from_json(path)
    with pytest.raises(CheckpointError, match="missing"):
        Evaluation.from_json(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="twice"):
        Evaluation(name="x", tasks=(base.tasks[0], base.tasks[0]))
    with pytest.raises(ValueError, match=r"\[0, 1\], got 2"):
        TaskResult(task_id="a", cluster="b", successes=(2.0,))


def test_rows_are_collected_by_task():
    rows = [("b", "f", 1.0), ("a", "f", 0.0), ("b", "f", None), ("b", "f", 0.0)]
    assert results_by_task(rows) == (
        TaskResult(task_id="a", cluster="f", successes=(0.0,)),
        TaskResult(task_id="b", cluster="f", successes=(1.0, 0.0), missing=1),
    )
    with pytest.raises(StropError, match="'a' appears with the clusters"):
        results_by_task([("a", "f", 1.0), ("a", "g", 1.0)])


# ------------------------------------------------------------------------------------------------ the pointer

YES = Decision(promote=True, gain=0.1, interval=None, reason="better")
NO = Decision(promote=False, gain=-0.1, interval=None, reason="new is worse")


def test_promotion_and_rollback_keep_the_history(tmp_path):
    pointer = CurrentPointer(tmp_path / "deploy")
    assert pointer.current() is None
    with pytest.raises(StropError, match="nothing to roll back to"):
        pointer.rollback("x")
    pointer.promote("runs/a", None, digest="d1")
    with pytest.raises(StropError, match="without a decision"):
        pointer.promote("runs/b", None)
    with pytest.raises(StropError, match="refused by the promotion gate: new is worse"):
        pointer.promote("runs/b", NO)
    assert pointer.current().checkpoint == "runs/a"
    pointer.promote("runs/b", YES)
    pointer.promote("runs/c", YES)
    assert pointer.rollback("errors rose").checkpoint == "runs/b"
    assert pointer.rollback("still").checkpoint == "runs/a"
    with pytest.raises(StropError, match="nothing to roll back to"):
        pointer.rollback("again")
    pointer.promote("runs/d", YES)
    assert pointer.rollback("again").checkpoint == "runs/a"
    assert [(e.action, e.checkpoint) for e in CurrentPointer(tmp_path / "deploy").history()] == [
        ("promote", "runs/a"),
        ("promote", "runs/b"),
        ("promote", "runs/c"),
        ("rollback", "runs/b"),
        ("rollback", "runs/a"),
        ("promote", "runs/d"),
        ("rollback", "runs/a"),
    ]
    assert pointer.current().digest == "d1"
    assert json.loads(pointer.path.read_text())["current"] == "runs/a"


def test_a_crash_while_writing_leaves_the_old_pointer(tmp_path, monkeypatch):
    pointer = CurrentPointer(tmp_path)
    pointer.promote("runs/a", None)

    def crash(*_):
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", crash)
        with pytest.raises(OSError, match="power cut"):
            pointer.promote("runs/b", YES)
    assert pointer.current().checkpoint == "runs/a"
    pointer.promote("runs/b", YES)
    pointer.path.write_text('{"history": [{"checkpoint": 1}]}')
    with pytest.raises(CheckpointError, match=r"current\.json can't be read"):
        pointer.current()


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    CurrentPointer(tmp_path).promote("runs/first", None)
    threads = [threading.Thread(target=lambda i=i: CurrentPointer(tmp_path).promote(f"runs/{i}", YES)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {e.checkpoint for e in CurrentPointer(tmp_path).history()} == {"runs/first", *(f"runs/{i}" for i in range(8))}
