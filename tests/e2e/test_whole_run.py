"""The whole pipeline, small: base to report in a real process, killed, resumed and replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.store import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = [
    "midtrain.episodes=12",
    "rl.steps=3",
    "rl.groups=2",
    "rl.group_size=4",
    "eval.tasks=2",
    "eval.samples=2",
    "eval.hard_tasks=0",
    "eval.baselines=false",
]


def command(out: Path, *extra: str) -> list[str]:
    sets = [part for item in SMALL for part in ("--set", item)]
    return [str(Path(sys.executable).with_name("strop")), "run", "recipes/minute.toml", "--out", str(out), *sets, *extra]


def run(out: Path, *extra: str) -> None:
    done = subprocess.run(command(out, *extra), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def outcome(out: Path) -> dict[str, object]:
    with RunDir.open(out) as record:
        store = record.store
        rl = [(c.step, c.facts["weights_digest"]) for c in store.commits(phase="rl")]
        certificate = json.loads((out / "certificate.json").read_text(encoding="utf-8"))
        return {"rl": rl, "stage": store.stage(), "counts": store.counts(), "tensors": certificate["body"]["tensors"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run(out)
    return out


def test_a_run_ends_with_a_report_a_certificate_and_an_exact_rollout(undisturbed: Path) -> None:
    result = outcome(undisturbed)
    assert result["stage"] == "report"
    assert len(result["rl"]) == 3  # type: ignore[arg-type]
    assert "<svg" in (undisturbed / "report.html").read_text(encoding="utf-8")
    with RunDir.open(undisturbed) as record:
        assert record.store.fact("certificate")["canary largest difference"] == 0
        assert [row["policy"] for row in record.store.fact("evaluations")] == ["base", "mid", "rl"]
        for metrics in record.store.metrics(phase="rl"):
            assert metrics.get("numerics/logprob_diff_max_nats", 0.0) == 0.0


def test_killed_anywhere_and_resumed_it_ends_in_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    for seconds in (4.0, 9.0, 15.0, 22.0):
        process = subprocess.Popen(command(out, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.2)
    run(out, "--resume")
    assert outcome(out) == outcome(undisturbed)


def test_a_replay_reproduces_every_token_reward_and_digest(undisturbed: Path) -> None:
    strop = str(Path(sys.executable).with_name("strop"))
    done = subprocess.run([strop, "replay", str(undisturbed)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "identical" in done.stdout
