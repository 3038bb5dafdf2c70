"""Decoding and training of the exact kernels beside transformers, on the same weights in the same run.

    python benchmarks/model_step.py                 # three rounds, about three minutes on two idle cores
    python benchmarks/model_step.py --rounds 1 --batches 32 --no-write

Rounds alternate between the two sides, so that a busy machine slows both; figures are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strop.midtrain.base.pretrain import TINY
from strop.model.checkpoint import load_checkpoint
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens
from strop.model.inference import InferenceModel, KVCache, Rows
from strop.model.native.bindings import usable_cores
from strop.model.training import TrainModel
from strop.ui.results import write_result


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall and CPU seconds of one run."""

    wall: float
    cpu: float

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.wall - other.wall, self.cpu - other.cpu)


def timed(run: Callable[[], object]) -> Timing:
    """Run once."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def step_flops(config: DecoderConfig, lengths: Sequence[int], wanted: int) -> float:
    """Floating-point operations that one training step needs (forward and twice that for backward), attention counted causally."""
    c, rows = config, sum(lengths)
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    experts = 3 * c.top_k * c.hidden_size * c.expert_size + c.num_experts * c.hidden_size
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    multiplications = rows * c.num_layers * (attention + experts) + pairs * c.num_layers * 2 * c.num_heads * c.head_dim
    return 3 * 2.0 * (multiplications + wanted * c.hidden_size * c.vocab_size)


def gemm_limit() -> float:
    """Operations a second of a large float32 product in torch, best of five."""
    a, b = torch.randn(2, 1024, 1024)
    return 2 * 1024**3 / min(timed(lambda: a @ b).wall for _ in range(5))


class Sides:
    """The same weights on both sides."""

    def __init__(self, checkpoint: Path | None, threads: int) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        if checkpoint is None:
            self.config = TINY
            decoder = Decoder(TINY)
            decoder.initialise(torch.Generator().manual_seed(0), std=0.06)
            weights = {name: w for name, w in decoder.state_dict().items() if name != "lm_head.weight"}
        else:
            self.config, weights = load_checkpoint(checkpoint)
        keys = {k: v for k, v in self.config.to_hf().items() if k not in ("architectures", "model_type")}
        self.theirs: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys))
        self.theirs.load_state_dict(weights, strict=False)
        self.engine = InferenceModel(self.config, weights, threads=threads)
        self.trainer = TrainModel(self.config, weights, threads=threads)
        self.tolerant = TrainModel(self.config, weights, mode="tolerant")

    def decode_theirs(self, prompts: Tensor, new: int) -> Timing:
        """``generate`` with sampling; time from the first new token to the last."""
        marks: list[Timing] = []

        def mark(_ids: Tensor, _scores: object, **_: object) -> Tensor:
            marks.append(Timing(time.perf_counter(), time.process_time()))
            return torch.zeros(len(prompts), dtype=torch.bool)

        mask = torch.ones_like(prompts)
        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        with torch.no_grad():
            self.theirs.generate(prompts, attention_mask=mask, stopping_criteria=[mark], **options)
        return marks[-1] - marks[0]

    def decode_ours(self, prompts: Tensor, new: int, group: int = 1) -> Timing:
        """The same with the kernels: prefill in chunks of 2,048 rows, then one step a token; groups share their prompt."""
        batch, length = prompts.shape
        cache, rng = KVCache(self.config, batch, length + new), np.random.default_rng(0)
        ids, last = prompts.numpy().astype(np.int32), np.empty((batch, self.config.vocab_size), np.float32)
        leaders, per_step = list(range(0, batch, group)), max(1, 2048 // length)
        for at in range(0, len(leaders), per_step):
            slots = np.array(leaders[at : at + per_step])
            rows = Rows(ids[slots].ravel(), np.tile(np.arange(length), len(slots)), np.repeat(slots, length))
            last[slots] = self.engine.infer(rows, cache, np.arange(1, len(slots) + 1) * length - 1).logits
        for slot in range(batch):
            if slot % group:
                cache.copy_prefix(slot - slot % group, slot, length)
                last[slot] = last[slot - slot % group]
        everyone = np.arange(batch)
        tokens, _ = self.engine.sample(last, rng.random(batch), 1.0)
        start = Timing(time.perf_counter(), time.process_time())
        for step in range(new - 1):
            logits = self.engine.infer(Rows(tokens, np.full(batch, length + step), everyone), cache, everyone).logits
            tokens, _ = self.engine.sample(logits, rng.random(batch), 1.0)
        return Timing(time.perf_counter(), time.process_time()) - start

    def train_theirs(self, ids: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """A plain step: all logits, cross entropy, backward, AdamW."""
        optimizer.zero_grad()
        logits = self.theirs(ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    def train_ours(self, model: TrainModel, ids: Tensor, wanted: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """The same step with only the wanted rows scored."""
        optimizer.zero_grad()
        targets = ids.flatten()[wanted + 1]
        (-model.forward(PackedTokens.of(list(ids)), want=wanted, targets=targets).logprobs.mean()).backward()
        optimizer.step()


def decode_figures(sides: Sides, batches: Sequence[int], rounds: int, prompt: int, new: int, group: int) -> dict[str, dict[str, float]]:
    """Tokens a second of both sides and their ratio, for each batch."""
    figures = {}
    for batch in batches:
        prompts = torch.randint(3, sides.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(batch))
        shared = prompts[torch.arange(batch) // group * group]
        rounds_of: dict[str, list[Timing]] = {"theirs": [], "ours": [], "ours_grouped": []}
        sides.decode_theirs(prompts[: batch // 4], 2)
        sides.decode_ours(prompts[: batch // 4], 2)
        for _ in range(rounds):
            rounds_of["theirs"].append(sides.decode_theirs(prompts, new))
            rounds_of["ours"].append(sides.decode_ours(prompts, new))
            rounds_of["ours_grouped"].append(sides.decode_ours(shared, new, group))
        figures[f"batch {batch}"] = summary(rounds_of, batch * (new - 1))
    return figures


def summary(rounds_of: dict[str, list[Timing]], tokens: int) -> dict[str, float]:
    """Medians over rounds: tokens a wall second of each side, and ratios to ``theirs`` by wall and by CPU time."""
    result = {f"{side}_tokens_s": round(tokens / statistics.median(t.wall for t in times), 1) for side, times in rounds_of.items()}
    for side, times in rounds_of.items():
        if side != "theirs":
            pairs = list(zip(rounds_of["theirs"], times, strict=True))
            result[f"{side}_ratio"] = round(statistics.median(a.wall / b.wall for a, b in pairs), 2)
            result[f"{side}_cpu_ratio"] = round(statistics.median(a.cpu / b.cpu for a, b in pairs), 2)
    return result


def train_figures(sides: Sides, rounds: int, episodes: int, length: int, action_share: float) -> dict[str, float]:
    """One optimizer step on episodes of ``length`` tokens: plain transformers, exact, exact with every token scored, and tolerant."""
    ids = torch.randint(3, sides.config.vocab_size, (episodes, length), generator=torch.Generator().manual_seed(7))
    rows = torch.arange(episodes * length).view(episodes, length)[:, :-1].flatten()
    some = rows[torch.rand(len(rows), generator=torch.Generator().manual_seed(8)) < action_share]
    theirs, ours, torch_ours = (
        torch.optim.AdamW(list(p), lr=1e-5)
        for p in (sides.theirs.parameters(), sides.trainer.parameters.values(), sides.tolerant.parameters.values())
    )
    runs: dict[str, Callable[[], None]] = {
        "theirs": lambda: sides.train_theirs(ids, theirs),
        "ours": lambda: sides.train_ours(sides.trainer, ids, some, ours),
        "ours_all_tokens": lambda: sides.train_ours(sides.trainer, ids, rows, ours),
        "tolerant": lambda: sides.train_ours(sides.tolerant, ids, some, torch_ours),
    }
    for run in runs.values():
        run()
    rounds_of: dict[str, list[Timing]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            rounds_of[name].append(timed(run))
    result = summary(rounds_of, episodes * length)
    flops = step_flops(sides.config, [length] * episodes, len(some))
    result["gflops"] = round(flops / statistics.median(t.wall for t in rounds_of["ours"]) / 1e9, 1)
    result["wanted_frac"] = round(len(some) / len(rows), 3)
    return result


def largest_difference(sides: Sides) -> float:
    """Largest difference between the log-probabilities of decoding and of training on the same tokens; must be 0."""
    engine, trainer = sides.engine, sides.trainer
    weights = trainer.weights()
    engine.load(weights)
    rng, batch, prompt, new = np.random.default_rng(1), 16, 40, 60
    cache, streams, recorded = KVCache(sides.config, batch, prompt + new), rng.integers(3, sides.config.vocab_size, (batch, prompt)), []
    slots = np.arange(batch)
    rows = Rows(streams.ravel(), np.tile(np.arange(prompt), batch), np.repeat(slots, prompt))
    logits = engine.infer(rows, cache, np.arange(1, batch + 1) * prompt - 1).logits
    for step in range(new):
        tokens, logprobs = engine.sample(logits, rng.random(batch), 1.0)
        recorded.append(logprobs)
        streams = np.concatenate([streams, tokens[:, None]], axis=1)
        logits = engine.infer(Rows(tokens, np.full(batch, prompt + step), slots), cache, slots).logits
    ids = torch.from_numpy(streams)
    want = torch.arange(batch * (prompt + new)).view(batch, -1)[:, prompt - 1 : -1].flatten()
    out = trainer.forward(PackedTokens.of(list(ids)), want=want, targets=ids[:, prompt:].flatten())
    return float(np.abs(out.logprobs.detach().numpy() - np.stack(recorded, axis=1).ravel()).max())


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, help="model directory; by default fresh weights of the built-in size")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--action-share", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads or usable_cores())
    sides = Sides(options.checkpoint, options.threads)

    difference = largest_difference(sides)
    print(f"largest |difference| between decoding and training log-probabilities: {difference}")
    limit = gemm_limit()
    training = train_figures(sides, options.rounds, options.episodes, options.length, options.action_share)
    training["gemm_limit_gflops"] = round(limit / 1e9, 1)
    training["share_of_gemm_limit"] = round(training["gflops"] * 1e9 / limit, 3)
    print("training step", training)
    decoding = decode_figures(sides, options.batches, options.rounds, options.prompt, options.new, options.group)
    for name, figures in decoding.items():
        print("decode", name, figures)
    if options.no_write:
        return 0
    notes = "torch runs with one thread and with all, the faster counts. Ratios are medians of rounds that alternate between the sides; "
    notes += "*_cpu_ratio compares CPU time, which other jobs disturb less."
    command = "python benchmarks/model_step.py"
    slowest = min(figures["ours_ratio"] for figures in decoding.values())
    write_result(
        "main-throughput-decode",
        bar="decode against transformers generate, batch 32 to 128, different prompts, smallest ratio",
        goal=">= 5x",
        figure=slowest,
        met=slowest >= 5,
        unit="x",
        command=command,
        notes=notes,
        details=decoding,
    )
    write_result(
        "main-throughput-training",
        bar=f"training step against the plain transformers step, episodes of {options.length} tokens",
        goal=">= 1.5x",
        figure=training["ours_ratio"],
        met=training["ours_ratio"] >= 1.5,
        unit="x",
        command=command,
        notes=notes + " theirs: all logits, as plain code does; ours: only action tokens are scored; tolerant: our torch decoder.",
        details=training,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
