"""What recording and replaying routes costs a training step. ``python benchmarks/routes_overhead.py``

One process, one batch, the exact kernels; steps with routes off and with r3 in turn, all measurements of price included. Recording costs
nothing that could be turned off in the embedded engine: its kernels have chosen the experts anyway and write them beside the logits.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from routes_kit import make_bed

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.episode import EpisodeKey
from strop.core.sample import Batch, Sample
from strop.model.training import TrainModel
from strop.rl.trainer import PolicyTrainer
from strop.ui.results import write_result


def main() -> None:
    """Measure, print, write ``docs/results/routes-overhead.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    bed = make_bed("fp32", prompts=arguments.prompts, prompt_tokens=64, new_tokens=arguments.new_tokens, seed=0)
    samples = []
    for number, trace in enumerate(bed.traces):
        key = EpisodeKey(phase="bench", step=0, task_id=f"file-{number:03d}", sample=0)
        samples.append(Sample(key=key, trace=trace, advantage=np.where(trace.loss_mask, np.float32((-1.0) ** number), np.float32(0))))
    batch = Batch(step=0, samples=tuple(samples), normaliser=1000.0)
    rl = RlConfig.model_validate({"learning_rate": 0.0, "warmup_steps": 0})
    trainers = {}
    for mode, extra in (("off", {"probe_rows": 0, "tax_frac": 0.0}), ("r3", {}), ("r3 without prices", {"probe_rows": 0, "tax_frac": 0.0})):
        numerics = NumericsConfig.model_validate({"mode": "off", "replay_routes": mode.split()[0]})
        model = TrainModel(bed.shape, bed.weights, mode="exact", threads=1)
        trainers[mode] = PolicyTrainer(model, rl, numerics, routes=RoutesConfig.model_validate(extra))
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    for repeat in range(arguments.repeats + 1):
        for mode, trainer in trainers.items():
            began = time.process_time()
            trainer.step(batch)
            if repeat:  # the first pays for warm-up
                seconds[mode].append(time.process_time() - began)
    best = {mode: min(times) for mode, times in seconds.items()}
    overhead = best["r3"] / best["off"] - 1
    ratios = sorted(with_routes / off - 1 for with_routes, off in zip(seconds["r3"], seconds["off"], strict=True))
    rows = sum(len(trace) for trace in bed.traces)
    write_result(
        "routes-overhead",
        bar="step overhead of recording and replaying",
        goal="<= 1.5 %",
        figure=100 * overhead,
        unit="%",
        interval=(100 * ratios[0], 100 * ratios[-1]),
        met=overhead <= 0.015,
        command=f"python benchmarks/routes_overhead.py --prompts {arguments.prompts} --new-tokens {arguments.new_tokens}",
        notes="Processor time of a training step, best of the repeats, r3 against off, churn probe and price included; one thread. "
        "The interval is the range of the pairs. A run has generation beside it, which routes don't slow down.",
        details={"rows of a step": rows, "seconds": best, "without prices %": 100 * (best["r3 without prices"] / best["off"] - 1)},
    )
    print({mode: round(value, 4) for mode, value in best.items()}, f"overhead {100 * overhead:.2f} %")


if __name__ == "__main__":
    main()
