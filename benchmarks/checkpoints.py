"""Do other programs load our checkpoints unchanged and compute the same? transformers and vLLM against strop's own kernels.

    python benchmarks/checkpoints.py                                             (transformers only)
    python benchmarks/checkpoints.py --vllm build/venv-vllm/bin/python           (both; make test-vllm does this)
    python benchmarks/checkpoints.py --model runs/quickstart/checkpoints/rl      (one more checkpoint)

A fresh random checkpoint and the shipped base are compared on fixed streams, token by token, in float32. Exit code 1 if one differs by
more than its tolerance, or if planted damage to a checkpoint would not have been noticed. Writes docs/results/main-checkpoint-*.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.cli.models import ASSETS
from strop.core.random import generator
from strop.model.checkpoint import load_checkpoint, save_checkpoint
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder
from strop.model.inference import InferenceModel, KVCache, Rows
from strop.ui.results import write_result

TOLERANCE_NATS = {"transformers": 2e-4, "vllm": 1e-3}
"""Largest |difference| of a token's log-probability. Float32 sums in another order give about 1e-5; a wrong tensor gives 0.01 and more."""
NUM_STREAMS, LENGTH = 12, 160

Scores = list[np.ndarray]
"""For each stream the log-probabilities of all its tokens but the first, ``float [length - 1]``."""


def random_checkpoint(directory: Path, tokenizer_from: Path) -> None:
    """Write a checkpoint of the shipped sizes with random weights whose attention and routing are uneven."""
    config = DecoderConfig.from_hf(json.loads((tokenizer_from / "config.json").read_text(encoding="utf-8")))
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(7), std=0.15)
    save_checkpoint(directory, config, decoder.state_dict(), tokenizer_from=tokenizer_from)


def streams_of(vocab_size: int) -> list[np.ndarray]:
    """Fixed token streams of different lengths."""
    draw = generator("checkpoints", vocab_size)
    return [draw.integers(0, vocab_size, LENGTH - 11 * number, dtype=np.int32) for number in range(NUM_STREAMS)]


def score_strop(config: DecoderConfig, weights: Any, streams: Sequence[np.ndarray]) -> Scores:
    """Score with the embedded engine's kernels."""
    model = InferenceModel(config, weights, threads=1)
    scores = []
    for stream in streams:
        count = len(stream) - 1
        rows = Rows(stream[:-1], np.arange(count, dtype=np.int32), np.zeros(count, np.int32))
        logits = model.infer(rows, KVCache(config, 1, len(stream)), np.arange(count, dtype=np.int32)).logits
        scores.append(model.logprobs(logits, stream[1:], 1.0)[0])
    return scores


