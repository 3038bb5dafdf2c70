"""Reinforcement learning of an agent in one file: the loop of ``strop.rl.loop``, small enough to read in one sitting.

The agent plays "find the number": an environment hides a number from 1 to 7, the agent guesses, the environment answers "higher" or
"lower", and the reward is 1 if the number is found within three guesses. A blind policy finds it 3 times in 7; halving finds it always.
Nobody shows the policy how: it is a randomly initialised Mixture-of-Experts transformer and learns from rewards alone.

Run it (about a minute on one core):  python examples/one_file_rl.py

What carries over to the real thing, type by type: a ``Task`` becomes ``Episode``s (tokens in = tokens out, a loss mask, the sampler's
log-probabilities, the experts that every token used), grading gives each an ``Outcome``, groups become ``Sample``s with an advantage, a
``Batch`` becomes an ``Update``. What is missing here and matters there: sandboxes, an engine with a cache, asynchrony, resuming, and
numerics that agree to the last bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strop.core.episode import Episode, EpisodeKey, Trace, Turn, VersionSpan
from strop.core.outcome import Outcome, Scored
from strop.core.random import uniforms
from strop.core.routes import Routes
from strop.core.sample import Batch, Sample, Update
from strop.core.task import Limits, Task
from strop.model.config import DecoderConfig
from strop.model.decoder import Decoder, PackedTokens, balance_loss

# ------------------------------------------------------------------------------------------------ the environment

NUMBERS = 7
BEGIN, HIGHER, LOWER, FOUND = range(NUMBERS, NUMBERS + 4)  # tokens; 0 to 6 stand for the numbers 1 to 7
VOCAB = NUMBERS + 4
NAMES = {HIGHER: "higher", LOWER: "lower", FOUND: "found"}


def make_task(number: int) -> Task:
    """A task names no answer: ``verifier`` is a locator that only the grader resolves."""
    return Task(
        task_id=f"find/{number}",
        instruction="Find the number.",
        workspace="",
        tools=("guess",),
        verifier=str(number),
        split="train",
        limits=Limits(max_turns=3, max_tokens=16, max_new_tokens=1),
    )


def answer(task: Task, guess: int) -> int:
    """What the environment says to a guess, as a token."""
    hidden = int(task.verifier)
    return FOUND if guess == hidden else HIGHER if guess < hidden else LOWER


def grade(episode: Episode) -> Outcome:
    """Reward from evidence: did the environment, not the agent, ever say "found"?"""
    return Scored(reward=float(any(turn.observation == NAMES[FOUND] for turn in episode.turns)))


# ------------------------------------------------------------------------------------------------ the policy


def make_policy(seed: int) -> Decoder:
    """A random four-expert transformer with about 30,000 parameters."""
    config = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=4,
        top_k=2,
        expert_size=32,
        norm_topk_prob=True,
    )
    policy = Decoder(config)
    policy.initialise(torch.Generator().manual_seed(seed), std=0.1)
    return policy


# ------------------------------------------------------------------------------------------------ rollout: task -> episode


class Stream:
    """The tokens of one episode while it runs."""

    def __init__(self, task: Task, key: EpisodeKey) -> None:
        self.task, self.key = task, key
        self.ids, self.mask, self.logprobs = [BEGIN], [False], [0.0]
        self.turns: list[Turn] = []
        self.routes: np.ndarray = np.zeros((0, 2, 2), np.uint8)
        self.is_done = False

    def act(self, guess: int, logprob: float) -> None:
        """Append the sampled token and the environment's answer. Nothing is ever tokenised again."""
        start, said = len(self.ids), answer(self.task, guess)
        self.ids += [guess, said]
        self.mask += [True, False]
        self.logprobs += [logprob, 0.0]
        self.turns.append(
            Turn(
                trace=0,
                start=start,
                end=start + 1,
                call="guess",
                arguments={"number": str(guess)},
                text=str(guess + 1),
                observation=NAMES[said],
                status="ok",
            )
        )
        self.is_done = said == FOUND or len(self.turns) == self.task.limits.max_turns

    def episode(self, version: int) -> Episode:
        """The finished episode, stamped with the policy version that played it."""
        rows = len(self.ids) - 1  # the last guess was never fed: its row has no routes, and says so
        routes = np.concatenate([self.routes, np.zeros((rows - len(self.routes), 2, 2), np.uint8)])
        trace = Trace(
            token_ids=np.array(self.ids, np.int32),
            loss_mask=np.array(self.mask),
            logprobs=np.array(self.logprobs, np.float32),
            versions=(VersionSpan(start=0, end=len(self.ids), version=version),),
            routes=Routes(expert_ids=routes, valid=np.arange(rows) < len(self.routes)),
        )
        stop = "submitted" if self.turns[-1].observation == NAMES[FOUND] else "max_turns"
        return Episode(key=self.key, traces=(trace,), turns=tuple(self.turns), stop_reason=stop)


