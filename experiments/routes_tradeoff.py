"""What router replay buys and what it costs: modes by updates per rollout by rollout precision, on two narrow models.

    python experiments/routes_tradeoff.py --jobs 2            (432 runs, 10 to 40 s of one core each; resumable)
    python experiments/routes_tradeoff.py --small             (eight short runs that show that it works; writes only into --out)
    python experiments/routes_tradeoff.py --report            (only reads the runs that are there)

Writes ``docs/results/routes-tradeoff.json``, the table ``routes-tradeoff.md`` and the figure ``routes-tradeoff.svg`` beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from routes_bed import MODES, Cell, Scale, config_of, run_cell
from routes_figure import figure

from strop.numerics.stats import Interval, mean_interval
from strop.rl.replay import choose_mode
from strop.store.files import write_atomic
from strop.ui.results import RESULTS_DIR, write_result
from strop.ui.view import format_seconds

LAYERS, PRECISIONS, UPDATES = (4, 24), ("fp32", "bf16", "int8"), (1, 2, 4, 8)
FIGURES = {
    "k3": "k3, nats",
    "p99": "p99, nats",
    "suppressed": "suppressed",
    "tax": "tax, nats",
    "reward": "reward",
    "gain": "reward less off",
}
MIN_SEEDS = 3
NAME = "routes-tradeoff"
SMALL = Scale(steps=4, groups=8, group_size=4, warm_steps=16, eval_tasks=64)

Place = tuple[int, str, int, str]
"""Layers, precision, updates and mode: a cell without its seed."""


def grid(options: argparse.Namespace) -> list[Cell]:
    """Return the runs, all cells of a seed before the next seed, so that an interrupted grid is whole for some seeds."""
    places = itertools.product(options.seeds, options.layers, options.precisions, options.updates, options.modes)
    return [
        Cell(layers=layers, precision=precision, updates=updates, mode=mode, seed=seed) for seed, layers, precision, updates, mode in places
    ]


def path_of(folder: Path, cell: Cell) -> Path:
    """Return the file of a run."""
    return folder / "cells" / f"{cell.name}.json"


def stored(folder: Path, cell: Cell, scale: Scale) -> dict[str, Any] | None:
    """Return the figures of a finished run of this scale, or ``None``."""
    try:
        record = json.loads(path_of(folder, cell).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record["figures"] if record.get("scale") == asdict(scale) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings back: what would be one is a figure here."""
    logger = logging.getLogger("strop")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def work(cell: Cell, scale: Scale, folder: Path) -> float:
    """Run a cell, keep its figures, and return its seconds."""
    with _quiet():
        figures = run_cell(cell, scale, folder / "warm")
    path = path_of(folder, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"cell": asdict(cell), "scale": asdict(scale), "figures": figures}) + "\n").encode())
    return figures["seconds"]


def run_all(cells: Sequence[Cell], scale: Scale, folder: Path, jobs: int) -> None:
    """Run what isn't there yet, with progress and the time left."""
    left = [cell for cell in cells if stored(folder, cell, scale) is None]
    print(f"{len(cells)} runs, {len(cells) - len(left)} of them done before")
    spent = dict.fromkeys({cell.layers for cell in cells}, (0, 0.0))
    began = time.perf_counter()
    for done, (cell, seconds) in enumerate(_finished(left, scale, folder, jobs), 1):
        count, total = spent[cell.layers]
        spent[cell.layers] = (count + 1, total + seconds)
        known = [total / count for count, total in spent.values() if count]
        rates = {layers: total / count if count else max(known) * layers / cell.layers for layers, (count, total) in spent.items()}
        todo = sum(rates[item.layers] for item in left) - sum(total for _, total in spent.values())
        ahead = format_seconds(max(todo, 0.0) / jobs)
        print(f"{done}/{len(left)} {cell.name}: {seconds:.1f} s; {format_seconds(time.perf_counter() - began)} so far, about {ahead} left")


