"""Decode throughput of the embedded engine beside ``transformers.generate`` on the same weights, prompts and threads.

    python benchmarks/decode.py [--batch 32 128] [--prompt 384] [--new 64] [--threads 2] [--repeats 3] [--checkpoint DIR] [--out FILE]

Each pair runs in turn (engine, transformers, engine, ...), the best of the repeats counts. ``decode`` subtracts the time of a run that
samples one token, so prefill does not count; ``total`` is everything. Prompts differ and have equal lengths, which favours transformers:
it pads.
Greedy tokens are compared first: both must do the same work. The share of the matrix-product limit is that of the decode phase.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from strop.core.config import EngineConfig
from strop.core.episode import EpisodeKey
from strop.engine.embedded import EmbeddedEngine
from strop.midtrain.base.pretrain import TINY
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.inference import InferenceModel


class Seconds(NamedTuple):
    """A time on the wall and the processor time of this process; the latter stays meaningful on a busy machine."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        """Both clocks."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def best(times: list[Seconds]) -> Seconds:
    """The smallest of each."""
    return Seconds(min(t.wall for t in times), min(t.cpu for t in times))


def load(checkpoint: str | None) -> tuple[DecoderConfig, dict[str, Any]]:
    """Shape and weights of a checkpoint, or random ones of the default size."""
    if checkpoint:
        from strop.model.checkpoint import load_checkpoint

        return load_checkpoint(checkpoint)
    decoder = Decoder(TINY)
    decoder.initialise(torch.Generator().manual_seed(0), std=0.05)
    return TINY, {name: tensor.detach() for name, tensor in decoder.state_dict().items()}


class Ours:
    """The engine, one session for each prompt."""

    def __init__(self, shape: DecoderConfig, weights: dict[str, Any], batch: int, tokens: int, threads: int, offload: bool) -> None:
        config = EngineConfig(max_sessions=batch, max_batch=batch, max_tokens=tokens, prefill_rows=2048)
        self.engine = EmbeddedEngine(config, InferenceModel(shape, weights, threads=threads), seed=0, offload=offload)

    async def run(self, prompts: np.ndarray, new: int, temperature: float, tag: str) -> tuple[Seconds, np.ndarray]:
        """Seconds and sampled tokens ``[batch, new]``."""

        async def one(index: int) -> np.ndarray:
            session = await self.engine.open(EpisodeKey(phase="bench", step=0, task_id=tag, sample=index))
            result = await session.generate(prompts[index].tolist(), max_new_tokens=new, stop_ids=[], temperature=temperature)
            await session.close()
            return result.token_ids

        started = Seconds.now()
        tokens = await asyncio.gather(*(one(index) for index in range(len(prompts))))
        return Seconds.now() - started, np.stack(tokens)


class Theirs:
    """transformers, one padded batch."""

    def __init__(self, shape: DecoderConfig, weights: dict[str, Any]) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = shape.to_hf()
        config.pop("architectures")
        config.pop("model_type")
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).eval()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise SystemExit(f"the weights do not fit transformers: missing {missing}, unexpected {unexpected}")

    def run(self, prompts: np.ndarray, new: int, temperature: float) -> tuple[Seconds, np.ndarray]:
        """Seconds and sampled tokens ``[batch, new]``."""
        ids = torch.from_numpy(prompts).long()
        options: dict[str, Any] = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        )
        started = Seconds.now()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        return Seconds.now() - started, out[:, ids.shape[1] :].numpy()


def gemm_limit(size: int = 1024) -> float:
    """Best measured float32 matrix-product rate, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(_timed(lambda: a @ b) for _ in range(8))
    return 2 * size**3 / best / 1e9


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def flops_per_token(c: DecoderConfig, context: int) -> int:
    """Multiply-adds of one decoded token, times two."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 2 * context * c.num_heads * c.head_dim
    experts = c.hidden_size * c.num_experts + c.top_k * 3 * c.hidden_size * c.expert_size
    return 2 * (c.num_layers * (attention + experts) + c.vocab_size * c.hidden_size)


async def compare(args: argparse.Namespace, shape: DecoderConfig, weights: dict[str, Any], batch: int, limit: float) -> dict[str, Any]:
    """Measure one batch size."""
    rng = np.random.default_rng(batch)
    theirs = Theirs(shape, weights)
    ours = Ours(shape, weights, batch, args.prompt + args.new, args.threads, not args.inline)

    def prompts() -> np.ndarray:
        return rng.integers(8, shape.vocab_size, (batch, args.prompt)).astype(np.int32)

    check = prompts()
    _, a = await ours.run(check, min(args.new, 16), 0.0, "check")
    _, b = theirs.run(check, min(args.new, 16), 0.0)
    agreement = float((a == b).mean())
    times: dict[str, list[Seconds]] = {name: [] for name in ("ours_one", "ours", "theirs_one", "theirs")}
    for repeat in range(args.repeats):
        fresh = prompts()  # new prompts: the engine would take the old ones from its cache
        times["ours_one"].append((await ours.run(fresh, 1, 1.0, f"one{repeat}"))[0])
        times["theirs_one"].append(theirs.run(fresh, 1, 1.0)[0])
        fresh = prompts()
        times["ours"].append((await ours.run(fresh, args.new, 1.0, f"all{repeat}"))[0])
        times["theirs"].append(theirs.run(fresh, args.new, 1.0)[0])
    await ours.engine.close()
    least = {name: best(values) for name, values in times.items()}
    steps = batch * (args.new - 1)
    decode = {who: least[who] - least[f"{who}_one"] for who in ("ours", "theirs")}
    rate = steps / decode["ours"].wall * flops_per_token(shape, args.prompt + args.new // 2) / 1e9
    return {
        "batch": batch,
        "decode_tokens_per_s": round(steps / decode["ours"].wall),
        "transformers_decode_tokens_per_s": round(steps / decode["theirs"].wall),
        "decode_ratio": round(decode["theirs"].wall / decode["ours"].wall, 2),
        "decode_ratio_cpu": round(decode["theirs"].cpu / decode["ours"].cpu, 2),
        "decode_tokens_per_cpu_s": round(steps / decode["ours"].cpu),
        "total_tokens_per_s": round(batch * args.new / least["ours"].wall),
        "total_ratio": round(least["theirs"].wall / least["ours"].wall, 2),
        "total_ratio_cpu": round(least["theirs"].cpu / least["ours"].cpu, 2),
        "prefill_tokens_per_s": round(batch * args.prompt / least["ours_one"].wall),
        "prefill_tokens_per_cpu_s": round(batch * args.prompt / least["ours_one"].cpu),
        "greedy_agreement": round(agreement, 4),
        "gemm_share": round(rate / limit, 3),
    }


def main() -> None:
    """Measure every batch size, print the record and write it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint")
    parser.add_argument("--inline", action="store_true", help="compute on the event loop instead of a worker thread")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape, weights = load(args.checkpoint)
    limit = gemm_limit()
    rows = [asyncio.run(compare(args, shape, weights, batch, limit)) for batch in args.batch]
    record = {
        "benchmark": "decode",
        "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}",
        "gemm_limit_gflops": round(limit, 1),
        "settings": {"prompt": args.prompt, "new": args.new, "repeats": args.repeats, "offload": not args.inline},
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
