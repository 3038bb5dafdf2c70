"""Random search over the valid edits of a task: what a policy that finds bugs must beat at the same budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from strop.agent.baselines import RandomEdits
from strop.core.episode import EpisodeKey
from strop.core.task import Task
from strop.midtrain.phase import RepairTasks


def random_edits(pool: RepairTasks, task: Task, key: EpisodeKey, *, seed: int, by_kind: bool) -> RandomEdits:
    """Return a random searcher over the valid edits of the function under repair, which it is told.

    Args:
        pool: Its pool.
        task: The task.
        key: Names the episode.
        seed: Of the order.
        by_kind: Draw kinds as the pool draws its bugs (no blind order finds them sooner), instead of all edits alike.

    Kinds that the pool's training tasks don't have are not tried: whoever can look at the training tasks knows as much.
    """
    path, _ = pool.function(task)
    known = Counter(other.provenance["kind"] for other in pool.tasks("train"))
    candidates = [edit for edit in pool.candidates(task) if edit.kind in known]
    weights = kind_weights([edit.kind for edit in candidates], known) if by_kind else None
    return RandomEdits(path, candidates, seed=seed, key=key, weights=weights)


def kind_weights(kinds: Sequence[str], frequency: Mapping[str, float]) -> list[float]:
    """Return a weight for each candidate: its kind's frequency, shared by the candidates of that kind.

    Example: candidates of the kinds ``a, a, b`` with frequencies ``{"a": 6, "b": 1}`` weigh ``3, 3, 1``.
    """
    counts = Counter(kinds)
    return [frequency[kind] / counts[kind] for kind in kinds]
