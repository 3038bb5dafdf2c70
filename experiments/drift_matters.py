"""Do silent faults matter? RL with one planted fault, without the guard and with it.

Without the guard (``numerics.mode = "off"``) the run ends and its loss looks like any other; held-out success says what it cost. With it
the run stops and names the culprit. From the same mid-trained weights, three seeds:

- ``clean``: nothing planted;
- ``stale``: the engine takes every fourth weights only and says that it has them all;
- ``low``: the rollout's experts compute in four bits, the trainer's don't;
- ``flip``: one bit of one optimizer moment flips between two steps.

    python experiments/drift_matters.py --mid runs/main-learning/seed-0/... --seeds 0 1 2   (about 2 hours on two cores; resumable)
    python experiments/drift_matters.py --seeds 0 1 2 --report                               (only reads the runs that are there)
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.store import RunDir
from strop.store.files import write_atomic
from strop.ui.results import RESULTS_DIR, write_result
from strop.ui.svg import Series, line_chart

RECIPE = "recipes/quickstart.toml"
COMMAND = "python experiments/drift_matters.py --mid CHECKPOINT --seeds {seeds}"
FAULTS = ("clean", "stale", "low", "flip")
FLIP_STEP, FLIP_BIT, FLIP_TENSOR = 8, 27, "model.norm.weight"
STALE_EVERY = 4
STOPPED = "stopped.json"
COLORS = {"clean": "#2a7", "stale": "#c60", "low": "#06c", "flip": "#a2a"}


# ---------------------------------------------------------------------------------------------------- one run, in its own process


def plant(fault: str) -> None:
    """Break this process in the way of ``fault``."""
    if fault == "stale":
        _plant_stale()
    elif fault == "flip":
        _plant_flip()


def _plant_stale() -> None:
    from strop.rl import loop

    swap = loop._swap

    async def late(engine: Any, trainer: Any, version: int) -> float:
        if version % STALE_EVERY == 0:
            return await swap(engine, trainer, version)
        engine.version = version
        return 0.0

    loop._swap = late


def _plant_flip() -> None:
    import torch

    from strop.rl.trainer import PolicyTrainer

    step = PolicyTrainer.step

    def flipping(self: PolicyTrainer, batch: Any) -> Any:
        update = step(self, batch)
        if batch.step == FLIP_STEP:
            moment = self.optimizer.first[FLIP_TENSOR].view(-1)
            moment.view(torch.int32)[int(moment.abs().argmax())] ^= 1 << FLIP_BIT
        return update

    PolicyTrainer.step = flipping  # type: ignore[method-assign]


def overrides(fault: str, guarded: bool, seed: int, mid: str, steps: int) -> list[str]:
    """Keys of one run. Low precision can't be exact, so its guarded run is a tolerant one."""
    mode = ("tolerant" if fault == "low" else "exact") if guarded else "off"
    found = [f"seed={seed}", f"model.base={mid}", f"rl.steps={steps}", f'numerics.mode="{mode}"', "midtrain.enabled=false"]
    found += ["eval.baselines=false", "eval.hard_tasks=0"]
    return found + (['numerics.precision=["experts=nvfp4"]'] if fault == "low" else [])


def child(arguments: argparse.Namespace) -> None:
    """Run one cell and note how it ended."""
    from strop.cli.run import run_recipe
    from strop.core.errors import NumericsError

    out = Path(arguments.child)
    fault, guarded = arguments.fault, arguments.guarded
    plant(fault)
    keys = overrides(fault, guarded, arguments.seeds[0], arguments.mid, arguments.steps)
    try:
        run_recipe(Path(RECIPE), keys, out, resume=True, clean=False, dry_run=False, plain=True)
    except NumericsError as error:
        write_atomic(out / STOPPED, json.dumps({"message": str(error)}).encode())


def run_all(root: Path, arguments: argparse.Namespace) -> None:
    """Every cell that isn't there yet. A clean run with the guard is the proof that it stays silent."""
    for seed in arguments.seeds:
        for fault in FAULTS:
            for guarded in (False, True):
                out = cell(root, fault, guarded, seed)
                if (out / "report.html").exists() or (out / STOPPED).exists():
                    continue
                command = [sys.executable, __file__, "--child", str(out), "--fault", fault, "--mid", arguments.mid]
                command += ["--seeds", str(seed), "--steps", str(arguments.steps), *(["--guarded"] if guarded else [])]
                subprocess.run(command, check=True)


