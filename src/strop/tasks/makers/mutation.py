"""Drafts by mutation: one place, or two in one file or in two files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from strop.core.errors import TaskError
from strop.core.random import generator, key_of
from strop.tasks.makers.draft import Draft
from strop.tasks.makers.procedural import find_mutations
from strop.tasks.makers.splice import Mutation, apply_splices, is_real_change, overlaps
from strop.tasks.repository.probe import Repository

MAX_SOURCE_BYTES = 400_000
PER_FUNCTION = 3
_RARE = frozenset({"base_remove", "method_swap", "method_remove", "wrapper_remove", "loop_remove", "call_swap", "argument_remove"})
"""Families with few places; drawn first, or the common ones would hide them."""


def covered_mutations(repository: Repository) -> list[Mutation]:
    """Every mutation in a function or class that at least one test calls."""
    found: list[Mutation] = []
    for path in repository.layout.sources:
        source = repository.files[path]
        if len(source) > MAX_SOURCE_BYTES or not any(name == path for name, _ in repository.coverage.functions):
            continue
        try:
            mutations = find_mutations(path, source)
        except TaskError:
            continue
        known: dict[tuple[int, int], bool] = {}
        for mutation in mutations:
            key = (mutation.first_line, mutation.last_line)
            if key not in known:
                known[key] = bool(repository.coverage.tests_of(path, *key))
            if known[key]:
                found.append(mutation)
    return found


def single_drafts(repository: Repository, mutations: Sequence[Mutation], *, seed: int) -> Iterator[Draft]:
    """Yield drafts of one mutation, spread over functions and families; the order depends on the seed and the source alone."""
    order = sorted(
        mutations,
        key=lambda m: key_of("mutation", seed, repository.source.name, m.path, m.family, m.splices) >> (2 if m.family in _RARE else 0),
    )
    taken: dict[tuple[str, str], int] = {}
    seen: dict[str, set[str]] = {}
    # First round: at most PER_FUNCTION of a function, and no family twice in one. Second round: the rest.
    later = []
    for mutation in order:
        key = (mutation.path, mutation.function)
        families = seen.setdefault(mutation.cluster, set())
        if taken.get(key, 0) >= PER_FUNCTION or mutation.family in families:
            later.append(mutation)
            continue
        draft = mutation_draft(repository.files, (mutation,))
        if draft is not None:
            taken[key] = taken.get(key, 0) + 1
            families.add(mutation.family)
            yield draft
    for mutation in later:
        draft = mutation_draft(repository.files, (mutation,))
        if draft is not None:
            yield draft


def combined_drafts(repository: Repository, admitted: Sequence[Mutation], *, seed: int, limit: int) -> Iterator[Draft]:
    """Yield drafts of two mutations that the gate admitted one by one: half of them in two files where there are two."""
    rng = generator("combined", seed, repository.source.name)
    pool = list(admitted)
    used: set[frozenset[int]] = set()
    made = 0
    for attempt in range(12 * limit):
        if made >= limit or len(pool) < 2:
            return
        a, b = (int(i) for i in rng.choice(len(pool), 2, replace=False))
        first, second = pool[a], pool[b]
        wants_two_files = attempt % 2 == 0
        if frozenset((a, b)) in used or overlaps(first, second) or first.cluster == second.cluster:
            continue
        if wants_two_files != (first.path != second.path) and attempt < 8 * limit:
            continue
        if first.path.split("/")[0] != second.path.split("/")[0]:  # a repair may change one package
            continue
        used.add(frozenset((a, b)))
        draft = mutation_draft(repository.files, (first, second))
        if draft is not None:
            made += 1
            yield draft


def mutation_draft(files: Mapping[str, bytes], mutations: tuple[Mutation, ...]) -> Draft | None:
    """Return the draft of mutations, ``None`` if the result isn't Python or means the same."""
    paths = sorted({mutation.path for mutation in mutations})
    base = {}
    for path in paths:
        mutant = apply_splices(files[path], [splice for mutation in mutations if mutation.path == path for splice in mutation.splices])
        if not is_real_change(files[path], mutant):
            return None
        base[path] = mutant
    return Draft(
        kind="mutation" if len(mutations) == 1 else "combined",
        families=tuple(mutation.family for mutation in mutations),
        cluster=mutations[0].cluster,
        base=base,
        gold={path: files[path] for path in paths},
        regions=tuple((mutation.path, mutation.first_line, mutation.last_line) for mutation in mutations),
        subject=" and ".join(dict.fromkeys(mutation.path for mutation in mutations)),
        mutations=mutations,
    )
