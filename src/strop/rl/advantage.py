"""From graded groups to samples with credit. Pure: no torch, no waiting, no clock.

Every episode that enters leaves exactly once: as a trained sample's episode, as ``dropped[reason]`` or as ``failed[reason]``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strop.core.episode import Episode, EpisodeKey
from strop.core.outcome import Failed, Scored, Ungraded
from strop.core.sample import Sample
from strop.rl.call_credit import call_credit

NO_SIGNAL = "no_signal"
"""Reason of episodes whose group has equal rewards, without a price on calls: nothing to learn, gradient exactly zero."""
UNGRADED = "ungraded"
"""Reason of episodes without a verdict."""
QUARANTINED = "quarantined"
"""Reason of episodes that a hack rule takes out of training."""
SMALL_GROUP = "small_group"
"""Reason of the only scored member of a group: one reward has no mean to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What the episodes of one step turned into.

    Example: two groups of 2 with rewards ``[1, 0]`` and ``[0, 0]`` give 2 samples with advantages ``+.5`` and ``-.5``,
    ``trained == 2``, ``dropped == {"no_signal": 2}``, ``num_groups == 2``, ``groups_no_signal == 1``.

    Attributes:
        samples: Samples that train, sorted by episode key and trace.
        trained: Episodes that have a sample.
        dropped: Episodes left out on purpose, by reason.
        failed: Episodes lost to machinery, by the class of the error.
        num_groups: Groups with at least two scored members.
        groups_no_signal: Those of them with equal rewards; they train only if wasted calls have a price.
        rewards: Rewards as trained on (after a permutation), ``float64 [scored]``, in the order of the sorted keys.
        advantages: Advantage of every trained episode, ``float64 [trained]``; 0 without a signal.
    """

    samples: tuple[Sample, ...]
    trained: int
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    num_groups: int
    groups_no_signal: int
    rewards: np.ndarray
    advantages: np.ndarray


def sort_key(key: EpisodeKey) -> tuple[str, int, str, int]:
    """Return the order of episodes everywhere in training: phase, step, task, sample."""
    return (key.phase, key.step, key.task_id, key.sample)


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """Return reward minus group mean, ``float64 [G]``; exactly zero when all rewards are equal.

    No division by the deviation: it would blow up tiny differences inside groups that are almost equally good.

    Source: Liu et al., "Understanding R1-Zero-Like Training" (Dr.GRPO), arXiv 2503.20783, eq. 3.

    Raises:
        ValueError: A reward that isn't finite, or no reward.
    """
    if not rewards or not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards of a group must be finite numbers, got {list(rewards)}")
    if all(reward == rewards[0] for reward in rewards):
        return np.zeros(len(rewards))
    mean = math.fsum(rewards) / len(rewards)
    return np.array([reward - mean for reward in rewards])


def permuted_rewards(rewards: Sequence[float], groups: Sequence[Sequence[int]], random: np.random.Generator) -> list[float]:
    """Return the rewards of a batch with those of each group in random order: no relation to what earned them (a control experiment).

    Not over the whole batch: there almost every group would get a signal, and the control would take larger steps than the run.

    Args:
        rewards: Of all scored episodes.
        groups: Positions of the members of each group.
        random: Decides the order.
    """
    permuted = list(rewards)
    for members in groups:
        for index, other in zip(members, random.permutation(np.asarray(members)), strict=True):
            permuted[index] = rewards[other]
    return permuted


def assign_credit(
    episodes: Sequence[Episode],
    *,
    permutation: np.random.Generator | None = None,
    reward_of: Callable[[Scored], float | None] | None = None,
    wasted_call_cost: float = 0.0,
    right_edit_credit: float = 0.0,
    instructions: Mapping[str, str] | None = None,
) -> Credit:
    """Turn the episodes of one step into samples.

    A group is the episodes of one task. Members that are ``Ungraded`` or ``Failed`` are counted and left out; the mean is over the
    scored members if at least two remain. Episodes that a limit ended are trained like any other. The advantage stands on every
    sampled token of every trace, summaries included; with a price on wasted calls or right edits, the credit of each call
    is added on its own tokens. Groups of equal rewards have no advantage; they train only where wasted calls have a price, for that alone.

    Args:
        episodes: Graded episodes in any order; the result doesn't depend on it.
        permutation: Where set, rewards are permuted within each group first, and the credit of calls within each tool.
        reward_of: Reward to train on, or ``None`` for an episode that leaves training (``strop.grading.quarantine``); by default that
            of the verdict.
        wasted_call_cost: See ``strop.rl.call_credit``.
        right_edit_credit: The same.
        instructions: The same.

    Raises:
        ValueError: An episode without an outcome, or two with the same key.
    """
    ordered = sorted(episodes, key=lambda episode: sort_key(episode.key))
    if len({episode.key for episode in ordered}) != len(ordered):
        raise ValueError("two episodes of a batch have the same key")
    scored, dropped, failed = _sort_out(ordered, reward_of or (lambda outcome: outcome.reward))
    rewards = [reward for _, reward in scored]
    groups = _by_task([episode for episode, _ in scored])
    if permutation is not None:
        rewards = permuted_rewards(rewards, groups, permutation)
    trained: list[tuple[Episode, float, float]] = []
    even: list[tuple[Episode, float, float]] = []
    num_groups = no_signal = 0
    for members in groups:
        if len(members) < 2:
            dropped[SMALL_GROUP] += len(members)
            continue
        num_groups += 1
        values = group_advantages([rewards[index] for index in members])
        if not values.any():
            no_signal += 1
            if not wasted_call_cost:
                dropped[NO_SIGNAL] += len(members)
                continue
        group = even if not values.any() else trained
        group += [(scored[index][0], rewards[index], float(value)) for index, value in zip(members, values, strict=True)]
    # Each over exactly what it trains: a baseline of calls that leave training would hand the others a credit that nobody pays.
    right = call_credit(_rewarded(trained), right_edit_credit=right_edit_credit, permutation=permutation)
    trained = sorted(trained + even, key=lambda item: sort_key(item[0].key))
    calls = call_credit(_rewarded(trained), wasted_call_cost=wasted_call_cost, instructions=instructions, permutation=permutation)
    samples = [
        sample for episode, _, value in trained for sample in _samples(episode, value, calls[episode.key] + right.get(episode.key, 0.0))
    ]
    return Credit(
        samples=tuple(samples),
        trained=len(trained),
        dropped=dict(dropped),
        failed=dict(failed),
        num_groups=num_groups,
        groups_no_signal=no_signal,
        rewards=np.array(rewards, dtype=np.float64),
        advantages=np.array([value for *_, value in trained], dtype=np.float64),
    )


def _rewarded(items: Sequence[tuple[Episode, float, float]]) -> list[tuple[Episode, float]]:
    return [(episode, reward) for episode, reward, _ in items]


def _by_task(episodes: Sequence[Episode]) -> list[list[int]]:
    """Return the positions of the members of each group."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault((episode.key.phase, episode.key.step, episode.key.task_id), []).append(index)
    return [*groups.values()]


