"""The teaching file teaches something that works: it stays short and its policy learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

PATH = Path(__file__).parents[2] / "examples" / "one_file_rl.py"


def test_it_learns_and_stays_short() -> None:
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 300
    spec = importlib.util.spec_from_file_location("one_file_rl", PATH)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tasks = [example.make_task(number) for number in range(example.NUMBERS)]
    policy = example.make_policy(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rewards = []
    for step in range(24):
        batch, reward = example.credit(example.rollout(policy, tasks, 12, step=step, seed=0), step=step)
        update = example.train(policy, optimizer, batch)
        rewards.append(reward)
        assert update.metrics["numerics/logprob_diff_max_nats"] < 1e-4
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.1
