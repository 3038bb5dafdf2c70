"""A world small enough to see through: a bigram policy behind the real engine, real trainer and real loop; fakes only at the ports.

Tokens: 0 pad, 1 stop, 2 begin, 3 submit, 4-5 observation, 6-11 letters. A task's prompt is ``[begin, letter]``; an action is ``[x, stop]``.
``submit`` ends the episode, a letter is a ``list`` call. The reward is 1 if the first sampled token is the task's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.errors import GradingError
from strop.core.outcome import Failed, Outcome, Scored
from strop.core.routes import Routes
from strop.core.sample import Sample
from strop.core.task import Limits, Task
from strop.engine.embedded import EmbeddedEngine
from strop.model.config import DecoderConfig
from strop.rl.trainer import PolicyTrainer

VOCAB, STOP, BEGIN, SUBMIT, OBS, LETTERS = 12, 1, 2, 3, 4, range(6, 12)
SHAPE = DecoderConfig(
    vocab_size=VOCAB, hidden_size=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, num_experts=3, top_k=2, expert_size=4
)
REAL_SHAPE = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    top_k=2,
    expert_size=16,
    norm_topk_prob=True,
    tie_embeddings=True,
)
"""Of the small real mixture of experts that takes the place of ``BigramModel`` where its numbers matter."""


def bigram_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fresh weights: next-token table and router table."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, VOCAB, generator=draw) * 0.1
    table[6:, 6:] += 2.0  # a policy that knows the protocol, so that groups of four see a success now and then
    return {"table": table, "gate": torch.randn(VOCAB, 3, generator=draw)}


def row_logprobs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The one function both sides use, so that they agree to the bit."""
    return (logits.double() / temperature).log_softmax(-1).float()


class BigramModel:
    """A ``ScoringModel``."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def forward(self, packed: Any, *, want: Any, targets: Any, temperature: float = 1.0, forced_routes: Any = None) -> Any:
        logprobs = row_logprobs(self.parameters["table"][packed.token_ids[want]], temperature)
        gate = self.parameters["gate"][packed.token_ids]
        natural = gate.topk(2).indices.sort(-1).values[:, None]
        return SimpleNamespace(
            logprobs=logprobs.gather(1, targets[:, None])[:, 0],
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            router_logits=[gate],
            expert_ids=natural if forced_routes is None else forced_routes,
            natural_ids=natural,
        )


class BigramBackend:
    """A ``ModelBackend``."""

    config = SHAPE

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.load(weights)

    def load(self, weights: Mapping[str, Any]) -> None:
        self.table, self.gate = weights["table"].clone(), weights["gate"].clone()

    def infer(self, rows: Any, cache: Any, want: np.ndarray) -> Any:
        ids = torch.from_numpy(rows.token_ids.astype(np.int64))
        experts = self.gate[ids].topk(2).indices.sort(-1).values[:, None].numpy().astype(np.uint8)
        return SimpleNamespace(logits=self.table[ids[torch.from_numpy(want).long()]].numpy(), expert_ids=experts)

    def sample(self, logits: np.ndarray, uniforms: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        logprobs = row_logprobs(torch.from_numpy(logits), float(temperature[0]) or 1.0).numpy()
        cumulative = np.exp(logprobs.astype(np.float64)).cumsum(-1)
        ids = np.minimum((cumulative < uniforms[:, None] * cumulative[:, -1:]).sum(-1), VOCAB - 1).astype(np.int32)
        return ids, logprobs[np.arange(len(ids)), ids]

    def logprobs(self, logits: np.ndarray, targets: np.ndarray, temperature: Any) -> tuple[np.ndarray, np.ndarray]:
        logprobs = row_logprobs(torch.from_numpy(logits), float(temperature)).numpy()
        return logprobs[np.arange(len(targets)), targets], -(np.exp(logprobs) * logprobs).sum(-1)


class NoCache:
    """A bigram needs none."""

    def copy_prefix(self, src_slot: int, dst_slot: int, n: int) -> None: ...

    def free(self, slot: int) -> None: ...


class ToyPool:
    """``count`` training tasks; letters and answers repeat."""

    def __init__(self, base: Path, count: int) -> None:
        self.base = str(base)
        self._tasks = [
            Task(
                task_id=f"toy/{n:04d}",
                instruction=str(n % len(LETTERS)),
                workspace="",
                tools=("list", "submit"),
                verifier="",
                split="train",
                limits=Limits(max_turns=3, max_tokens=24, max_new_tokens=3, wall_s=60.0),
                provenance={"cluster": f"c{n % len(LETTERS)}"},
            )
            for n in range(count)
        ]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def base_dir(self, task: Task) -> str:
        return self.base


class ToyRenderer:
    stop_ids = (STOP,)

    def render_start(self, task: Task, *, system_prompt: bool) -> list[int]:
        return [BEGIN] * (2 if system_prompt else 1) + [LETTERS[int(task.instruction)]]

    def render_observation(self, text: str) -> list[int]:
        return [OBS, OBS + 1]

    def parse(self, token_ids: Sequence[int]) -> tuple[str, dict[str, str], str]:
        if len(token_ids) == 2 and token_ids[1] == STOP:
            if token_ids[0] == SUBMIT:
                return "submit", {}, "submit"
            if token_ids[0] in LETTERS:
                return "list", {}, "list"
        return "", {}, str(list(token_ids))


class ToyBox:
    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> Any:
        raise NotImplementedError

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> Any:
        raise NotImplementedError

    def read(self, path: str) -> bytes:
        return b"x = 1\n"

    def write(self, path: str, content: bytes | None) -> None: ...

    def list_files(self) -> list[str]:
        return ["a.py"]

    def changes(self) -> dict[str, bytes | None]:
        return {}

    async def stop(self) -> None: ...


class ToyProvider:
    async def start(self, base: str) -> ToyBox:
        await asyncio.sleep(0)
        return ToyBox()

    async def close(self) -> None: ...


class ToyGrader:
    """Reward 1 if the first sampled token is the answer. ``broken`` names samples whose grading breaks."""

    def __init__(self, broken: Sequence[str] = (), jitter: bool = False) -> None:
        self.broken, self.jitter, self.graded = set(broken), jitter, 0

    async def grade(self, task: Task, episode: Episode) -> Outcome:
        self.graded += 1
        if self.jitter:  # finish in another order than dispatched
            await asyncio.sleep(0.002 * (hash(str(episode.key)) % 3))
        if str(episode.key) in self.broken or "*" in self.broken:
            raise GradingError("planted: the verifier died")
        if f"failed:{episode.key}" in self.broken:
            return Failed(error="SandboxError: planted")
        trace = episode.traces[0]
        first = int(trace.token_ids[np.flatnonzero(trace.loss_mask)[0]])
        return Scored(reward=float(first == answer(task)))

    async def close(self) -> None: ...


def answer(task: Task) -> int:
    """The letter after the task's letter."""
    return LETTERS[(int(task.instruction) + 1) % len(LETTERS)]