def _sort_out(
    ordered: Sequence[Episode], reward_of: Callable[[Scored], float | None]
) -> tuple[list[tuple[Episode, float]], Counter[str], Counter[str]]:
    """Return the scored episodes with their rewards, and counts of the ungraded and the failed ones."""
    scored: list[tuple[Episode, float]] = []
    dropped: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for episode in ordered:
        match episode.outcome:
            case Scored() as outcome:
                reward = reward_of(outcome)
                if reward is None:
                    dropped[QUARANTINED] += 1
                else:
                    scored.append((episode, reward))
            case Ungraded():
                dropped[UNGRADED] += 1
            case Failed(error=error):
                failed[failure_class(error)] += 1
            case None:
                raise ValueError(f"episode {episode.key} has no outcome")
    return scored, dropped, failed


def failure_class(error: str) -> str:
    """Return the reason under which a failure is counted: the text before its first colon, as one word."""
    head = error.partition(":")[0].strip()
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in head)[:40] or "unknown"


def _samples(episode: Episode, advantage: float, calls: np.ndarray) -> list[Sample]:
    values = [np.where(trace.loss_mask, np.float32(advantage), np.float32(0)) for trace in episode.traces]
    for turn, credit in zip(episode.turns, calls, strict=True):
        tokens = slice(turn.start, turn.end)
        values[turn.trace][tokens] += np.where(episode.traces[turn.trace].loss_mask[tokens], np.float32(credit), np.float32(0))
    return [Sample(key=episode.key, trace=trace, advantage=value) for trace, value in zip(episode.traces, values, strict=True)]
