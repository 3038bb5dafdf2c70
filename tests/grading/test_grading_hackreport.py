"""``strop hacks``: counts by rule and version, the order test, probes, evidence, and the auditor beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from endpoint import endpoint
from grading_world import BUGGY, TASK, WORDS, make_episode

from strop.cli import hacks
from strop.cli.models import pool_dir
from strop.core.config import GradingConfig, RunConfig
from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.errors import ConfigError
from strop.core.outcome import Failed, Flag, Scored
from strop.grading.hackreport import hack_report, policy_version
from strop.grading.quarantine import Action, Quarantine
from strop.grading.rules import TextChange, flag
from strop.store import RunDir


def parts(fixed: int, shuffled: int) -> dict[str, float]:
    return {
        "fixed_passed": fixed,
        "visible_passed": shuffled,
        "visible_total": 8,
        "hidden_passed": 0,
        "hidden_total": 18,
        "passed": 0,
        "total": 26,
    }


def episode(task: str, sample: int, version: int, outcome: Any, phase: str = "rl") -> Episode:
    ids = np.zeros(2, np.int32)
    trace = Trace(
        token_ids=ids,
        loss_mask=np.zeros(2, np.bool_),
        logprobs=np.zeros(2, np.float32),
        versions=(VersionSpan(start=0, end=2, version=version),),
    )
    key = EpisodeKey(phase=phase, step=version, task_id=task, sample=sample)
    return replace(make_episode({"textkit/words.py": WORDS.encode()}), key=key, traces=(trace,), outcome=outcome)


def played(fixed: int, shuffled: int, *flags: Flag, reward: float = 0.0) -> Scored:
    return Scored(reward=reward, parts=parts(fixed, shuffled), reason="tests", flags=flags, layers=("isolated", "shuffled", "fixed_order"))


def run_of_a_learning_cheat() -> list[Episode]:
    """Version 0 is honest; version 1 has learned the order of the tests on most of twenty tasks."""
    found = [episode(f"t{n}", s, 0, played(8, 8, reward=1.0)) for n in range(20) for s in range(2)]
    found += [
        episode(f"t{n}", s, 1, played(8, 0 if n < 15 else 8, *([flag("order_counter", "COUNT += 1")] if n < 15 else [])))
        for n in range(20)
        for s in range(2)
    ]
    return [*found, episode("t0", 9, 1, Failed(error="X"))]


def test_the_order_test_sees_what_fell_and_when() -> None:
    report = hack_report(run_of_a_learning_cheat(), Quarantine())
    first, second = report.versions
    assert (first.policy, first.episodes, second.policy, second.episodes) == ("rl v0", 40, "rl v1", 40)
    assert first.gap is not None
    assert second.gap is not None
    assert (first.gap.mean, first.gap.low, first.gap.high, first.hacks.mean) == (0.0, 0.0, 0.0, 0.0)
    assert (second.fixed, second.shuffled, second.gap.mean) == (1.0, 0.25, 0.75)
    assert 0.4 < second.gap.low < 0.75 < second.gap.high <= 1.0
    assert second.gap.clusters == 20
    assert (second.hacks.mean, second.left_out) == (0.75, 30)
    (row,) = report.rules
    assert (row.rule, row.severity, row.episodes, row.rewarded, row.tasks, row.versions, row.action) == (
        "order_counter", "hack", 30, 0, 15, (1, 1), Action.DROP,
    )  # fmt: skip
    assert len(report.findings) == 30
    assert report.findings[0].flags[0].evidence == "COUNT += 1"


def test_probes_have_rates_by_version() -> None:
    found = [episode(f"t{n}!impossible", 0, 2, played(8, 8, *([flag("impossible", "8 of 8")] if n == 0 else []))) for n in range(4)]
    found += [episode(f"t{n}!honeypot", 0, 2, played(8, 8)) for n in range(5)]
    (row,) = hack_report(found, Quarantine()).versions
    assert row.impossible is not None
    assert row.honeypot is not None
    assert (row.impossible.mean, row.honeypot.mean) == (0.25, 0.0)
    assert 0 < row.honeypot.high < 0.5
    assert row.gap is None, "probes are no part of the order test"


def test_info_is_counted_but_no_finding() -> None:
    report = hack_report([episode("t", 0, 0, played(8, 8, flag("dropped", "notes.md")))], Quarantine())
    assert [row.rule for row in report.rules] == ["dropped"]
    assert report.findings == ()
    assert policy_version(make_episode({})) == 0


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    config = RunConfig(grading=GradingConfig(penalise=["order_counter"]))
    with RunDir.create(tmp_path / "run", config) as run:
        for item in run_of_a_learning_cheat():
            run.store.put_episode(item)
        run.store.commit_step(0, phase="rl")
    return tmp_path / "run"


OPTIONS: dict[str, Any] = {"rule": None, "phase": None, "contrast": False, "limit": 2, "as_json": False, "audit": None}


def test_the_command_shows_counts_and_evidence(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hacks.show_hacks(run_path, **OPTIONS) == 0
    text = capsys.readouterr().out
    for word in ("order_counter", "penalise", "rl v1", "0.750 [", "hack order_counter: COUNT += 1", "30 flagged episodes (2 shown"):
        assert word in text
    assert hacks.show_hacks(run_path, **{**OPTIONS, "rule": "network"}) == 0
    assert "0 flagged episodes" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"unknown rule 'netwrk'.*network"):
        hacks.show_hacks(run_path, **{**OPTIONS, "rule": "netwrk"})


def test_json_is_complete(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hacks.show_hacks(run_path, **{**OPTIONS, "as_json": True})
    data = json.loads(capsys.readouterr().out)
    assert len(data["findings"]) == 30
    assert data["versions"][1]["gap"]["mean"] == 0.75
    assert data["rules"][0]["action"] == "penalise"


def test_the_auditor_is_asked_and_kept(run_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(config: RunConfig, folder: Path) -> SimpleNamespace:
        assert folder == pool_dir("builtin:repair")
        return SimpleNamespace(find=lambda task_id: None if task_id == "t3" else TASK)

    monkeypatch.setattr("strop.runtime.tasks.open_tasks", opened)
    monkeypatch.setattr(hacks, "_sources", lambda tasks, episode: [TextChange("textkit/words.py", BUGGY, WORDS)])
    answers = iter(
        [
            '{"hack": true, "kind": "skip", "evidence": "if number % 100 not in (11, 12, 13):"}',
            "gibberish",
            '{"hack": true, "evidence": "os._exit(0)"}',
        ]
    )
    with endpoint(lambda body: next(answers, '{"hack": false}')) as (url, seen):
        assert hacks.show_hacks(run_path, **{**OPTIONS, "audit": (url, "judge", 10)}) == 0
    text = capsys.readouterr().out
    assert (
        f"auditor: {len(seen)} episodes read, 1 called hacks, 1 claims without a true quote, 1 answers unreadable, {7 * len(seen)} tokens"
        in text
    )
    lines = [json.loads(line) for line in (run_path / hacks.AUDIT_FILE).read_text().splitlines()]
    assert len(lines) == len(seen) <= 10
    assert sum("unread" in line for line in lines) == 1
