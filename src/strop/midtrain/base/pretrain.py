"""Pre-trains the tiny base: resumable, with progress; the learning rate falls linearly over the last ``decay_frac`` of the schedule.

State lives in one directory: ``tokenizer.json``, ``state.pt`` (ours, weights-only readable), ``log.jsonl``, and at the end ``model/`` in
Hugging Face layout.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from strop.agent.compact import content_tokenizer
from strop.core.errors import NumericsError
from strop.midtrain.base.corpus import Module
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.mixture import CURRICULUM
from strop.midtrain.base.muon import Muon
from strop.midtrain.base.wiring import wire
from strop.midtrain.base.writer import Document
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens, balance_loss
from strop.model.training import TrainModel

TINY = DecoderConfig(
    vocab_size=3072,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    top_k=2,
    expert_size=128,
    rope_theta=1e6,  # half of the dimensions then turn by less than a radian over 1,000 tokens: they can match content at any distance
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Settings of the base.

    Attributes:
        total_tokens: Length of the schedule, in tokens.
        batch_tokens: Tokens of one optimizer step while documents come from ``CURRICULUM``; copying forms in steps, not in tokens.
        late_batch_tokens: The same afterwards: an update of Muon costs as much as 2,000 tokens.
        learning_rate: Of Muon after the warm-up; AdamW (embedding, router, norms) has half of it.
        warmup_steps: Steps with a rising learning rate.
        decay_frac: Share of the schedule with a falling learning rate.
        seed: Fixes initial weights and documents.
        threads: CPU threads.
    """

    total_tokens: int = 80_000_000
    batch_tokens: int = 2048
    late_batch_tokens: int = 4096
    learning_rate: float = 6e-3
    warmup_steps: int = 60
    decay_frac: float = 0.7
    balance: float = 0.01
    seed: int = 0
    threads: int = 2


