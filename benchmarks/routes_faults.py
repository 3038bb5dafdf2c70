"""Fifteen planted replay faults in real training steps: all must be refused or flagged, and clean steps silent.

    python benchmarks/routes_faults.py [--trials 8]

The nine of the literature and six more, in bf16 and fp32 rollouts of the shipped base, trained in float32 with replay (r3). Every fault
is planted twice: ``behind`` the engine's back, so that its word about them (``RouteOrigin``) is that of before, on weights one version
newer than the rollout's; and ``vouched`` for by the engine itself, on the weights that made the rollout, where the live router alone can
find it. Each is a step of a ``PolicyTrainer`` of its own with the default limits on routes. Clean steps include those one version later.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from routes_kit import Bed, make_bed

from strop.core.config import NumericsConfig, RlConfig, RoutesConfig
from strop.core.episode import EpisodeKey, Trace
from strop.core.errors import NumericsError
from strop.core.routes import RouteOrigin, Routes, id_dtype, ids_digest
from strop.core.sample import Batch, Sample
from strop.model.routing.families import router_spec
from strop.model.training import TrainModel
from strop.numerics.digest import weights_digest
from strop.rl.trainer import PolicyTrainer
from strop.ui.results import write_result

WIDE: dict[str, Any] = {
    "mode": "tolerant",
    "max_abs_diff": 1e9,
    "stop_token_mult_error": 1e9,
    "stop_correlation": -1.0,
    "stop_ess_frac": 0.0,
}
WIDE |= {f"stop_{name}": 1.0 for name in ("route_mismatch_frac", "clip_frac", "ratio_above_2_frac")}
WIDE |= {f"stop_{name}": 1e9 for name in ("k1_nats", "k3_nats", "logprob_diff_mean_nats", "advantage_skew_z")}
"""Limits of the drift guard that nothing reaches, so that a fault counts only where a check of the routes finds it."""


def routes_of(trace: Trace) -> Routes:
    """The routes that an engine of strop always returns."""
    assert trace.routes is not None
    return trace.routes


def origin_of(trace: Trace) -> RouteOrigin:
    """What the engine says of them."""
    origin = routes_of(trace).origin
    assert origin is not None
    return origin


class Steps:
    """Training steps on one batch of streams, some of them changed.

    Args:
        bed: The rollout.
        precision: Of the rollout.
    """

    def __init__(self, bed: Bed, precision: str) -> None:
        self.bed, self.spec = bed, router_spec(bed.shape)
        self.numerics = NumericsConfig.model_validate(WIDE | {"replay_routes": "r3", "rollout_precision": precision})
        self.model = TrainModel(bed.shape, bed.weights, mode="tolerant", device="cpu")

    def findings(self, traces: Sequence[Trace], *, version: int) -> list[str]:
        """Return what one step with weights of ``version`` says about the routes; empty where it trains in silence.

        Raises:
            RuntimeError: It refused the routes and moved the weights all the same.
        """
        samples = []
        for number, trace in enumerate(traces):
            key = EpisodeKey(phase="bench", step=0, task_id=f"file-{number}", sample=0)
            samples.append(Sample(key=key, trace=trace, advantage=np.where(trace.loss_mask, np.float32((-1.0) ** number), np.float32(0))))
        rl = RlConfig.model_validate({"learning_rate": 0.0, "warmup_steps": 0})
        routes = RoutesConfig.model_validate({"probe_rows": 0, "tax_frac": 0.0})
        trainer = PolicyTrainer(self.model, rl, self.numerics, routes=routes, router=self.spec, version=version)
        before = weights_digest(self.model.weights())
        with Heard("strop.routes") as heard:
            try:
                trainer.step(Batch(step=0, samples=tuple(samples), normaliser=1000.0))
            except NumericsError as error:
                if weights_digest(self.model.weights()) != before or trainer.version != version:
                    raise RuntimeError("refused, but weights or version moved") from error
                return [str(error)]
        return heard.messages


class Heard(logging.Handler):
    """Keeps what a logger says while it is entered."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.logger, self.messages = logging.getLogger(name), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Heard:
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)


# ---------------------------------------------------------------------------------------------------- the faults

Plant = Callable[[Trace, Trace, np.random.Generator, int], Trace]
"""The stream, another one, a generator and the number of experts, to the stream with the fault and the origin of before."""


