"""Made-up identifiers, so that a model can't get a name right by remembering it."""

from __future__ import annotations

import keyword
from collections.abc import Iterable

import numpy as np

WORD_COUNTS = (0.25, 0.35, 0.25, 0.1, 0.05)
"""Chances of one to five words."""


class NameMaker:
    """Makes identifiers from the words of real ones.

    Args:
        names: Real function names, for example ``["get_cell", "Table.parse"]``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        words = {w.lower() for name in names for w in name.split(".")[-1].strip("_").split("_")}
        self._words = sorted(w for w in words if w.isalpha() and 2 <= len(w) <= 10 and not keyword.iskeyword(w))

    def make(self, rng: np.random.Generator) -> str:
        """Return an identifier of one to five words.

        One in three begins with an underscore, is CamelCase or mixedCase, or ends in a digit or a letter.
        """
        words = [self._words[int(i)] for i in rng.integers(0, len(self._words), size=int(rng.choice(5, p=WORD_COUNTS)) + 1)]
        name = "_".join(words)
        style = int(rng.integers(0, 18))
        if style <= 2:
            return "_" + name
        if style == 3:
            return "".join(w.title() for w in words)
        if style == 4:
            return words[0] + "".join(w.title() for w in words[1:])
        if style == 5:
            return name + str(rng.integers(2, 10))
        if style == 6:
            return f"{name}_{'ABNTUVWXYabcdnxyz'[int(rng.integers(0, 17))]}"
        return name