@torch.no_grad()
def rollout(policy: Decoder, tasks: Sequence[Task], samples: int, *, step: int, seed: int, phase: str = "rl") -> list[Episode]:
    """Play ``samples`` episodes of every task at once. Sampling is keyed by (seed, episode, position): no result depends on batch mates."""
    streams = [Stream(t, EpisodeKey(phase=phase, step=step, task_id=t.task_id, sample=s)) for t in tasks for s in range(samples)]
    while running := [stream for stream in streams if not stream.is_done]:
        packed = PackedTokens.of([torch.tensor(stream.ids) for stream in running])
        forward = policy(packed)
        ends = torch.tensor(packed.lengths).cumsum(0)
        logprobs = policy.logits(forward.hidden[ends - 1])[:, :NUMBERS].log_softmax(-1)
        for row, stream in enumerate(running):
            stream.routes = forward.expert_ids[ends[row] - len(stream.ids) : ends[row]].numpy().astype(np.uint8)
            cumulative = logprobs[row].double().exp().cumsum(0).numpy()
            draw = uniforms(seed, stream.key, len(stream.ids), 1)[0]
            guess = min(int((cumulative <= draw * cumulative[-1]).sum()), NUMBERS - 1)
            stream.act(guess, float(logprobs[row, guess]))
    return [stream.episode(version=step) for stream in streams]


# ------------------------------------------------------------------------------------------------ credit: episodes -> batch


def credit(episodes: Sequence[Episode], *, step: int) -> tuple[Batch, float]:
    """Return the batch and the mean reward. Advantage = reward minus the group's mean (Dr.GRPO: no deviation, no length term).

    A group whose rewards are equal teaches nothing and is left out; the divisor stays the same constant.
    """
    groups: dict[str, list[tuple[Episode, float]]] = {}
    for episode in episodes:
        match grade(episode):
            case Scored(reward=reward):  # only a verdict trains; Ungraded and Failed would be counted and left out here
                groups.setdefault(episode.key.task_id, []).append((episode, reward))
    samples = []
    for members in groups.values():
        mean = sum(reward for _, reward in members) / len(members)
        for episode, reward in members:
            trace = episode.traces[0]
            if reward != mean:
                advantage = np.where(trace.loss_mask, np.float32(reward - mean), np.float32(0))
                samples.append(Sample(key=episode.key, trace=trace, advantage=advantage))
    rewards = [reward for members in groups.values() for _, reward in members]
    return Batch(step=step, samples=tuple(samples), normaliser=3.0 * len(episodes)), float(np.mean(rewards))


# ------------------------------------------------------------------------------------------------ update: batch -> weights