def cell(root: Path, fault: str, guarded: bool, seed: int) -> Path:
    """Directory of one run."""
    return root / f"{fault}-{'guarded' if guarded else 'off'}-{seed}"


# ---------------------------------------------------------------------------------------------------- report


def read(out: Path) -> dict[str, Any]:
    """What one run says: success after RL, losses, rewards, and how it was stopped."""
    with RunDir.open(out) as run:
        rows = {row["policy"]: row["success_frac"] for row in run.store.fact("evaluations", [])}
        metrics = run.store.metrics(phase="rl")
    stopped = json.loads((out / STOPPED).read_text())["message"] if (out / STOPPED).exists() else ""
    return {
        "success": rows.get("rl"),
        "before": rows.get("mid"),
        "steps": len(metrics),
        "loss": [record["rl/loss"] for record in metrics if "rl/loss" in record],
        "reward": [record.get("rl/reward", math.nan) for record in metrics],
        "stopped": stopped,
    }


NAMES = {"stale": "holds other weights", "low": "equal weights, but engine and trainer compute", "flip": f"optimizer/first/{FLIP_TENSOR}"}
DUE = {"stale": 2, "low": 1, "flip": FLIP_STEP + 2}
"""Steps that may be committed before the guard must have stopped the run: within one step of the fault."""


def report(root: Path, seeds: Sequence[int]) -> None:
    """Write the bar and its plots."""
    found = {f"{f}-{'guarded' if g else 'off'}-{s}": read(cell(root, f, g, s)) for f in FAULTS for g in (False, True) for s in seeds}
    stopped = named = worse = 0
    drops = []
    for fault in FAULTS[1:]:
        for seed in seeds:
            guarded, off = found[f"{fault}-guarded-{seed}"], found[f"{fault}-off-{seed}"]
            stopped += bool(guarded["stopped"]) and guarded["steps"] <= DUE[fault]
            named += NAMES[fault] in guarded["stopped"]
            drop = found[f"clean-off-{seed}"]["success"] - off["success"]
            drops.append(drop)
            worse += drop > 0
    silent = sum(not found[f"clean-guarded-{seed}"]["stopped"] for seed in seeds)
    total = len(seeds) * (len(FAULTS) - 1)
    for name, label, percent in (("loss", "policy loss", False), ("reward", "mean reward of the step", True)):
        chart = line_chart(
            [
                Series(f"{fault}, seed {seed}", list(enumerate(found[f"{fault}-off-{seed}"][name])), color=COLORS[fault], dashed=seed > 0)
                for fault in FAULTS
                for seed in seeds
            ],
            x_label="step",
            y_label=f"{label} without the guard",
            percent=percent,
        )
        write_atomic(RESULTS_DIR / f"drift-matters-{name}.svg", chart.encode())
    write_result(
        "drift-matters",
        bar="silent faults in RL, without the guard and with it",
        goal="without: ends with a worse model; with: stops within one step or epoch and names the culprit; three seeds",
        figure=f"{stopped} of {total} stopped in time, {named} named, {worse} of {total} worse without",
        met=stopped == named == worse == total and silent == len(seeds) and len(seeds) >= 3,
        command=COMMAND.format(seeds=" ".join(map(str, seeds))),
        seeds=seeds,
        notes=f"Held-out success lost without the guard, by fault and seed: {', '.join(f'{100 * drop:.1f}' for drop in drops)} points. "
        f"{silent} of {len(seeds)} clean runs passed the guard. Plots: drift-matters-loss.svg, drift-matters-reward.svg.",
        details=found,
    )


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mid", default="", help="directory of the mid-trained checkpoint to start from")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--root", type=Path, default=Path("runs/drift-matters"))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--guarded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    if not arguments.report:
        if not arguments.mid:
            parser.error("--mid is needed, for example the published 'mid' of a finished quickstart")
        run_all(arguments.root, arguments)
    report(arguments.root, arguments.seeds)


if __name__ == "__main__":
    main()