def changed(trace: Trace, ids: np.ndarray, experts: int) -> Trace:
    """The stream with other ids."""
    return replace(trace, routes=replace(routes_of(trace), expert_ids=ids.astype(id_dtype(experts))))


def of_ids(change: Callable[[np.ndarray, np.ndarray, np.random.Generator, int], np.ndarray]) -> Plant:
    """A fault of ids alone: ``change(ids, ids of another stream, generator, experts)``, ``[rows, layers, top_k]``."""

    def plant(trace: Trace, other: Trace, rng: np.random.Generator, experts: int) -> Trace:
        ids, foreign = (routes_of(t).expert_ids.astype(np.int64) for t in (trace, other))
        return changed(trace, change(ids.copy(), foreign[: len(ids)], rng, experts), experts)

    return plant


def corrupted(ids: np.ndarray, foreign: np.ndarray, rng: np.random.Generator, experts: int) -> np.ndarray:
    """A thousandth of the ids replaced by an expert that the row doesn't have."""
    flat = ids.reshape(-1, ids.shape[-1])
    for place in rng.choice(len(flat), max(1, round(0.001 * ids.size)), replace=False):
        flat[place, rng.integers(flat.shape[1])] = rng.choice(np.setdiff1d(np.arange(experts), flat[place]))
    return np.sort(ids, -1)


def zeroed(rows: slice) -> Plant:
    """Rows of expert 0, as zero-padding leaves them."""

    def change(ids: np.ndarray, foreign: np.ndarray, rng: np.random.Generator, experts: int) -> np.ndarray:
        ids[rows] = 0
        return ids

    return of_ids(change)


def copied_row(ids: np.ndarray, foreign: np.ndarray, rng: np.random.Generator, experts: int) -> np.ndarray:
    """One row that repeats another one."""
    row = int(rng.integers(1, len(ids)))
    ids[row] = ids[int(np.argmax((ids != ids[row]).any((1, 2))))]
    return ids


def placed(ids: np.ndarray, foreign: np.ndarray, rng: np.random.Generator, experts: int) -> np.ndarray:
    """Physical ids: logical ones through a placement without fixed point, as load balancers give out."""
    order = rng.permutation(experts)
    table = np.empty(experts, np.int64)
    table[order] = np.roll(order, 1)
    return np.sort(table[ids], -1)


def exchanged(ids: np.ndarray, foreign: np.ndarray, rng: np.random.Generator, experts: int) -> np.ndarray:
    """Two experts that occur exchanged everywhere."""
    table = np.arange(experts)
    one, two = rng.choice(np.unique(ids), 2, replace=False)
    table[one], table[two] = two, one
    return np.sort(table[ids], -1)


def other_layers(change: Callable[[tuple[int, ...]], tuple[int, ...]], bed: Bed) -> Plant:
    """Routes of an engine that counts layers differently, and says so."""
    spec = router_spec(bed.shape)
    digest = replace(spec, layers=change(spec.layers)).digest()
    return lambda trace, other, rng, experts: with_origin(trace, router=digest)


def with_origin(trace: Trace, **changes: Any) -> Trace:
    """The stream with another word of the engine."""
    return replace(trace, routes=replace(routes_of(trace), origin=replace(origin_of(trace), **changes)))


def mixed(trace: Trace, other: Trace, rng: np.random.Generator, experts: int) -> Trace:
    """Rows that claim a change of weights where none was."""
    rows = len(routes_of(trace))
    cut = int(rng.integers(1, rows))
    return with_origin(trace, versions=((0, cut, 0), (cut, rows, 1)))


def missing(trace: Trace, other: Trace, rng: np.random.Generator, experts: int) -> Trace:
    """The last row has no record."""
    routes = routes_of(trace)
    return replace(trace, routes=replace(routes, valid=np.arange(len(routes)) < len(routes) - 1))


