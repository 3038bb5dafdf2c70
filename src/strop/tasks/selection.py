"""Which viable mutants become tasks: kinds balanced, functions used evenly, identifier kinds kept rare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from strop.core.random import key_of
from strop.tasks.factory import Prepared
from strop.tasks.mutation import DEFAULT_KINDS, IDENTIFIER_KINDS, Edit

IDENTIFIER_SHARE = 0.18
"""Largest share of identifier kinds in the default splits."""


@dataclass(frozen=True, slots=True)
class Quota:
    """How many mutants to take.

    Attributes:
        total: At most this many.
        per_function: At most this many of one function.
        identifier_share: Largest share of identifier kinds.
    """

    total: int
    per_function: int
    identifier_share: float = IDENTIFIER_SHARE


def drop_duplicates(functions: Sequence[Prepared], train_digests: Collection[str]) -> tuple[list[Prepared], int]:
    """Keep one function of each normalised digest; held-out functions whose digest occurs anywhere in training code go first.

    Returns:
        The functions kept, in order, and the number dropped.
    """
    seen: set[str] = set()
    kept = []
    for prepared in functions:
        digest = prepared.candidate.digest
        if digest in seen or (prepared.candidate.split == "heldout" and digest in train_digests):
            continue
        seen.add(digest)
        kept.append(prepared)
    return kept, len(functions) - len(kept)


def choose_mutants(
    functions: Sequence[Prepared],
    quota: Quota,
    seed: int,
    *,
    kinds: Collection[str] = DEFAULT_KINDS,
    taken: Collection[tuple[str, Edit]] = (),
) -> list[tuple[Prepared, Edit]]:
    """Choose mutants: always one of the rarest kind so far, of the function with the fewest so far.

    Args:
        functions: Functions with their viable mutants.
        quota: How many.
        seed: Fixes ties.
        kinds: Kinds to choose from.
        taken: ``(cluster, edit)`` that are used already.

    Returns:
        The choice, grouped by function in the given order.
    """
    used = set(taken)
    waiting: dict[str, list[tuple[int, Edit]]] = {kind: [] for kind in DEFAULT_KINDS if kind in kinds}
    for index, prepared in enumerate(functions):
        for edit in prepared.mutants:
            if edit.kind in waiting and (prepared.candidate.cluster, edit) not in used:
                waiting[edit.kind].append((index, edit))
    for kind, entries in waiting.items():
        entries.sort(key=lambda entry: key_of("choose", seed, functions[entry[0]].candidate.cluster, entry[1]))
        waiting[kind] = entries
    per_function: Counter[int] = Counter()
    per_kind: Counter[str] = Counter()
    chosen: list[tuple[int, Edit]] = []
    while len(chosen) < quota.total:
        identifiers = sum(per_kind[kind] for kind in IDENTIFIER_KINDS)
        is_full = identifiers + 1 > quota.identifier_share * (len(chosen) + 1)
        open_kinds = [kind for kind, entries in waiting.items() if entries and not (is_full and kind in IDENTIFIER_KINDS)]
        if not open_kinds:
            break
        kind = min(open_kinds, key=lambda name: per_kind[name])
        entries = waiting[kind]
        at = min(range(len(entries)), key=lambda position: (per_function[entries[position][0]], position))
        index, edit = entries[at]
        if per_function[index] >= quota.per_function:
            waiting[kind] = []
            continue
        del entries[at]
        chosen.append((index, edit))
        per_function[index] += 1
        per_kind[kind] += 1
    return [
        (functions[index], edit) for index, edit in sorted(chosen, key=lambda entry: (entry[0], entry[1].line, entry[1].old, entry[1].new))
    ]
