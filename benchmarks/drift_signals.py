"""The blind spot of k3, a learning rate of 0, and what the checks cost.

python benchmarks/drift_signals.py           (about 4 minutes; writes docs/results/drift-blind-spot, -learning-rate-0, -cost)
python benchmarks/drift_signals.py --quick   (a twentieth; writes nothing)
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import numpy as np
from drift_exact import tolerant_engine
from drift_kit import TINY, episodes, make_engine, random_weights, shipped

from strop.core.config import NumericsConfig, RlConfig
from strop.core.episode import EpisodeKey, Trace
from strop.core.errors import NumericsError
from strop.core.sample import Batch, Sample
from strop.engine.embedded import EmbeddedEngine
from strop.model.config import DecoderConfig
from strop.model.training import TrainModel
from strop.numerics.canary import canary_streams, trainer_view
from strop.numerics.compare import compare_logprobs
from strop.numerics.digest import weights_digest
from strop.numerics.limits import DriftGuard, skew_sums
from strop.numerics.manifest import merkle_root, tensor_digests
from strop.rl.trainer import PolicyTrainer
from strop.ui.results import write_result

COMMAND = "python benchmarks/drift_signals.py"
EPISODES, TOKENS, NOISE, BIAS = 96, 60, 0.02, 0.001
STEPS = 10
EPOCH_S = 150.0
"""Seconds of eight steps of the quickstart on two cores, rounded down."""


# ---------------------------------------------------------------------------------------------------- blind spot


def made_up_step(draw: np.random.Generator, bias: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rollout, trainer, advantage and stream of one step's tokens: 16-bit noise, and a bias along the advantage whose mean is 0."""
    streams = np.repeat(np.arange(EPISODES), TOKENS)
    rewards = (draw.random(EPISODES) < 0.4).astype(np.float64)
    advantage = (rewards - rewards.reshape(-1, 8).mean(1).repeat(8))[streams].astype(np.float32)
    generator = -draw.exponential(1.0, len(streams)).astype(np.float32)
    d = draw.normal(0, NOISE, len(streams)) - NOISE**2 / 2 + bias * np.sign(advantage)
    return generator, (generator + d).astype(np.float32), advantage, streams


def steps_until_flagged(seed: int, bias: float) -> tuple[int | None, float]:
    """Steps until the guard warns or stops (``None``: not within ten), and the mean k3 of the steps."""
    draw, guard, k3 = np.random.default_rng(seed), DriftGuard(NumericsConfig.model_validate({"mode": "tolerant"})), []
    for step in range(STEPS):
        generator, trainer, advantage, streams = made_up_step(draw, bias)
        metrics = compare_logprobs(generator, trainer, advantage)
        k3.append(metrics["numerics/k3_nats"])
        try:
            found = guard.check(metrics, skew_sums(generator, trainer, advantage, streams))
        except NumericsError as error:
            if "k3 can't see this" not in str(error):
                raise
            return step + 1, float(np.mean(k3))
        if found["numerics/warnings"]:
            return step + 1, float(np.mean(k3))
    return None, float(np.mean(k3))


def blind_spot(runs: int) -> dict[str, Any]:
    """Biased runs of both signs and clean ones."""
    biased = [steps_until_flagged(seed, BIAS * (-1) ** seed) for seed in range(runs)]
    clean = [steps_until_flagged(10_000 + seed, 0.0) for seed in range(runs)]
    late = [step if step is not None else STEPS + 1 for step, _ in biased]
    return {
        "runs": runs,
        "steps_max": max(late),
        "steps_mean": float(np.mean(late)),
        "clean_runs_flagged": sum(step is not None for step, _ in clean),
        "k3_biased": float(np.mean([k3 for _, k3 in biased])),
        "k3_clean": float(np.mean([k3 for _, k3 in clean])),
    }


# ---------------------------------------------------------------------------------------------------- learning rate 0