@torch.no_grad()
def score_transformers(directory: Path, streams: Sequence[np.ndarray]) -> tuple[Scores, str]:
    """Score with transformers; also returns the class that the checkpoint names.

    Raises:
        SystemExit: transformers finds a tensor missing, left over or misshapen.
    """
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    model, loading = found
    wrong = {key: sorted(value) for key, value in loading.items() if value and key != "error_msgs"}
    if wrong:
        raise SystemExit(f"transformers does not load {directory} unchanged: {wrong}")
    model.eval()
    scores = []
    for stream in streams:
        ids = torch.from_numpy(stream.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        scores.append(logprobs.gather(1, ids[1:, None])[:, 0].numpy())
    return scores, type(model).__name__


def score_vllm(python: Path, directories: Sequence[Path], streams: Sequence[Sequence[np.ndarray]]) -> list[dict[str, Any]]:
    """Score with vLLM in its own environment, one process for each checkpoint; see ``vllm_logprobs.py``."""
    answers = []
    for directory, own in zip(directories, streams, strict=True):
        with tempfile.TemporaryDirectory() as scratch:
            jobs, found = Path(scratch) / "jobs.json", Path(scratch) / "answers.json"
            jobs.write_text(json.dumps([{"model": str(directory.resolve()), "streams": [stream.tolist() for stream in own]}]))
            script = Path(__file__).with_name("vllm_logprobs.py")
            subprocess.run([str(python), str(script), str(jobs), str(found)], check=True)
            answers += json.loads(found.read_text())
    return answers


def largest(one: Scores, two: Scores) -> float:
    """Largest absolute difference over all tokens."""
    return float(np.abs(np.concatenate(one).astype(np.float64) - np.concatenate(two)).max())


def planted_damage(config: DecoderConfig, weights: Any, streams: Sequence[np.ndarray], honest: Scores) -> dict[str, float]:
    """What ways of exporting a checkpoint wrongly would change: the comparison must be able to see each."""

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[1:2], tensor[:1], tensor[2:]])

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)

    layer = "model.layers.0."
    faults: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "two experts swapped": (f"{layer}mlp.experts.down_proj", swapped),
        "gate and up swapped": (f"{layer}mlp.experts.gate_up_proj", halves),
        "a norm left at 1": (f"{layer}self_attn.q_norm.weight", lambda tensor: torch.ones_like(tensor) * 1.1),
        "one router row doubled": (f"{layer}mlp.gate.weight", lambda tensor: torch.cat([2 * tensor[:1], tensor[1:]])),
    }
    found = {}
    for name, (key, change) in faults.items():
        damaged = dict(weights) | {key: change(weights[key])}
        found[name] = largest(honest, score_strop(config, damaged, streams))
    return found


def report(name: str, differences: dict[str, float], damage: float, command: str, **details: Any) -> bool:
    """Write one bar; returns whether it is met."""
    worst, tolerance = max(differences.values()), TOLERANCE_NATS[name]
    met = worst <= tolerance < damage / 5
    write_result(
        f"main-checkpoint-{name}",
        bar=f"checkpoints load unchanged in {name} with equal log-probabilities",
        goal=f"largest difference <= {tolerance:g} nats",
        figure=worst,
        unit="nats",
        met=met,
        command=command,
        notes=f"Float32, {NUM_STREAMS} streams of up to {LENGTH} random tokens for each checkpoint. The smallest of four planted faults of "
        f"an export changes a log-probability by {damage:.2g} nats.",
        details={"by_checkpoint": differences, **details},
    )
    figures = f"largest difference {worst:.3g} nats (tolerance {tolerance:g}), smallest planted fault {damage:.2g}"
    print(f"{name}: {figures}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="DIR", help="one more checkpoint; repeatable")
    options = parser.parse_args()
    shipped = ASSETS / "models" / "tiny"
    with tempfile.TemporaryDirectory(prefix="strop-checkpoint-") as scratch:
        fresh = Path(scratch) / "random"
        random_checkpoint(fresh, shipped)
        named = {"random": fresh, "shipped base": shipped} | {str(path): path for path in options.model}
        loaded = {name: load_checkpoint(path) for name, path in named.items()}
        streams = {name: streams_of(config.vocab_size) for name, (config, _) in loaded.items()}
        ours = {name: score_strop(config, weights, streams[name]) for name, (config, weights) in loaded.items()}
        damage = planted_damage(*loaded["random"], streams["random"], ours["random"])

        theirs = {name: score_transformers(path, streams[name]) for name, path in named.items()}
        differences = {name: largest(ours[name], scores) for name, (scores, _) in theirs.items()}
        classes = sorted({kind for _, kind in theirs.values()})
        command = "python benchmarks/checkpoints.py"
        is_met = report("transformers", differences, min(damage.values()), command, classes=classes, planted_faults=damage)
        if options.vllm:
            answers = dict(zip(named, score_vllm(options.vllm, list(named.values()), list(streams.values())), strict=True))
            differences = {name: largest(ours[name], [np.array(row) for row in answer["logprobs"]]) for name, answer in answers.items()}
            first = next(iter(answers.values()))
            details = {"vllm": first["version"], "classes": first["model_class"], "planted_faults": damage}
            is_met &= report("vllm", differences, min(damage.values()), "make test-vllm", **details)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
