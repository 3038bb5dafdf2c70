"""A run's routes recorded by command, and a second run that starts close to them: the whole way, small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.rl.anchor import FOLDER, load_record
from strop.store import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "midtrain.episodes=12",
    "rl.steps=2",
    "rl.groups=2",
    "rl.group_size=4",
    "eval.tasks=2",
    "eval.samples=2",
    "eval.hard_tasks=0",
    "eval.baselines=false",
]


def strop(*arguments: str, status: int = 0) -> str:
    """Run the command of this very source tree and return what it printed."""
    program = "import sys; from strop.cli.main import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=600, cwd=ROOT, env=environment
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout + done.stderr


def run(out: Path, *more: str) -> None:
    sets = [part for item in (*SMALL, *more) for part in ("--set", item)]
    strop("run", "recipes/minute.toml", "--out", str(out), *sets)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("anchor") / "good"
    run(out)
    assert "streams" in strop("routes", "record", str(out))
    return out


def test_a_record_holds_the_streams_of_both_phases(good: Path) -> None:
    record = load_record(good / FOLDER)
    with RunDir.open(good) as opened:
        episodes = len(opened.store.rows(phase="rl"))
    assert record.facts["rl_streams"] == episodes == 16
    assert record.facts["midtrain_streams"] > 0
    assert len(record.packs) == record.facts["midtrain_streams"] + record.facts["rl_streams"]
    assert record.counts.sum() == sum(pack.expert_ids.size for pack in record.packs)


def test_the_next_run_follows_the_record_hard_first_then_softly_and_says_so(good: Path, tmp_path: Path) -> None:
    out = tmp_path / "next"
    run(out, f"routes.anchor={good}", "routes.anchor_hard_steps=1", "routes.anchor_steps=2")
    with RunDir.open(out) as opened:
        mid = [record for record in opened.store.metrics(phase="midtrain") if "routes/anchor_weight" in record]
        rl = [record for record in opened.store.metrics(phase="rl") if "routes/anchor_weight" in record]
    assert mid[0]["routes/anchor_replayed_frac"] == 1.0  # the same seed makes the same documents
    assert all(not record.get("routes/anchor_replayed_frac") for record in mid[1:])
    assert 0 < mid[0]["routes/anchor_agree_frac"] <= 1
    assert [record["routes/anchor_weight"] for record in mid[:2]] == [0.1, 0.05][: len(mid)]
    assert all(record["routes/anchor_weight"] == 0 for record in mid[2:])
    assert rl[0]["routes/anchor_nats"] > 0
    assert all(record["routes/warnings"] == 0 and record["routes/origin_frac"] == 1 for record in rl)
    page = strop("routes", "report", str(out)).strip()
    assert "Agreement with the anchor" in Path(page).read_text(encoding="utf-8")


def test_without_a_record_the_run_is_refused_and_told_how_to_make_one(tmp_path: Path) -> None:
    sets = [part for item in (*SMALL, f"routes.anchor={tmp_path}") for part in ("--set", item)]
    told = strop("run", "recipes/minute.toml", "--out", str(tmp_path / "run"), *sets, status=1)
    assert "strop routes record" in told