def _finished(cells: Sequence[Cell], scale: Scale, folder: Path, jobs: int) -> Iterable[tuple[Cell, float]]:
    if jobs == 1:
        for cell in cells:
            yield cell, work(cell, scale, folder)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # before the workers import torch
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
        running = {workers.submit(work, cell, scale, folder): cell for cell in cells}
        for future in as_completed(running):
            yield running[future], future.result()


# ------------------------------------------------------------------------------------------------ report


def summarise(found: Mapping[Cell, Mapping[str, Any]]) -> dict[Place, dict[str, Interval]]:
    """Return mean and interval over seeds of every figure of every cell; ``gain`` is the reward less that of ``off``, seed by seed."""
    seeds: dict[Place, dict[int, dict[str, float]]] = {}
    for cell, figures in sorted(found.items()):
        values = {key: float(figures[key]) for key in FIGURES if key != "gain"}
        natural = found.get(replace(cell, mode="off"))
        if natural is not None:
            values["gain"] = values["reward"] - float(natural["reward"])
        seeds.setdefault((cell.layers, cell.precision, cell.updates, cell.mode), {})[cell.seed] = values
    table: dict[Place, dict[str, Interval]] = {}
    for place, by_seed in seeds.items():
        table[place] = {}
        for key in FIGURES:
            chosen = {seed: values[key] for seed, values in by_seed.items() if key in values}
            if chosen:
                table[place][key] = mean_interval(list(chosen.values()), [str(seed) for seed in chosen])
    return table


def auto_mode(place: Place) -> str:
    """Return the arm that ``auto`` would take before it has measured anything."""
    config = config_of(Cell(layers=place[0], precision=place[1], updates=place[2], mode="off", seed=0), Scale())
    numerics = config.numerics.model_copy(update={"replay_routes": "auto"})
    mode = choose_mode(numerics, config.rl).mode
    return "off" if mode == "verify" else mode


