"""Random search as a baseline: it tries what the pool's bugs are made of, and nothing that the recipe leaves out."""

from __future__ import annotations

from collections import Counter

import pytest

from strop.core.episode import EpisodeKey
from strop.runtime.blind import kind_weights, random_edits
from strop.tasks.mutation import IDENTIFIER_KINDS
from strop.tasks.pool import BUILTIN, RepairPool, open_pool


@pytest.fixture(scope="module", params=[(), IDENTIFIER_KINDS], ids=["all kinds", "without identifiers"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RepairPool:
    return open_pool(BUILTIN, tmp_path_factory.mktemp("cache"), exclude_kinds=request.param)


@pytest.mark.parametrize("by_kind", [False, True])
def test_it_tries_every_edit_of_the_kinds_that_occur_and_no_other(pool: RepairPool, by_kind: bool) -> None:
    known = {task.provenance["kind"] for task in pool.tasks("train")}
    for task in pool.tasks("heldout")[:12]:
        key = EpisodeKey(phase="eval.random", step=0, task_id=task.task_id, sample=0)
        search = random_edits(pool, task, key, seed=0, by_kind=by_kind)
        tried = []
        observation = ""
        while (call := search.act(observation))[0] != "submit":
            if call[0] == "edit":
                tried.append(tuple(call[1][1:]))
            observation = "FAILED"
        wanted = [(edit.old, str(edit.line), edit.new) for edit in pool.candidates(task) if edit.kind in known]
        gold = pool.gold_edit(task)
        assert Counter(tried) == Counter(wanted)
        assert (gold.old, str(gold.line), gold.new) in tried


def test_kinds_are_drawn_as_often_as_they_occur() -> None:
    assert kind_weights(["a", "a", "b"], {"a": 6, "b": 1}) == [3.0, 3.0, 1.0]