def faults(bed: Bed) -> dict[str, Plant]:
    """All of them. Stale routes are honestly labelled with their version, as are those of other layers."""
    prompt = int(np.argmax(bed.traces[0].loss_mask)) - 1
    return {
        "token shift": of_ids(lambda ids, *_: np.roll(ids, 1, axis=0)),
        "layer shift": of_ids(lambda ids, *_: np.roll(ids, 1, axis=1)),
        "physical ids (placement of every layer)": of_ids(placed),
        "two samples swapped": of_ids(lambda ids, foreign, *_: foreign),
        "prompt rows zero": zeroed(slice(0, prompt)),
        "last row zero": zeroed(slice(-1, None)),
        "one row copied": of_ids(copied_row),
        "0.1 % of the ids corrupted": of_ids(corrupted),
        "routes of stale weights": lambda t, o, r, e: with_origin(t, versions=((0, len(routes_of(t)), 2**32 - 1),)),
        "MTP layer in place of the last": other_layers(lambda layers: (*layers[:-1], layers[-1] + 1), bed),
        "dense first layer counted": other_layers(lambda layers: tuple(layer + 1 for layer in layers), bed),
        "recompute reads another micro-batch": of_ids(
            lambda ids, foreign, *_: np.concatenate([foreign[: len(ids) // 2], ids[len(ids) // 2 :]])
        ),
        "rows missing": missing,
        "versions mixed": mixed,
        "physical ids (two experts exchanged)": of_ids(exchanged),
    }


def vouched(trace: Trace) -> Trace:
    """The same stream from an engine that made the fault itself, so that its digest of the ids is that of the wrong ones."""
    routes = routes_of(trace)
    return with_origin(trace, ids=ids_digest(routes.expert_ids, routes.valid))


def main() -> None:
    """Plant everything, count, write ``docs/results/routes-faults.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    caught: dict[str, dict[str, int]] = {}
    said: dict[str, dict[str, str]] = {}
    alarms = clean = planted = 0
    for precision in ("bf16", "fp32"):
        bed = make_bed(precision, prompts=arguments.trials, prompt_tokens=32, new_tokens=arguments.new_tokens, seed=1)
        steps, traces = Steps(bed, precision), bed.traces
        for version in (0, 1):
            for number in range(len(traces)):
                found = steps.findings(traces[number:] + traces[:number], version=version)
                clean, alarms = clean + 1, alarms + bool(found)
                if found:
                    print("FALSE ALARM", precision, version, number, found, flush=True)
        for number, trace in enumerate(traces):
            other = traces[(number + 1) % len(traces)]
            planted += 1
            for name, plant in faults(bed).items():
                rng = np.random.default_rng((number, len(name)))
                bad = plant(trace, other, rng, bed.shape.num_experts)
                for kind, sample, version in (("behind", bad, 1), ("vouched", vouched(bad), 0)):
                    found = steps.findings([sample, other], version=version)
                    caught.setdefault(name, {"behind": 0, "vouched": 0})[kind] += bool(found)
                    if found:
                        said.setdefault(name, {}).setdefault(kind, found[0])
    for name, counts in caught.items():
        print(f"{counts['behind']:2d} {counts['vouched']:2d} of {planted}  {name}: {said.get(name)}")
    silent = sum(planted - count for counts in caught.values() for count in counts.values())
    always = sum(all(count == planted for count in counts.values()) for counts in caught.values())
    write_result(
        "routes-faults",
        bar="planted replay faults",
        goal="15 faults, all refused or flagged, none silent, none on clean runs",
        figure=f"{always} of {len(caught)} always caught, {alarms} false alarms",
        met=silent == 0 and alarms == 0 and len(caught) == 15,
        command=f"python benchmarks/routes_faults.py --trials {arguments.trials} --new-tokens {arguments.new_tokens}",
        seeds=(1,),
        notes="Each fault is planted in a training step (r3, tolerant, the default limits on routes; the drift guard's own limits out of "
        "reach), once behind the engine's back on weights one version newer and once vouched for by the engine on the same weights, in "
        "every stream of bf16 and of fp32 rollouts by the shipped base. A refusal must leave weights and version as they were. What an "
        "engine vouches for on rows of older weights is bounded by the overlap alone, and isn't planted here.",
        details={
            "caught": {name: {kind: f"{count}/{planted}" for kind, count in counts.items()} for name, counts in caught.items()},
            "first finding": said,
            "clean steps": clean,
            "false alarms": alarms,
        },
    )
    print(f"{silent} silent, {alarms} false alarms in {clean} clean steps")


if __name__ == "__main__":
    main()