def samples_of(traces: list[Trace]) -> tuple[Sample, ...]:
    """Samples with made-up rewards: the parity of the last sampled token."""
    made = []
    for number, trace in enumerate(traces):
        reward = float(trace.token_ids[np.flatnonzero(trace.loss_mask)[-1]] % 2) - 0.5
        key = EpisodeKey(phase="rl", step=0, task_id=str(number // 4), sample=number)
        made.append(Sample(key=key, trace=trace, advantage=np.where(trace.loss_mask, np.float32(reward), np.float32(0))))
    return tuple(made)


async def still(engine: EmbeddedEngine, trainer: PolicyTrainer, config: DecoderConfig, steps: int) -> dict[str, Any]:
    """Steps of learning rate 0 over the same keys: the same tokens, the same figures, the same weights."""
    start = weights_digest(trainer.weights())
    seen, digests = [], set()
    keys = ("numerics/k3_nats", "numerics/logprob_diff_max_nats", "numerics/token_mult_error", "numerics/tokens")
    for step in range(steps):
        await engine.swap(trainer.weights(), step)
        traces = await episodes(engine, config, range(8), turns=2, new=16)
        update = trainer.step(Batch(step=step, samples=samples_of(traces), normaliser=100.0))
        seen.append(tuple(update.metrics[key] for key in keys))
        digests.add(update.weights_digest)
    await engine.close()
    return {
        "steps": steps,
        "is_digest_unchanged": digests == {start},
        "distinct_figures": len(set(seen)),
        "first": dict(zip(keys, seen[0], strict=True)),
        "last": dict(zip(keys, seen[-1], strict=True)),
    }


def learning_rate_zero(steps: int) -> dict[str, Any]:
    """In both modes."""
    weights = random_weights(TINY)
    rl = RlConfig.model_validate({"learning_rate": 0.0})
    found = {}
    for mode in ("exact", "tolerant"):
        engine = make_engine(TINY, weights, sessions=8, threads=1) if mode == "exact" else tolerant_engine(TINY, weights, 8)
        model = TrainModel(TINY, weights, mode=mode, threads=1)  # type: ignore[arg-type]
        trainer = PolicyTrainer(model, rl, NumericsConfig.model_validate({"mode": mode}))
        found[mode] = asyncio.run(still(engine, trainer, TINY, steps))
    return found


# ---------------------------------------------------------------------------------------------------- cost


def seconds(call: Any, repeats: int = 3) -> float:
    """Best of a few."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def cost(count: int) -> dict[str, float]:
    """The checks on the shipped base, and the trainer's own step on ``count`` episodes for comparison."""
    config, weights = shipped()

    async def play() -> list[Trace]:
        engine = make_engine(config, weights, sessions=32, threads=2)
        try:
            return await episodes(engine, config, range(count))
        finally:
            await engine.close()

    traces = asyncio.run(play())
    trainer = PolicyTrainer(TrainModel(config, weights), RlConfig.model_validate({}), NumericsConfig.model_validate({}))
    began = time.perf_counter()
    update = trainer.step(Batch(step=0, samples=samples_of(traces), normaliser=1000.0))
    step_s = time.perf_counter() - began
    tokens = int(update.metrics["numerics/tokens"])
    draw = np.random.default_rng(0)
    one = -draw.exponential(1.0, tokens).astype(np.float32)
    advantage, streams = draw.normal(size=tokens).astype(np.float32), np.sort(draw.integers(0, count, tokens))

    def metrics() -> None:
        guard = DriftGuard(NumericsConfig.model_validate({}))
        guard.check(compare_logprobs(one, one, advantage), skew_sums(one, one, advantage, streams))

    state = trainer.state()
    canaries = canary_streams(config.vocab_size)
    parts = {
        "manifest_s": seconds(lambda: merkle_root(tensor_digests(state))),
        "trainer_canary_s": seconds(lambda: trainer_view(trainer.model, canaries)),
        "weights_digest_s": seconds(lambda: weights_digest(trainer.weights())),
    }
    metrics_s = seconds(metrics)
    seal_s = 2 * seconds(lambda: tensor_digests(trainer._still()))
    # The engine's canary goes stream by stream and costs about twice the trainer's.
    certificate_s = parts["manifest_s"] + 3 * parts["trainer_canary_s"] + parts["weights_digest_s"]
    return parts | {
        "certificate_s": certificate_s,
        "metrics_s": metrics_s,
        "seal_s": seal_s,
        "trainer_step_s": step_s,
        "tokens": float(tokens),
        "metrics_share_of_training": metrics_s / step_s,
        "seal_share_of_training": seal_s / step_s,
        "certificate_share_of_epoch": certificate_s / EPOCH_S,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    blind = blind_spot(20 if quick else 300)
    print(blind, flush=True)
    zero = learning_rate_zero(10 if quick else 200)
    print(zero, flush=True)
    dear = cost(8 if quick else 96)
    print(dear, flush=True)
    if quick:
        return
    write_result(
        "drift-blind-spot",
        bar="zero-mean bias along the advantage",
        goal="flagged within 10 steps while k3 is flat",
        figure=blind["steps_max"],
        unit="steps",
        met=blind["steps_max"] <= 10 and not blind["clean_runs_flagged"] and blind["k3_biased"] < 1.1 * blind["k3_clean"],
        command=COMMAND,
        notes=f"Latest flag of {blind['runs']} runs of made-up tokens: {EPISODES} episodes of {TOKENS} tokens a step, noise {NOISE}, bias "
        f"{BIAS} nats. Of as many clean runs {blind['clean_runs_flagged']} were flagged.",
        details=blind,
    )
    is_still = all(entry["is_digest_unchanged"] and entry["distinct_figures"] == 1 for entry in zero.values())
    write_result(
        "drift-learning-rate-0",
        bar="learning rate 0",
        goal="200 steps: mismatch doesn't move, digest doesn't change",
        figure=max(entry["distinct_figures"] for entry in zero.values()),
        unit="distinct sets of figures",
        met=is_still and zero["exact"]["first"]["numerics/logprob_diff_max_nats"] == 0,
        command=COMMAND,
        details=zero,
    )
    write_result(
        "drift-cost",
        bar="cost of the certificate and of the metrics of a step",
        goal="certificate < 1 % of an epoch or 2 s; metrics < 1 % of a step",
        figure=round(dear["certificate_s"], 3),
        unit="s",
        met=(dear["certificate_share_of_epoch"] < 0.01 or dear["certificate_s"] < 2) and dear["metrics_share_of_training"] < 0.01,
        command=COMMAND,
        notes=f"Metrics take {100 * dear['metrics_share_of_training']:.2f} % of the trainer's part of a step, the seal on the state "
        f"{100 * dear['seal_share_of_training']:.2f} %.",
        details=dear,
    )


if __name__ == "__main__":
    main()