class Pretrainer:
    """Owns the model, the optimizer and the position in the document stream."""

    def __init__(self, config: PretrainConfig, modules: list[Module], tokenizer: Tokenizer, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.maker = DocumentMaker(modules, content_tokenizer(tokenizer), config.seed)
        fresh = Decoder(TINY)
        fresh.initialise(torch.Generator().manual_seed(config.seed))
        wire(fresh, self.maker.number_ids)
        self.model = TrainModel(TINY, fresh.state_dict(), mode="exact", threads=config.threads)
        named = [(name, self.model.parameters[name]) for name, _ in fresh.named_parameters()]
        hidden = [p for n, p in named if p.ndim >= 2 and not n.endswith(("embed_tokens.weight", "gate.weight"))]
        others = [p for n, p in named if p.ndim < 2 or n.endswith(("embed_tokens.weight", "gate.weight"))]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(hidden, lr=config.learning_rate),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
        ]
        self.step, self.tokens, self.document = 0, 0, 0
        self._pending: list[Document] = []

    def load(self) -> bool:
        """Continue from ``state.pt`` if there is one."""
        path = self.directory / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.model.parameters.items():
                parameter.copy_(state["model"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.document = state["position"]
        return True

    def save(self) -> None:
        """Write the state atomically."""
        partial = self.directory / "state.pt.partial"
        position = (self.step, self.tokens, self.document)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": dict(self.model.weights()), "optimizers": optimizers, "position": position}, partial)
        os.replace(partial, self.directory / "state.pt")

    def batch(self) -> list[Document]:
        """Return the next documents, about ``batch_tokens`` tokens, of similar length.

        Four batches' worth is drawn at once and sorted by length, so that padding inside attention stays small.
        """
        size = self.config.batch_tokens if self.document < CURRICULUM[-1][0] else self.config.late_batch_tokens
        if not self._pending:
            drawn: list[Document] = []
            while sum(map(len, drawn)) < 4 * size:
                drawn.append(self.maker.make(self.document))
                self.document += 1
            self._pending = sorted(drawn, key=len)
        chosen: list[Document] = []
        while self._pending and sum(map(len, chosen)) < size:
            chosen.append(self._pending.pop())
        return chosen

    def learning_rate(self) -> float:
        """Learning rate of the coming step."""
        c = self.config
        left = (c.total_tokens - self.tokens) / (c.decay_frac * c.total_tokens)
        return c.learning_rate * min(1.0, (self.step + 1) / c.warmup_steps, max(left, 0.03))

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step and return its figures."""
        documents = self.batch()
        packed, targets, rows, weights, actions = pack(documents)
        out = self.model.forward(packed, want=rows, targets=targets)
        losses = -out.logprobs
        loss = (losses * weights).sum() / weights.sum()
        total = loss + self.config.balance * balance_loss(out.router_logits, out.expert_ids, TINY.num_experts)
        if not torch.isfinite(total):
            raise NumericsError(f"pre-training loss is {total.item()} at step {self.step}; weights are those of the last save")
        for parameter in self.model.parameters.values():
            parameter.grad = None
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters.values(), 1.0)
        rate = self.learning_rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate if isinstance(optimizer, Muon) else rate / 2
            optimizer.step()
        self.step += 1
        self.tokens += len(packed.token_ids)
        with torch.no_grad():
            action = float(losses[actions].mean()) if actions.any() else float("nan")
            text = float(losses[~actions].mean()) if (~actions).any() else float("nan")
        return {"loss": float(loss.detach()), "action_loss": action, "text_loss": text, "grad_norm": float(norm), "lr": rate}


def pack(documents: list[Document]) -> tuple[PackedTokens, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed tokens, and for every learned token: target id, row that predicts it, weight, whether it's an action."""
    packed = PackedTokens.of([torch.from_numpy(d.token_ids) for d in documents])
    weights = np.concatenate([d.weights for d in documents])
    actions = np.concatenate([d.is_action for d in documents])
    learned = np.flatnonzero(weights > 0)
    return (
        packed,
        packed.token_ids[torch.from_numpy(learned)],
        torch.from_numpy(learned - 1),
        torch.from_numpy(weights[learned]),
        torch.from_numpy(actions[learned]),
    )


def pretrain(
    config: PretrainConfig, modules: list[Module], tokenizer: Tokenizer, directory: Path, *, deadline_s: float | None = None
) -> Pretrainer:
    """Train until the schedule ends (or ``deadline_s`` seconds passed), saving every two minutes and on Ctrl-C."""
    torch.set_num_threads(config.threads)
    trainer = Pretrainer(config, modules, tokenizer, directory)
    resumed = trainer.load()
    print(f"{'resumed' if resumed else 'started'} at {trainer.tokens:,} of {config.total_tokens:,} tokens", flush=True)
    begin, saved, first = time.monotonic(), time.monotonic(), trainer.tokens
    figures: list[dict[str, float]] = []
    try:
        while trainer.tokens < config.total_tokens and (deadline_s is None or time.monotonic() - begin < deadline_s):
            figures.append(trainer.train_step())
            if trainer.step % 25 == 0:
                rate = (trainer.tokens - first) / (time.monotonic() - begin)
                mean = {k: float(np.nanmean([f[k] for f in figures])) for k in figures[0]}
                figures.clear()
                left = (config.total_tokens - trainer.tokens) / rate / 60
                row = {"step": trainer.step, "tokens": trainer.tokens, "tokens_per_s": rate, **mean}
                with (directory / "log.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"step {trainer.step:5d}  {trainer.tokens / 1e6:6.2f} M tokens  {rate:6.0f} tok/s  {left:5.1f} min left  "
                    f"loss {mean['loss']:.3f}  action {mean['action_loss']:.3f}  text {mean['text_loss']:.3f}  lr {mean['lr']:.1e}",
                    flush=True,
                )
            if time.monotonic() - saved > 120:
                trainer.save()
                saved = time.monotonic()
    finally:
        trainer.save()
    return trainer


def describe(config: PretrainConfig) -> dict[str, object]:
    """Settings as plain data, for the model card."""
    return asdict(config)
