"""Comparing a replayed episode with its record: whatever differs is named, whichever field it is in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.outcome import Flag, Scored
from strop.runtime.replay import compare_episodes

TRACE = Trace(
    token_ids=np.array([2, 6, 7], np.int32),
    loss_mask=np.array([0, 1, 1], np.bool_),
    logprobs=np.array([0, -0.5, -0.25], np.float32),
    versions=(VersionSpan(start=0, end=3, version=4),),
)
RECORD = Episode(
    key=EpisodeKey(phase="rl", step=0, task_id="t", sample=0),
    traces=(TRACE,),
    turns=(),
    stop_reason="submitted",
    changes={"a.py": b"1", "b.py": None},
    outcome=Scored(reward=1.0),
)


def with_trace(**fields: object) -> Episode:
    return replace(RECORD, traces=(replace(TRACE, **fields),))


@pytest.mark.parametrize(
    ("actual", "difference"),
    [
        (RECORD, ""),
        (replace(RECORD, traces=(TRACE, TRACE)), "2 traces, the record has 1"),
        (with_trace(token_ids=np.array([2, 6, 8], np.int32)), "trace 0: token 2 is 8, the record has 7"),
        (with_trace(loss_mask=np.array([0, 0, 1], np.bool_)), "trace 0: loss mask 1 is False"),
        (with_trace(logprobs=np.nextafter(TRACE.logprobs, np.float32(9))), "trace 0: log-probability 0 is"),
        (with_trace(versions=(VersionSpan(start=0, end=3, version=5),)), "trace 0: version 0 is 5, the record has 4"),
        (replace(RECORD, stop_reason="max_turns"), "stop reason 'max_turns', the record has 'submitted'"),
        (replace(RECORD, changes={"a.py": b"2", "b.py": None}), "changed files a.py (1 bytes), b.py (deleted)"),
        (replace(RECORD, changes={"a.py": b"1", "b.py": b""}), "changed files a.py (1 bytes), b.py (0 bytes)"),
        (replace(RECORD, outcome=Scored(reward=0.0)), "outcome Scored(reward=0.0"),
        (replace(RECORD, outcome=Scored(reward=1.0, flags=(Flag(rule="r", severity="warn", evidence="e"),))), "outcome Scored(reward=1.0"),
    ],
)
def test_the_first_difference_is_named(actual: Episode, difference: str) -> None:
    assert compare_episodes(RECORD, actual).startswith(difference)
    assert bool(compare_episodes(RECORD, actual)) == bool(difference)
