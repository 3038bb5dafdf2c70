"""Answers of boxes as numbers that a linear classifier can use. Fitted on the boxes of a training fold, without their kinds.

Legend of shapes: N boxes, D columns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from strop.fidelity.probes import Value

MAX_COLUMNS = 40
"""Columns that one probe may have."""
_CLIP = 4.0


class ProbeEncoder:
    """Columns of one probe.

    Numbers become a standardised value and its square (so that a spread can be told from a point); texts and members of sets become
    indicators of what at least two boxes said, and texts also of their shape (``ip-10-0-3-7`` is ``a-0-0-0-0``). Columns are centred, have
    unit variance, and are divided by the square root of their number: a probe with many columns weighs no more than one with few.

    Args:
        values: The answers of the boxes to fit on.
    """

    def __init__(self, values: Sequence[Value]) -> None:
        numbers = [_scaled(value) for value in values if isinstance(value, float)]
        self._median = float(np.median(numbers)) if numbers else 0.0
        spread = float(np.percentile(numbers, 84) - np.percentile(numbers, 16)) / 2 if numbers else 0.0
        self._scale = spread or (float(np.std(numbers)) if numbers else 0.0) or 1.0
        counts = Counter(feature for value in values for feature in _features(value))
        shared = [(abs(2 * count - len(values)), feature) for feature, count in counts.items() if 2 <= count < len(values)]
        self._features = [feature for _, feature in sorted(shared)[:MAX_COLUMNS]]
        raw_ND = self._raw(values)
        self._mean_D = raw_ND.mean(axis=0)
        deviation_D = raw_ND.std(axis=0)
        self._keep = deviation_D > 1e-9
        self._deviation_D = np.where(self._keep, deviation_D, 1.0)

    def __call__(self, values: Sequence[Value]) -> np.ndarray:
        """Return ``float64 [N, D]``; constant columns are left out."""
        columns = ((self._raw(values) - self._mean_D) / self._deviation_D)[:, self._keep]
        return np.clip(columns, -2 * _CLIP, 2 * _CLIP) / math.sqrt(max(columns.shape[1], 1))

    def _raw(self, values: Sequence[Value]) -> np.ndarray:
        rows = []
        for value in values:
            number = (_scaled(value) - self._median) / self._scale if isinstance(value, float) else 0.0
            number = min(max(number, -_CLIP), _CLIP)
            present = _features(value)
            rows.append([number, number * number, *(float(feature in present) for feature in self._features)])
        return np.array(rows, dtype=np.float64)


def _scaled(number: float) -> float:
    return math.copysign(math.log1p(abs(number)), number)


def _features(value: Value) -> set[str]:
    """What can be said of an answer with yes or no."""
    if isinstance(value, str):
        return {f"is {value}", f"like {_shape(value)}"}
    if isinstance(value, tuple):
        return {f"has {item}" for item in value} | {f"count {len(value)}"}
    return {"number"}


def _shape(text: str) -> str:
    return re.sub(r"[A-Za-z]+", "a", re.sub(r"\d+", "0", re.sub(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", "hex", text)))


def encode(
    train: Sequence[Mapping[str, Value]], test: Sequence[Mapping[str, Value]], probes: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the columns of every probe for both folds, fitted on ``train``.

    Args:
        train: Answers by probe.
        test: The held-out boxes' answers.
        probes: Which probes.
    """
    found = {}
    for probe in probes:
        values = [row[probe] for row in train]
        encoder = ProbeEncoder(values)
        found[probe] = (encoder(values), encoder([row[probe] for row in test]))
    return found
