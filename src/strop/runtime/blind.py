"""Random search over the valid edits of a task: what a policy that finds bugs must beat at the same budget."""

from __future__ import annotations

from collections.abc import Sequence

from strop.agent.baselines import RandomEdits
from strop.core.episode import EpisodeKey
from strop.core.task import Task
from strop.runtime.build import Parts
from strop.tasks.mutation import IDENTIFIER_KINDS


def random_edits(parts: Parts, task: Task, key: EpisodeKey, *, by_kind: bool) -> RandomEdits:
    """Return a random searcher over the valid edits of the function under repair, which it is told.

    Args:
        parts: The machinery.
        task: The task.
        key: Names the episode.
        by_kind: Draw kinds as the pool draws its bugs (no blind order finds them sooner), instead of all edits alike.
    """
    path, _ = parts.pool.function(task)
    candidates = parts.pool.candidates(task)
    weights = kind_weights([edit.kind for edit in candidates]) if by_kind else None
    return RandomEdits(path, candidates, seed=parts.config.seed, key=key, weights=weights)


def kind_weights(kinds: Sequence[str]) -> list[float]:
    """Return a weight for each candidate so that every kind present is equally likely, identifier kinds together a fifth.

    This is how the pool draws its bugs, so no other blind order finds them sooner.
    """
    present = sorted(set(kinds))
    named = [kind for kind in present if kind in IDENTIFIER_KINDS]
    plain = [kind for kind in present if kind not in IDENTIFIER_KINDS]
    share = {kind: (0.2 if plain else 1.0) / len(named) for kind in named}
    share |= {kind: (0.8 if named else 1.0) / len(plain) for kind in plain}
    counts = {kind: kinds.count(kind) for kind in present}
    return [share[kind] / counts[kind] for kind in kinds]