def toy_config(**changes: Any) -> RunConfig:
    """Three groups of four, exact numerics."""
    rl = {"steps": 3, "groups": 3, "group_size": 4, "learning_rate": 0.2, "warmup_steps": 0, "aux_coefficient": 0.01, "length_constant": 4}
    rl |= changes.pop("rl", {})
    data = {"seed": 1, "rl": rl, "engine": {"max_sessions": 16, "max_tokens": 64}, **changes}
    return RunConfig.model_validate(data)


class ToyWorld:
    """Everything ``run_rl`` takes, fresh; ``ports()`` gives it as keyword arguments."""

    def __init__(self, config: RunConfig, base: Path, *, broken: Sequence[str] = (), jitter: bool = False, offload: bool = False) -> None:
        weights = bigram_weights()
        self.engine = EmbeddedEngine(
            config.engine, BigramBackend(weights), seed=config.seed, make_cache=lambda slots, tokens: NoCache(), offload=offload
        )
        self.trainer = PolicyTrainer(BigramModel(weights), config.rl, config.numerics)
        self.pool = ToyPool(base, max(config.rl.steps * config.rl.groups, 6))
        self.grader = ToyGrader(broken, jitter)

    def ports(self) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "engine": self.engine,
            "sandbox_provider": ToyProvider(),
            "grader": self.grader,
            "renderer": ToyRenderer(),
            "trainer": self.trainer,
        }


def make_trace(
    ids: Sequence[int], mask: Sequence[int], *, logprobs: Sequence[float] | None = None, version: int = 0, routes: np.ndarray | None = None
) -> Trace:
    """A trace from plain lists."""
    n = len(ids)
    sampled = np.array(mask, np.bool_)
    return Trace(
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, np.array(logprobs if logprobs is not None else [-1.0] * n, np.float32), np.float32(0)),
        versions=(VersionSpan(start=0, end=n, version=version),),
        routes=None if routes is None else Routes(expert_ids=routes, valid=np.ones(n - 1, np.bool_)),
    )


def make_episode(task: str, sample: int, outcome: Outcome | None, *, step: int = 0, traces: Sequence[Trace] | None = None) -> Episode:
    """An episode of one short trace."""
    key = EpisodeKey(phase="rl", step=step, task_id=task, sample=sample)
    traces = traces if traces is not None else [make_trace([2, 6, 7, 1], [0, 0, 1, 1])]
    return Episode(key=key, traces=tuple(traces), turns=(), stop_reason="submitted", outcome=outcome)


def make_sample(trace: Trace, advantage: float = 1.0, *, task: str = "t", sample: int = 0, step: int = 0) -> Sample:
    """A sample with one advantage on every sampled token."""
    key = EpisodeKey(phase="rl", step=step, task_id=task, sample=sample)
    return Sample(key=key, trace=trace, advantage=np.where(trace.loss_mask, np.float32(advantage), np.float32(0)))
