"""Low-precision rollouts against a float32 trainer: how far each number type lies off, and whose rows a scale ties together.

python benchmarks/drift_rollouts.py           (about 4 minutes; writes docs/results/drift-rollout-precision.json)
python benchmarks/drift_rollouts.py --quick   (a tenth, writes nothing)
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
import torch
from drift_kit import Weights, compare, episodes, shipped, trainer_logprobs

from strop.core.config import SENSITIVE_OPS, EngineConfig
from strop.core.episode import Trace
from strop.engine.embedded import EmbeddedEngine
from strop.engine.low_precision import LowPrecisionModel
from strop.engine.torch_model import TorchCache
from strop.model.config import DecoderConfig
from strop.model.decoder import PackedTokens
from strop.model.training import TrainModel
from strop.numerics.compare import compare_logprobs
from strop.numerics.precision import Emulation, Precision
from strop.numerics.price import fresh_decoder
from strop.ui.results import write_result

COMMAND = "python benchmarks/drift_rollouts.py"
CASES = (
    ("fp32", "token", ()),
    ("tf32", "token", ()),
    ("fp16", "token", ()),
    ("bf16", "token", ()),
    ("bf16", "token", ("lm_head=fp32",)),
    ("bf16", "token", ("lm_head=fp32", "router=fp32")),
    ("bf16", "token", tuple(f"{name}=fp32" for name in SENSITIVE_OPS)),
    ("int8", "token", ()),
    ("mxfp8", "token", ()),
    ("mxfp8", "tensor", ()),
    ("nvfp4", "token", ()),
    ("nvfp4", "tensor", ()),
)
SHOWN = ("k3_nats", "logprob_diff_mean_nats", "logprob_diff_max_nats", "ratio_above_2_frac", "ess_frac", "token_mult_error", "correlation")


def rollout(config: DecoderConfig, weights: Weights, precision: Precision, count: int) -> list[Trace]:
    """Episodes of an engine in low precision."""
    settings = EngineConfig(max_sessions=32, max_batch=32, max_tokens=256)
    engine = EmbeddedEngine(
        settings,
        LowPrecisionModel(config, weights, precision),
        seed=0,
        make_cache=lambda slots, n: TorchCache(config, slots, n, device=torch.device("cpu")),
        is_exact=False,
    )

    async def play() -> list[Trace]:
        try:
            return await episodes(engine, config, range(count))
        finally:
            await engine.close()

    return asyncio.run(play())


@torch.no_grad()
def tied_rows(config: DecoderConfig, weights: Weights, precision: Precision) -> dict[str, float]:
    """Largest change of a row's log-probabilities when batch mates, or later tokens of its own stream, change.

    Routes are held fixed, so that every product has the same shape throughout and only the scales can tie rows together.
    """
    decoder = fresh_decoder(config, weights)
    Emulation(decoder, precision)

    def scores(*streams: list[int]) -> torch.Tensor:
        packed = PackedTokens.of([torch.tensor(s) for s in streams])
        rows = len(packed.token_ids)
        routes = torch.arange(config.top_k).expand(rows, config.num_layers, -1) + torch.arange(rows)[:, None, None] % config.top_k
        return decoder.logits(decoder(packed, routes.contiguous()).hidden).log_softmax(-1)

    mine = list(range(20, 36))
    mates = [scores(mine, [token] * 16)[:16] for token in range(8)]
    futures = [scores([*mine, *[token] * 4])[:16] for token in range(8)]
    return {
        "batch_mates_nats": max(float((other - mates[0]).abs().max()) for other in mates),
        "future_tokens_nats": max(float((other - futures[0]).abs().max()) for other in futures),
    }


def measure(count: int) -> list[dict[str, Any]]:
    """All cases."""
    config, weights = shipped()
    trainer = TrainModel(config, weights, mode="tolerant")
    rows = []
    for kind, scale, overrides in CASES:
        precision = Precision.of(kind, scale=scale, keep=(), overrides=overrides)  # type: ignore[arg-type]
        traces = rollout(config, weights, precision, count)
        recorded = np.concatenate([trace.logprobs[trace.loss_mask] for trace in traces])
        metrics = compare_logprobs(recorded, trainer_logprobs(trainer, traces), np.ones_like(recorded))
        found = {key: metrics[f"numerics/{key}"] for key in SHOWN}
        agreement = compare(trainer, traces)
        pairs = config.num_layers * sum(len(trace) - 1 for trace in traces)
        row = {"rollout": kind, "scale": scale, "overrides": list(overrides), "tokens": len(recorded)}
        row |= found | {"route_mismatch_frac": agreement.foreign_routes / pairs} | tied_rows(config, weights, precision)
        rows.append(row)
        print(row, flush=True)
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Write the bar."""
    by_case = {(row["rollout"], row["scale"]): row for row in rows if not row["overrides"]}
    effects = ("batch_mates_nats", "future_tokens_nats")
    tied = min(by_case[kind, "tensor"][effect] for kind in ("mxfp8", "nvfp4") for effect in effects)
    loose = max(by_case[kind, "token"][effect] for kind in ("mxfp8", "nvfp4") for effect in effects)
    write_result(
        "drift-rollout-precision",
        bar="low-precision rollouts: whose rows a scale ties together",
        goal="a per-tensor scale ties a row to batch mates and future tokens, a per-token scale doesn't",
        figure=f"{tied:.3g} against {loose:.3g}",
        unit="nats",
        met=tied > 10 * loose,
        command=COMMAND,
        seeds=(0,),
        notes="Smallest movement of a row under per-tensor scales against the largest under per-token ones, MXFP8 and NVFP4, with routes "
        "held fixed. With routes free, an expert's products change their shape with other rows, and four bits turn a last bit into a step. "
        "The details have the drift of every number type against a float32 trainer.",
        details={"rows": rows},
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows = measure(8 if quick else 96)
    if not quick:
        write(rows)


if __name__ == "__main__":
    main()
