"""The manifest of a state: a digest for every leaf, one Merkle root, and the vote of replicas that names the odd rank.

Digests, not norms: a flipped low bit moves no norm, and every bit of replicated state must be equal.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.core.errors import NumericsError
from strop.numerics.digest import tensor_digest

MISSING = "missing"


def tensor_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every leaf of a (nested) state by its path, for example ``optimizer/first/lm_head.weight``.

    Leaves are tensors, arrays, generators (their state), numbers, text, and ``None``; mappings and sequences are walked.

    Raises:
        NumericsError: A leaf that can't be hashed; nothing may stay out of a certificate.
    """
    digests: dict[str, str] = {}

    def walk(path: str, node: Any) -> None:
        node = _generator_state(node)
        if isinstance(node, Mapping):
            _inner(path, ((str(key), node[key]) for key in sorted(node, key=str)), len(node))
        elif isinstance(node, (list, tuple)):
            _inner(path, ((str(index), value) for index, value in enumerate(node)), len(node))
        elif isinstance(node, np.ndarray) or hasattr(node, "detach"):
            if getattr(node, "dtype", None) == np.dtype(object):
                raise NumericsError(f"certificate: {path} is an array of objects, which can't be hashed")
            digests[path] = tensor_digest(node)
        elif isinstance(node, (bool, int, float, str, bytes, np.generic)) or node is None:
            plain = node.item() if isinstance(node, np.generic) else node
            digests[path] = _digest(repr(plain).encode())
        else:
            raise NumericsError(f"certificate: {path} is a {type(node).__name__}, which can't be hashed")

    def _inner(path: str, children: Iterable[tuple[str, Any]], count: int) -> None:
        if not count:
            digests[path] = _digest(b"empty")  # an emptied dict must not look like one that was never there
        for key, value in children:
            walk(f"{path}/{key}" if path else key, value)

    walk("", state)
    return digests


def _generator_state(node: Any) -> Any:
    """The state behind a random generator; anything else as it is."""
    if isinstance(node, np.random.Generator):
        return node.bit_generator.state
    if type(node).__name__ == "Generator" and hasattr(node, "get_state"):
        return node.get_state()
    return node


def merkle_root(digests: Mapping[str, str]) -> str:
    """Return the root of the binary hash tree over ``name, digest`` in the order of the names.

    A single leaf can be proved with ``log2(n)`` digests, without the others. An odd node moves up unpaired.
    """
    level = [_digest(f"leaf\0{name}\0{digests[name]}".encode()) for name in sorted(digests)] or [_digest(b"no leaf")]
    while len(level) > 1:
        pairs = [_digest(f"node\0{a}\0{b}".encode()) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What replicas say about state that must be equal.

    Attributes:
        ranks: How many voted.
        odd: Ranks outside the majority; all ranks of an even split.
        names: Leaves that differ, in order.
        is_decided: Whether a majority stood against ``odd``. Two ranks that differ can't decide.
    """

    ranks: int
    odd: tuple[int, ...]
    names: tuple[str, ...]
    is_decided: bool

    @property
    def is_equal(self) -> bool:
        """Whether every leaf was equal on every rank."""
        return not self.names

    def text(self) -> str:
        """One sentence for a message."""
        names = list(self.names)
        if not names:
            return f"{self.ranks} ranks agree"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        who = ", ".join(map(str, self.odd))
        if self.is_decided:
            return f"rank {who} differs from the majority of {self.ranks} in {names[0]}{more}"
        return f"ranks {who} differ in {names[0]}{more}, and no majority says who is right: hash again, then recompute from a checkpoint"


def vote(manifests: Sequence[Mapping[str, str]]) -> Vote:
    """Compare the manifests of replicas (rank by position); a leaf that a rank lacks counts as a difference.

    Raises:
        ValueError: No manifest.
    """
    if not manifests:
        raise ValueError("a vote needs at least one manifest")
    odd: set[int] = set()
    names = []
    is_decided = True
    for name in sorted(set().union(*manifests)):
        values = [manifest.get(name, MISSING) for manifest in manifests]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        names.append(name)
        common = max(counts, key=lambda value: counts[value])
        has_majority = counts[common] * 2 > len(values)
        is_decided &= has_majority
        odd |= {rank for rank, value in enumerate(values) if not has_majority or value != common}
    return Vote(ranks=len(manifests), odd=tuple(sorted(odd)), names=tuple(names), is_decided=is_decided)


class StateSeal:
    """Watches state that lies still between two steps: whatever changes it in the meantime is memory, or a stray pointer.

    One digest of everything a step: with a single rank there is nobody to vote with, and a flipped moment would train on.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def close(self, state: Mapping[str, Any]) -> None:
        """Remember ``state``."""
        self._digests = tensor_digests(state)

    def open(self) -> None:
        """Forget; whoever changes the state on purpose says so."""
        self._digests = {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Hold ``state`` against what was remembered; nothing was, nothing is checked.

        Raises:
            NumericsError: Something changed; names it.
        """
        if not self._digests:
            return
        actual = tensor_digests(state)
        changed = sorted(name for name in set(actual) | set(self._digests) if actual.get(name) != self._digests.get(name))
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise NumericsError(
                f"{changed[0]}{more} changed between two steps although nobody wrote to it: faulty memory or a stray write; no weight was "
                "changed. Resume from the last commit, on another machine if it happens again.",
                ids={"state": changed[0]},
            )


def signature(body: Any) -> str:
    """Return the digest of a JSON value in canonical form."""
    return _digest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
