"""False alarms: benign variations that must pass every check, over threads, micro-batches, orders, and another torch if one is given.

python benchmarks/drift_benign.py                        (about 5 minutes; writes docs/results/drift-false-alarms.json)
python benchmarks/drift_benign.py --python PATH          (PATH: the interpreter of an environment with another torch)
python benchmarks/drift_benign.py --quick                (a twentieth; writes nothing)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drift_kit import TINY, random_weights

from strop.core.config import NumericsConfig
from strop.core.errors import NumericsError
from strop.core.random import generator
from strop.model.decoder import Decoder
from strop.model.training import TrainModel
from strop.numerics.calibrate import (
    MICRO_BATCHES,
    calibrate_decoder,
    decoder_canary,
    decoder_parts,
    in_micro_batches,
    reordered,
    reorderings,
    trainer_parts,
)
from strop.numerics.canary import Canary, CanaryLimits, canary_streams, compare_canaries
from strop.numerics.compare import compare_logprobs
from strop.numerics.fingerprint import fingerprint
from strop.numerics.limits import DriftGuard, skew_sums
from strop.numerics.price import fresh_decoder
from strop.ui.results import write_result

COMMAND = "python benchmarks/drift_benign.py"
TRIALS, MODELS = 1000, 4
STREAMS = canary_streams(TINY.vocab_size, streams=8, length=48)


def shuffled(parts: Any, order: np.ndarray) -> Any:
    """Compute streams in another order and put the results back."""

    def elsewhere(streams: Any) -> Any:
        own = order[order < len(streams)]
        back = np.argsort(own)
        return tuple([part[index] for index in back] for part in parts([streams[index] for index in own]))

    return elsewhere


def one_trial(decoder: Decoder, exact: dict[int, TrainModel], trial: int) -> tuple[Canary, Canary]:
    """The canary of a random benign variation, of the torch path and of the exact kernels."""
    draw = generator("benign", trial)
    size, threads = int(draw.choice(MICRO_BATCHES)), int(draw.integers(1, 3))
    order = draw.permutation(len(STREAMS))
    products = [None, *reorderings().values()]
    product = products[int(draw.integers(len(products)))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        variation = shuffled(lambda part: decoder_parts(decoder, part), order)
        if product is None:
            loose = in_micro_batches(variation, STREAMS, size)
        else:
            with reordered(decoder, product):
                loose = in_micro_batches(variation, STREAMS, size)
    finally:
        torch.set_num_threads(before)
    tight = in_micro_batches(shuffled(lambda part: trainer_parts(exact[threads], part), order), STREAMS, size)
    return loose, tight


def trials(count: int) -> dict[str, Any]:
    """All trials: canaries against calibrated limits, exact kernels against equal bits, the guard over the steps."""
    alarms: Counter[str] = Counter()
    largest = 0.0
    for number in range(MODELS):
        weights = random_weights(TINY, seed=number)
        decoder = fresh_decoder(TINY, weights)
        exact = {threads: TrainModel(TINY, weights, threads=threads) for threads in (1, 2)}
        limits = CanaryLimits.from_floors(calibrate_decoder(decoder, STREAMS).as_json())
        base = decoder_canary(decoder, STREAMS)
        bits = in_micro_batches(lambda part, model=exact[1]: trainer_parts(model, part), STREAMS, len(STREAMS))
        guard = DriftGuard(NumericsConfig.model_validate({"mode": "tolerant"}))
        for trial in range(number * count // MODELS, (number + 1) * count // MODELS):
            loose, tight = one_trial(decoder, exact, trial)
            difference = compare_canaries(base, loose)
            largest = max(largest, difference.logprob_max_nats)
            alarms["canary"] += bool(limits.breach(difference))
            alarms["exact"] += bool(CanaryLimits().breach(compare_canaries(bits, tight)))
            alarms["steps"] += not _is_silent(guard, base.logprobs, loose.logprobs, trial)
    return {"trials": count, "alarms": dict(alarms), "largest_nats": largest}


def _is_silent(guard: DriftGuard, one: np.ndarray, two: np.ndarray, trial: int) -> bool:
    """Whether the guard neither stops nor warns, with random advantages by stream."""
    streams = np.repeat(np.arange(len(STREAMS)), [len(stream) - 1 for stream in STREAMS])
    advantage = generator("advantage", trial).normal(size=len(STREAMS)).astype(np.float32)[streams]
    try:
        found = guard.check(compare_logprobs(one, two, advantage), skew_sums(one, two, advantage, streams))
    except NumericsError:
        return False
    return not found["numerics/warnings"]


OTHER_KERNELS = ({"ATEN_CPU_CAPABILITY": "default"}, {"MKL_CBWR": "COMPATIBLE"}, {"MKL_CBWR": "AUTO,STRICT"})
"""Settings that make one torch choose other kernels, in a process of their own."""


def other_process(python: str, settings: dict[str, str]) -> dict[str, Any]:
    """The canary of the same weights in another process: another environment, or other kernels, inside the limits."""
    weights = random_weights(TINY)
    decoder = fresh_decoder(TINY, weights)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.npz"
        np.savez(path, **{name: value.numpy() for name, value in weights.items()})
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")])
        environment = dict(os.environ, PYTHONPATH=paths, **settings)
        done = subprocess.run([python, __file__, "--canary", str(path)], env=environment, capture_output=True, text=True, check=True)
    there = json.loads(done.stdout.splitlines()[-1])
    canary = Canary(logprobs=np.array(there["logprobs"], np.float32), sketches=np.array(there["sketches"]))
    difference = compare_canaries(decoder_canary(decoder, STREAMS), canary)
    limits = CanaryLimits.from_floors(calibrate_decoder(decoder, STREAMS).as_json())
    return {
        "settings": settings,
        "torch": [torch.__version__, there["torch"]],
        "is_another_class": there["fingerprint"] != fingerprint("tolerant").digest,
        "largest_nats": difference.logprob_max_nats,
        "alarm": limits.breach(difference),
    }


def print_canary(path: str) -> None:
    """Be the other environment."""
    with np.load(path) as data:
        weights = {name: torch.from_numpy(data[name]) for name in data.files}
    canary = decoder_canary(fresh_decoder(TINY, weights), STREAMS)
    assert canary.sketches is not None
    record = {
        "torch": torch.__version__,
        "fingerprint": fingerprint("tolerant").digest,
        "logprobs": canary.logprobs.tolist(),
        "sketches": canary.sketches.tolist(),
    }
    print(json.dumps(record))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--python", help="interpreter of another environment")
    parser.add_argument("--canary", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.canary:
        print_canary(arguments.canary)
        return
    found = trials(40 if arguments.quick else TRIALS)
    print(found)
    others = [other_process(sys.executable, settings) for settings in OTHER_KERNELS[: 1 if arguments.quick else None]]
    if arguments.python:
        others.append(other_process(arguments.python, {}))
    print(others)
    if arguments.quick:
        return
    total = sum(found["alarms"].values()) + sum(bool(other["alarm"]) for other in others)
    is_other = any(other["torch"][0] != other["torch"][1] and other["is_another_class"] for other in others)
    write_result(
        "drift-false-alarms",
        bar="false alarms over threads, micro-batches, orders and two torch versions",
        goal="0 in 1,000 benign trials",
        figure=total,
        unit="alarms",
        met=total == 0 and is_other,
        command=COMMAND + (" --python PATH" if arguments.python else ""),
        notes="Each trial is judged three times: canaries against calibrated limits, exact kernels for equal bits, the guard of the steps."
        + (
            ""
            if is_other
            else " No second torch was given, only other kernels of the same one in processes of their own, so the bar isn't met."
        ),
        details={"trials": found, "other_processes": others},
    )


if __name__ == "__main__":
    main()
