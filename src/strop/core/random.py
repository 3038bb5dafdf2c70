"""Counter-based randomness: a value depends on its key alone, never on batch mates, timing or call order."""

from __future__ import annotations

import hashlib

import numpy as np


def key_of(*parts: object) -> int:
    """Return a 128-bit integer that names ``parts`` (their text forms, order matters)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(*parts: object) -> np.random.Generator:
    """Return a Philox generator for ``parts``.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    return np.random.Generator(np.random.Philox(key=key_of(*parts)))


def uniforms(seed: int, key: object, start: int, count: int) -> np.ndarray:
    """Return the uniforms of token positions ``[start, start + count)`` of one episode.

    Args:
        seed: The run's seed.
        key: The episode key (its text form is used).
        start: First token position.
        count: How many.

    Returns:
        ``float64 [count]`` in ``[0, 1)``; value ``i`` depends only on ``(seed, key, start + i)``.
    """
    # Philox advances in blocks of 4 doubles, so a position is addressed by its block.
    block, offset = divmod(start, 4)
    bits = np.random.Philox(key=key_of("sampling", seed, key))
    bits.advance(block)
    return np.random.Generator(bits).random(offset + count)[offset:]
