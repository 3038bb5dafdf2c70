"""What recording and replaying routes costs a step. ``python benchmarks/routes_overhead.py``

One process, the exact kernels and all checks of exact mode. A step without routes (an engine that keeps none, samples that have none,
replay off) and one with them (kept and vouched for by the engine, r3) take turns; each is the rollout of a batch and one update on it.
Churn probe and tax are measurements of the price, not a part of it, and are reported beside it. In the kernels recording can't be turned
off: they have chosen the experts anyway and write them beside the logits.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from routes_kit import beginnings, shipped_base, traces_of

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig, RunConfig
from strop.core.episode import EpisodeKey, Trace
from strop.core.sample import Batch, Sample
from strop.engine.embedded import EmbeddedEngine
from strop.model.inference import InferenceModel
from strop.model.routing.families import router_spec
from strop.model.training import TrainModel
from strop.rl.trainer import PolicyTrainer
from strop.ui.results import write_result

UNPRICED = {"probe_rows": 0, "tax_frac": 0.0}


class Unrecorded(InferenceModel):
    """The kernels, less the routes."""

    def infer(self, rows: Any, cache: Any, want: np.ndarray) -> Any:
        """As the base class, with routes of no layer."""
        result = super().infer(rows, cache, want)
        return replace(result, expert_ids=result.expert_ids[:, :0])


def engine_of(model: InferenceModel, sessions: int, tokens: int, *, is_recorded: bool) -> EmbeddedEngine:
    """An engine; one that doesn't record has streams of no MoE layer and says nothing about routes."""
    config = RunConfig.model_validate({"engine": {"max_sessions": sessions, "max_batch": sessions, "max_tokens": tokens}})
    engine = EmbeddedEngine(config.engine, model, seed=0)
    if not is_recorded:
        engine._shape |= {"moe_layers": 0, "router": b""}
    return engine


def batch_of(traces: Sequence[Trace], *, has_routes: bool) -> Batch:
    """One step's batch; neighbours have opposite advantages."""
    samples = []
    for number, trace in enumerate(traces):
        key = EpisodeKey(phase="bench", step=0, task_id=f"file-{number:03d}", sample=0)
        advantage = np.where(trace.loss_mask, np.float32((-1.0) ** number), np.float32(0))
        samples.append(Sample(key=key, trace=trace if has_routes else replace(trace, routes=None), advantage=advantage))
    return Batch(step=0, samples=tuple(samples), normaliser=1000.0)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    work()
    return time.process_time() - began


def middle(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median of paired ratios in percent above 1, and an interval with at least 95 % confidence by the sign test."""
    ordered = 100 * (np.sort(ratios) - 1)
    low = max(0, int(np.floor(len(ordered) / 2 - 0.98 * np.sqrt(len(ordered)))))
    return float(np.median(ordered)), (float(ordered[low]), float(ordered[-1 - low]))


def main() -> None:
    """Measure, print, write ``docs/results/routes-overhead.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    shape, weights = shipped_base()
    prompts = beginnings(arguments.prompts, 64)
    room = 64 + arguments.new_tokens + 32
    engines = {
        name: engine_of(kind(shape, weights, threads=1), arguments.prompts, room, is_recorded=name == "with")
        for name, kind in (("without", Unrecorded), ("with", InferenceModel))
    }
    traces = asyncio.run(traces_of(engines["with"], prompts, arguments.new_tokens))
    batches = {name: batch_of(traces, has_routes=name != "without") for name in ("without", "with", "with, priced")}
    rl = RlConfig.model_validate({"learning_rate": 0.0, "warmup_steps": 0})
    trainers = {}
    for name in batches:
        numerics = NumericsConfig.model_validate({"mode": "exact", "replay_routes": "off" if name == "without" else "r3"})
        routes = RoutesConfig.model_validate({} if "priced" in name else UNPRICED)
        model = TrainModel(shape, weights, mode="exact", threads=1)
        trainers[name] = PolicyTrainer(model, rl, numerics, routes=routes, router=router_spec(shape))
    rollout: dict[str, list[float]] = {name: [] for name in engines}
    update: dict[str, list[float]] = {name: [] for name in trainers}
    for repeat in range(arguments.repeats + 1):
        for name in list(engines)[:: 1 if repeat % 2 else -1]:  # neither side always goes first
            seconds = timed(lambda name=name: asyncio.run(traces_of(engines[name], prompts, arguments.new_tokens)))
            if repeat:  # the first pays for warm-up
                rollout[name].append(seconds)
        for name in list(trainers)[:: 1 if repeat % 2 else -1]:
            # Every step sees weights of version 0, so that all of its tokens are the trainer's own.
            trainers[name].version = 0
            seconds = timed(lambda name=name: trainers[name].step(batches[name]))
            if repeat:
                update[name].append(seconds)
    columns = {name: np.array(values) for name, values in update.items()}
    rolled = {name: np.array(values) for name, values in rollout.items()}
    figure, interval = middle((rolled["with"] + columns["with"]) / (rolled["without"] + columns["without"]))
    parts = {
        "rollout %": middle(rolled["with"] / rolled["without"]),
        "update %": middle(columns["with"] / columns["without"]),
        "update with probe and tax %": middle(columns["with, priced"] / columns["without"]),
    }
    write_result(
        "routes-overhead",
        bar="step overhead of recording and replaying",
        goal="<= 1.5 %",
        figure=figure,
        unit="%",
        interval=interval,
        met=figure <= 0.015 * 100,
        command=f"python benchmarks/routes_overhead.py --prompts {arguments.prompts} --new-tokens {arguments.new_tokens}",
        notes="Processor time of a rollout and an update in exact mode, one thread: routes recorded, vouched for, checked and replayed "
        "against none at all. Median of the pairs; the interval has 95 % confidence. The churn probe and the tax are left out, as "
        "they measure the price; they are a fixed 128 rows and 2 % of the rows a step.",
        details={
            "rows of a step": sum(len(trace) - 1 for trace in traces),
            "medians, seconds": {f"rollout {n}": float(np.median(v)) for n, v in rolled.items()}
            | {f"update {n}": float(np.median(v)) for n, v in columns.items()},
            "parts": {name: {"median": value, "interval": list(bounds)} for name, (value, bounds) in parts.items()},
        },
    )
    print(f"overhead {figure:.2f} % {interval}", parts)


if __name__ == "__main__":
    main()
