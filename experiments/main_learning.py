"""Does the quickstart really learn? Runs it with several seeds, and a control with permuted rewards, and writes the learning bars.

python experiments/main_learning.py --seeds 0 1 2 --jobs 2   (about 10 minutes a seed on two cores; resumable)
python experiments/main_learning.py --seeds 0 1 2 --report   (only reads the runs that are there)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from strop.numerics.stats import Interval, best_of_k, mean_interval, paired_interval
from strop.store import RunDir, Store
from strop.ui.results import write_result

RECIPE = "recipes/quickstart.toml"
MIN_SEEDS = 3
"""Fewer don't meet a bar, whatever their figures."""
COMMAND = "python experiments/main_learning.py --seeds {seeds}"


def run(out: Path, *overrides: str) -> None:
    """Run the recipe into ``out``, continuing what is there."""
    strop = str(Path(sys.executable).with_name("strop"))
    sets = [part for override in overrides for part in ("--set", override)]
    subprocess.run([strop, "run", RECIPE, "--out", str(out), "--resume", *sets], check=True)


def run_seed(root: Path, seed: int, *overrides: str) -> None:
    """Run one seed."""
    run(root / f"seed-{seed}", f"seed={seed}", *overrides)


def run_control(root: Path, seed: int, *overrides: str) -> None:
    """Run the control of a finished seed: the same mid-trained weights and tasks, rewards permuted within each group."""
    with RunDir.open(root / f"seed-{seed}") as finished:
        mid = finished.store.checkpoint_path("mid")
    run(
        root / f"control-{seed}",
        f"seed={seed}",
        f"model.base={mid}",
        "midtrain.enabled=false",
        "eval.baselines=false",
        "rl.permute_rewards=true",
        "eval.hard_tasks=0",
        *overrides,
    )


class Successes:
    """Success by task of every evaluation of several runs, put together.

    Args:
        stores: One store a seed.
    """

    def __init__(self, stores: list[Store]) -> None:
        self._stores = stores

    def by_task(self, name: str, value: Callable[[list[float]], float]) -> tuple[list[float], list[str], list[str]]:
        """Return values, clusters and keys (seed and task), in a fixed order."""
        values, clusters, keys = [], [], []
        for number, store in enumerate(self._stores):
            fact: Mapping[str, Any] = store.fact(f"success.{name}")
            for task in sorted(fact["tasks"], key=lambda item: item["task_id"]):
                values.append(value(task["successes"]))
                clusters.append(task["cluster"])
                keys.append(f"{number}/{task['task_id']}")
        return values, clusters, keys

    def mean(self, name: str) -> Interval:
        """Mean success, interval clustered by function over all seeds."""
        values, clusters, _ = self.by_task(name, np.mean)  # type: ignore[arg-type]
        return mean_interval(values, clusters)

    def gain(self, before: str, after: str, other: Successes | None = None, *, value: Callable[[list[float]], float] = np.mean) -> Interval:  # type: ignore[assignment]
        """Paired difference after minus before on the same tasks of the same seeds."""
        first, clusters, keys = self.by_task(before, value)
        second, _, other_keys = (other or self).by_task(after, value)
        if keys != other_keys:
            raise SystemExit(f"{before} and {after} were measured on different tasks")
        return paired_interval(first, second, clusters)


def row_values(stores: list[Store], policy: str, key: str, fact: str = "evaluations") -> list[float]:
    """Return one figure of the result table for every seed."""
    return [next(row for row in store.fact(fact) if row["policy"] == policy)[key] for store in stores]


