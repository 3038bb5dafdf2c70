"""Log-probabilities of given token streams under a checkpoint, as vLLM computes them.

Runs in vLLM's own environment and needs nothing of strop:

    build/venv-vllm/bin/python benchmarks/vllm_logprobs.py JOBS.json ANSWERS.json

JOBS: ``[{"model": directory, "streams": [[id, ...], ...]}]``. ANSWERS: per job ``{"logprobs": [[...]], "greedy": [...], "version": ...,
"model_class": ...}``: of every token but a stream's first, and the likeliest token after each stream.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: nothing to clean up
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def measure(model: str, streams: list[list[int]]) -> dict[str, Any]:
    """Load one checkpoint and score its streams."""
    import vllm

    longest = max(map(len, streams)) + 1
    engine = vllm.LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=len(streams),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": stream} for stream in streams], sampling, use_tqdm=False)
    logprobs = []
    for stream, answer in zip(streams, answers, strict=True):
        scored = answer.prompt_logprobs
        logprobs.append([float(scored[at][token].logprob) for at, token in enumerate(stream) if at])
    return {
        "logprobs": logprobs,
        "greedy": [int(answer.outputs[0].token_ids[0]) for answer in answers],
        "version": vllm.__version__,
        "model_class": ", ".join(engine.llm_engine.model_config.architectures),
    }


def main() -> None:
    """Command line."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([measure(job["model"], job["streams"]) for job in jobs]))


if __name__ == "__main__":
    main()