def recommendations(table: Mapping[Place, Mapping[str, Interval]]) -> list[dict[str, Any]]:
    """Return, for every depth, precision and number of updates, what ``auto`` takes, what was best, and the gain of each over ``off``."""
    rows = []
    for key, members in itertools.groupby(sorted(table), key=lambda place: place[:3]):
        modes = {place[3]: table[place] for place in members}
        best, auto = max(modes, key=lambda mode: modes[mode]["reward"].mean), auto_mode((*key, ""))
        row = {"layers": key[0], "precision": key[1], "updates": key[2], "auto": auto, "best": best}
        row |= {f"{name} reward": modes[mode]["reward"].mean for name, mode in (("auto", auto), ("best", best)) if mode in modes}
        row |= {f"{name} gain": _cell(modes[mode].get("gain")) for name, mode in (("auto", auto), ("best", best)) if mode in modes}
        rows.append(row)
    return rows


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.clusters < 2:
        return f"{interval.mean:.3g}"
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def markdown(table: Mapping[Place, Mapping[str, Interval]], rows: Sequence[Mapping[str, Any]], note: str) -> str:
    """Return the page with both tables."""
    lines = ["# What router replay buys and costs", "", "Generated by `python experiments/routes_tradeoff.py`; don't edit.", "", note, ""]
    lines += [f"![mismatch, price and reward by mode]({NAME}.svg)", ""]
    lines += ["| layers | rollout | updates | mode | " + " | ".join(FIGURES.values()) + " |", "|---|---|---|---|" + "---|" * len(FIGURES)]
    order = list(MODES)
    for place in sorted(table, key=lambda place: (place[0], PRECISIONS.index(place[1]), place[2], order.index(place[3]))):
        cells = [*map(str, place), *(_cell(table[place].get(key)) for key in FIGURES)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## What auto takes, and what was best", ""]
    lines += [
        "| layers | rollout | updates | auto | reward | less off | best | reward | less off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        keys = ("layers", "precision", "updates", "auto", "auto reward", "auto gain", "best", "best reward", "best gain")
        values = [row.get(key, "-") for key in keys]
        lines.append("| " + " | ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values) + " |")
    return "\n".join(lines) + "\n"


def report(cells: Sequence[Cell], scale: Scale, folder: Path, directory: Path, command: str) -> None:
    """Write result, table and figure from the runs that are there."""
    found = {cell: figures for cell in cells if (figures := stored(folder, cell, scale)) is not None}
    if not found:
        raise SystemExit(f"{folder} has no finished run of this scale")
    table = summarise(found)
    rows = recommendations(table)
    seeds = sorted({cell.seed for cell in found})
    places = {(cell.layers, cell.precision, cell.updates, cell.mode) for cell in cells}
    least = min(sum((c.layers, c.precision, c.updates, c.mode) == place for c in found) for place in places)
    is_whole = least >= MIN_SEEDS and len(places) == len(LAYERS) * len(PRECISIONS) * len(UPDATES) * len(MODES)
    stopped = {cell.name: figures["stopped"] for cell, figures in found.items() if figures["stopped"]}
    note = (
        f"{len(found)} of {len(cells)} runs, seeds {seeds}, {scale.steps} RL steps of {scale.groups * scale.group_size} episodes on a walk "
        "of at most three turns. k3 and p99 compare the rollout with the trainer before the step's first update, on the routes that train; "
        "suppressed and tax are means over steps; reward is the success of the final weights in fp32 on live routes. Intervals are 95 %, "
        "over seeds. fp32 rollouts run the trainer's own kernels, so that their mismatch is 0 without replay."
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / f"{NAME}.svg", figure(table).encode())
    write_atomic(directory / f"{NAME}.md", markdown(table, rows, note).encode())
    path = write_result(
        NAME,
        bar="what replay buys and costs, by mode, updates per rollout and rollout precision",
        goal=f"every cell with at least {MIN_SEEDS} seeds, as one figure and one table",
        figure=f"{len(table)} of {len(places)} cells, at least {least} seeds each",
        met=is_whole if is_whole or len(found) == len(cells) else None,
        command=command,
        seeds=seeds,
        notes=f"Table: routes-tradeoff.md, figure: routes-tradeoff.svg. {note}",
        details={
            "runs stopped by a check": stopped,
            "warnings about the record": sum(figures["warnings"] for figures in found.values()),
            "largest honest regret": {
                precision: max((f["regret_max"] for c, f in found.items() if c.precision == precision), default=0.0)
                for precision in sorted({cell.precision for cell in found})
            },
            "cells where auto is the best or its reward within the best's interval": _agreement(table, rows),
        },
        directory=directory,
    )
    print(f"{path}: {len(found)} of {len(cells)} runs")


def _agreement(table: Mapping[Place, Mapping[str, Interval]], rows: Sequence[Mapping[str, Any]]) -> str:
    judged = [row for row in rows if "auto reward" in row]
    fits = [
        row["auto"] == row["best"]
        or row["auto reward"] >= table[(row["layers"], row["precision"], row["updates"], row["best"])]["reward"].low
        for row in judged
    ]
    return f"{sum(fits)} of {len(judged)}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--updates", type=int, nargs="+", default=list(UPDATES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--out", type=Path, default=Path("runs/routes-tradeoff"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--small", action="store_true", help="eight short runs; the report goes into --out")
    parser.add_argument("--report", action="store_true", help="only read the runs that are there")
    options = parser.parse_args()
    scale, folder, directory = Scale(), options.out, RESULTS_DIR
    command = f"python experiments/routes_tradeoff.py --seeds {' '.join(map(str, options.seeds))}"
    if options.small:
        scale, folder = SMALL, options.out / "small"
        directory, command = folder, "python experiments/routes_tradeoff.py --small"
        options.seeds, options.layers, options.precisions = [0, 1], [4], ["bf16"]
        options.updates, options.modes = [1, 4], ["off", "r3"]
    cells = grid(options)
    if not options.report:
        run_all(cells, scale, folder, options.jobs)
    report(cells, scale, folder, directory, command)


if __name__ == "__main__":
    main()