def report(root: Path, seeds: list[int]) -> None:
    """Write the bars from the runs in ``root``."""
    stores = [Store(root / f"seed-{seed}", read_only=True) for seed in seeds]
    found = Successes(stores)
    command = COMMAND.format(seeds=" ".join(map(str, seeds)))

    def write(name: str, bar: str, goal: str, interval: Interval, met: bool, **more: Any) -> None:
        ends = (round(interval.low, 4), round(interval.high, 4))
        met = met and enough
        write_result(
            f"main-{name}", bar=bar, goal=goal, figure=round(interval.mean, 4), interval=ends, met=met, command=command, seeds=seeds, **more
        )
        print(f"{bar}: {interval} (goal {goal}) {'met' if met else 'missed'}")

    mid, gain, over_random = found.mean("mid"), found.gain("mid", "rl"), found.gain("random_edits", "rl")
    enough = len(seeds) >= MIN_SEEDS
    table = {
        name: str(found.mean(name)) for name in ("unchanged", "random_edits", "expert", "base", "mid", "rl", "mid.nosystem", "rl.nosystem")
    }
    write("success-mid", "held-out success after mid-training", ">= 0.15", mid, mid.mean >= 0.15, details=table)
    write("gain-rl", "gain of RL over mid-training", ">= 0.20, interval above 0.10", gain, gain.mean >= 0.2 and gain.low > 0.1)
    write(
        "gain-random",
        "success after RL above random valid edits at equal budget",
        ">= 0.10, interval above 0",
        over_random,
        over_random.mean >= 0.1 and over_random.low > 0,
    )
    eight = found.gain("mid", "rl", value=lambda values: best_of_k(values, min(8, len(values))))
    write("best-of-8", "gain of RL in best of 8", "> 0", eight, eight.mean > 0)
    kept = float(np.mean(row_values(stores, "rl", "no_system_frac")) / max(np.mean(row_values(stores, "rl", "success_frac")), 1e-9))
    write_result(
        "main-no-system",
        bar="success without the system prompt, as a share of that with it",
        goal=">= 0.90",
        figure=round(kept, 4),
        met=kept >= 0.9 and enough,
        command=command,
        seeds=seeds,
    )
    first = float(np.mean(row_values(stores, "rl", "first_edit_right_frac")))
    chance = float(np.mean(row_values(stores, "random edits", "first_edit_right_frac", "baselines")))
    write_result(
        "main-first-edit",
        bar="first edit right after RL, against chance",
        goal=">= 3x",
        figure=round(first / max(chance, 1e-9), 3),
        unit="x",
        met=first >= 3 * chance and enough,
        command=command,
        seeds=seeds,
        details={"first_edit_right": first, "chance": chance, "mid": row_values(stores, "mid", "first_edit_right_frac")},
    )
    report_control(root, seeds, stores)


def report_control(root: Path, seeds: list[int], stores: list[Store]) -> None:
    """Write the bar of the controls that are finished, against the mid-trained models of the same seeds."""
    controls: dict[int, Store] = {}
    for seed in seeds:
        if (root / f"control-{seed}" / "run.db").exists():
            store = Store(root / f"control-{seed}", read_only=True)
            if store.fact("success.rl") is not None:
                controls[seed] = store
    if not controls:
        return
    own = Successes([store for seed, store in zip(seeds, stores, strict=True) if seed in controls])
    gain = own.gain("mid", "rl", Successes([*controls.values()]))
    write_result(
        "main-control",
        bar="gain with permuted rewards",
        goal="within +-0.03",
        figure=round(gain.mean, 4),
        interval=(round(gain.low, 4), round(gain.high, 4)),
        met=abs(gain.mean) <= 0.03 and len(controls) >= MIN_SEEDS,
        command=COMMAND.format(seeds=" ".join(map(str, seeds))),
        seeds=[*controls],
    )
    print(f"gain with permuted rewards, seeds {[*controls]}: {gain}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/main-learning"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each if more than one")
    parser.add_argument("--report", action="store_true", help="only read the runs that are there")
    options = parser.parse_args()
    if not options.report:
        # Several at once share the cores; results don't depend on the number of threads.
        overrides = ["model.threads=1"] if options.jobs > 1 else []
        with ThreadPoolExecutor(options.jobs) as workers:
            # All seeds are started before the first control, so that a control never waits for one that hasn't begun.
            seeds = {seed: workers.submit(run_seed, options.out, seed, *overrides) for seed in options.seeds}
            controls = [
                workers.submit(lambda seed=seed, done=done: (done.result(), run_control(options.out, seed, *overrides)))
                for seed, done in seeds.items()
            ]
            for finished in [*seeds.values(), *controls]:
                finished.result()
    report(options.out, options.seeds)


if __name__ == "__main__":
    main()