def score(policy: Decoder, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the sampled tokens ``[N]``, the router's balance loss, and its choices ``[R, L, K]``.

    Row ``i`` predicts token ``i + 1``, so a trace of L tokens is fed without its last one.
    """
    packed = PackedTokens.of([torch.from_numpy(sample.trace.token_ids[:-1].astype(np.int64)) for sample in samples])
    forward = policy(packed)
    rows = torch.from_numpy(np.concatenate([sample.trace.loss_mask[1:] for sample in samples]))
    targets = torch.from_numpy(np.concatenate([sample.trace.token_ids[1:] for sample in samples]).astype(np.int64))[rows]
    logprobs = policy.logits(forward.hidden[rows])[:, :NUMBERS].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logprobs, balance_loss(forward.router_logits, forward.expert_ids, policy.config.num_experts), forward.expert_ids


def train(policy: Decoder, optimizer: torch.optim.Optimizer, batch: Batch) -> Update:
    """One optimizer step: clipped, importance-weighted policy gradient, summed over tokens, divided by a constant."""
    metrics = {"numerics/logprob_diff_max_nats": 0.0, "routes/mismatch_frac": 0.0}
    if batch.samples:
        policy_logprobs, balance, routes = score(policy, batch.samples)
        generator_logprobs = torch.from_numpy(np.concatenate([s.trace.logprobs[s.trace.loss_mask] for s in batch.samples]))
        advantage = torch.from_numpy(np.concatenate([s.advantage[s.trace.loss_mask] for s in batch.samples]))
        anchor = policy_logprobs.detach()  # the policy at the start of the update: the ratio below is 1, its gradient is not 0
        ratio = (policy_logprobs - anchor).exp()
        importance = (anchor - generator_logprobs).exp().clamp(max=2.0)  # repairs what rollout and trainer compute differently
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = -(gain * importance).sum() / batch.normaliser + 1e-3 * balance
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise RuntimeError(f"gradient norm is {float(norm)}; no weight was changed")
        optimizer.step()
        recorded = np.concatenate([s.trace.routes.expert_ids for s in batch.samples if s.trace.routes is not None])
        valid = np.concatenate([s.trace.routes.valid for s in batch.samples if s.trace.routes is not None])
        metrics["numerics/logprob_diff_max_nats"] = float((anchor - generator_logprobs).abs().max())
        metrics["routes/mismatch_frac"] = float((recorded != routes.numpy())[valid].any(-1).mean())
    return Update(policy_version=batch.step + 1, metrics=metrics, weights_digest="")


# ------------------------------------------------------------------------------------------------ the loop


def show(episode: Episode) -> str:
    """An episode on one line."""
    return " -> ".join(f"{turn.text} {turn.observation}" for turn in episode.turns)


def main() -> None:
    """Train, print the curve, and play three games."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)

    tasks = [make_task(number) for number in range(NUMBERS)]
    policy = make_policy(options.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    began = time.perf_counter()
    rewards: list[float] = []
    for step in range(options.steps):
        episodes = rollout(policy, tasks, options.group_size, step=step, seed=options.seed)
        batch, reward = credit(episodes, step=step)
        update = train(policy, optimizer, batch)
        rewards.append(reward)
        if step % 10 == 9:
            bar = "#" * round(40 * float(np.mean(rewards[-10:])))
            print(
                f"step {step + 1:4d}  success {np.mean(rewards[-10:]):.2f} {bar:40s}  "
                f"max |dlogp| {update.metrics['numerics/logprob_diff_max_nats']:.1e}  "
                f"route mismatch {update.metrics['routes/mismatch_frac']:.3f}  {time.perf_counter() - began:.0f} s"
            )
    final = rollout(policy, tasks, 64, step=options.steps, seed=options.seed, phase="eval")
    success = np.mean([grade(episode).reward for episode in final])  # type: ignore[union-attr]
    print(f"\nsuccess {success:.2f}; blind guessing {3 / NUMBERS:.2f}, halving 1.00. Three games:")
    for episode in final[:: 64 * 3][:3]:
        print(f"  the number is {int(episode.key.task_id.split('/')[1]) + 1}: {show(episode)}")


if __name__ == "__main__":
    main()
