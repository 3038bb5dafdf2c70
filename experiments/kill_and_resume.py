"""Kill -9 a recipe at random moments, resume it, and compare what it ends in with an undisturbed run, bit for bit.

    python experiments/kill_and_resume.py                 (20 kills over several runs of recipes/minute.toml: about 20 minutes on two cores)
    python experiments/kill_and_resume.py --kills 5 --set rl.steps=2

Each run is killed a few times, every time after a random share of the undisturbed run's duration, and then resumed to its end. It must have
the same weights after every step, the same state of the optimizer, every episode once and with the same tokens and verdict, every step's
metrics and commit point once, and the same balance of dispatched, trained, dropped and failed episodes. Writes
docs/results/main-kill-resume.json; exit code 1 if the bar is missed. Runs of an interrupted experiment are not continued.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strop.core.episode import Episode
from strop.core.errors import StropError
from strop.core.random import generator
from strop.numerics.certificate import NAME
from strop.store import RunDir
from strop.ui.results import write_result

RECIPE = "recipes/minute.toml"
TIMEOUT_S = 1800.0


@dataclass(slots=True)
class Trial:
    """One run that was killed and resumed.

    Attributes:
        killed_at: What was going on at each kill: the last stage that was done and the last step of RL.
        differences: How its end differs from the undisturbed run's.
    """

    killed_at: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def command(out: Path, overrides: Sequence[str], *extra: str) -> list[str]:
    """Command line of a run."""
    sets = [part for item in overrides for part in ("--set", item)]
    return [str(Path(sys.executable).with_name("strop")), "run", RECIPE, "--out", str(out), "--plain", *sets, *extra]


def finish(out: Path, overrides: Sequence[str], *extra: str) -> float:
    """Run to the end and return the seconds.

    Raises:
        SystemExit: The run failed.
    """
    began = time.perf_counter()
    done = subprocess.run(command(out, overrides, *extra), capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"the run in {out} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return time.perf_counter() - began


def kill_after(out: Path, overrides: Sequence[str], seconds: float) -> bool:
    """Start or continue a run and kill it after so many seconds; returns whether it was still running then."""
    process = subprocess.Popen(command(out, overrides, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return True
    if process.returncode:
        raise SystemExit(f"the run in {out} ended by itself with {process.returncode}")
    return False


def place(out: Path) -> str:
    """Say how far a run had come."""
    try:
        with RunDir.open(out) as run:
            commit = run.store.last_step("rl")
            return f"after {run.store.stage() or 'nothing'}" + (f", RL step {commit.step}" if commit else "")
    except StropError:
        return "before its first commit point"


# ------------------------------------------------------------------------------------------------ what must be the same


def episode_digest(episode: Episode) -> str:
    """Digest of what happened in an episode: tokens, masks, log-probabilities, routes, changes, verdict. No times."""
    digest = hashlib.blake2b(digest_size=16)
    for trace in episode.traces:
        arrays = [trace.token_ids, trace.loss_mask, trace.logprobs]
        arrays += [trace.routes.expert_ids, trace.routes.valid] if trace.routes is not None else []
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr(trace.versions).encode())
    digest.update(repr((episode.stop_reason, sorted(episode.changes.items()), episode.outcome)).encode())
    return digest.hexdigest()


def fingerprint(out: Path) -> dict[str, Any]:
    """Everything of a finished run that a kill must not change, by name."""
    with RunDir.open(out) as run:
        store = run.store
        found: dict[str, Any] = {f"episode {episode.key}": episode_digest(episode) for episode in store.episodes()}
        found |= {f"number of episodes of {phase}": count for phase, count in store.counts().items()}
        for commit in store.commits():
            name = f"commit point {commit.phase} {commit.stage or commit.step}"
            facts = {key: value for key, value in commit.facts.items() if "digest" in key or key in ("conservation", "policy_version")}
            found[name] = [*found.get(name, []), facts]  # a second one would make the list longer
        lines = Counter((record["phase"], record["step"]) for record in store.metrics())
        found |= {f"metrics lines of {phase} step {step}": count for (phase, step), count in lines.items()}
        found |= {f"success {name}": store.fact(f"success.{name}") for name in ("base", "mid", "rl")}
    certificate = json.loads((out / NAME).read_text(encoding="utf-8"))["body"]
    return found | {f"tensor {name}": digest for name, digest in certificate["tensors"].items()}


def compare(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return what differs, by name."""
    names = sorted({*expected, *actual})
    return [
        f"{name} is {actual.get(name, 'missing')}, undisturbed {expected.get(name, 'missing')}"
        for name in names
        if name not in expected or name not in actual or expected[name] != actual[name]
    ]


# ------------------------------------------------------------------------------------------------ the experiment


def run_trials(root: Path, overrides: Sequence[str], *, kills: int, per_run: int, seed: int) -> tuple[list[Trial], float]:
    """Do the experiment; returns the trials and the seconds of the undisturbed run."""
    shutil.rmtree(root, ignore_errors=True)
    seconds = finish(root / "undisturbed", overrides)
    expected = fingerprint(root / "undisturbed")
    print(f"undisturbed: {seconds:.0f} s, {sum(name.startswith('episode') for name in expected)} episodes", flush=True)
    draw = generator("kill-and-resume", seed)
    trials: list[Trial] = []
    while sum(len(trial.killed_at) for trial in trials) < kills:
        trial, out = Trial(), root / f"killed-{len(trials)}"
        trials.append(trial)
        wanted = min(per_run, kills - sum(len(other.killed_at) for other in trials))
        while len(trial.killed_at) < wanted:
            if not kill_after(out, overrides, float(draw.uniform(0, seconds))):
                break
            trial.killed_at.append(place(out))
        finish(out, overrides, "--resume")
        trial.differences = compare(expected, fingerprint(out))
        print(f"{out.name}: killed {'; '.join(trial.killed_at) or 'never'}: {len(trial.differences)} differences", flush=True)
        for difference in trial.differences[:5]:
            print(f"  {difference}"[:300], flush=True)
    return trials, seconds


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=4, help="kills of one run before it is resumed to its end")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe; repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/kill-resume"))
    options = parser.parse_args()
    trials, seconds = run_trials(options.out, options.set, kills=options.kills, per_run=options.per_run, seed=options.seed)
    survived = sum(len(trial.killed_at) for trial in trials if not trial.differences)
    total = sum(len(trial.killed_at) for trial in trials)
    met = survived == total >= 20
    write_result(
        "main-kill-resume",
        bar="kill -9 anywhere, resume: same final digest as undisturbed, nothing lost or counted twice",
        goal="20 of 20 random kills",
        figure=f"{survived} of {total}",
        met=met,
        command=" ".join(["python experiments/kill_and_resume.py", f"--kills {options.kills}", *(f"--set {item}" for item in options.set)]),
        seeds=(options.seed,),
        notes="Kills of a run count as survived only if the run ended without any difference.",
        details={
            "runs": len(trials),
            "undisturbed seconds": round(seconds, 1),
            "killed": dict(Counter(moment for trial in trials for moment in trial.killed_at)),
            "differences": [difference for trial in trials for difference in trial.differences[:3]],
        },
    )
    print(f"{survived} of {total} kills survived: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
