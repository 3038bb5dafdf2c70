"""The classifier two-sample test: if no classifier can tell two samples apart, no policy can either (or so we hope).

A ridge classifier (least squares on +1 and -1 with an L2 penalty, a regularised linear discriminant) is cross-validated in folds of whole
groups, so that it can't gain by knowing a task. Its held-out area under the ROC curve is 0.5 if the kinds are equal.
Sources: Lopez-Paz and Oquab, "Revisiting classifier two-sample tests", arXiv 1610.06545, for the test; Hastie, Tibshirani and
Friedman, "The elements of statistical learning", 2nd ed., sections 3.4.1 (ridge) and 4.2 (least squares as a discriminant), for the
classifier; Westfall and Young, "Resampling-based multiple testing", 1993, for the step that lets the best of many probes
be named without crying wolf.

Legend of shapes: N boxes, P label vectors (the true one first, then permuted ones), D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from strop.core.random import generator
from strop.fidelity.collect import Observation
from strop.fidelity.encode import encode
from strop.fidelity.probes import PROBES, Value
from strop.numerics.stats import student_quantile

FOLDS = 5
MIN_GROUPS = 8
"""With fewer groups the interval resamples boxes within groups instead of groups."""
RIDGE_FRAC = 0.05
"""Penalty as a share of the mean diagonal of the kernel, times the boxes."""
_SHUFFLES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeScore:
    """How well one probe tells the kinds apart.

    Attributes:
        name: The probe.
        auc: Held-out area of a classifier that sees nothing else.
        p_value: Chance that the best of all probes does so well on equal kinds.
        drop: What the full classifier's area loses when this probe's answers are shuffled among the held-out boxes.
    """

    name: str
    auc: float
    p_value: float
    drop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSample:
    """Result of the test.

    Attributes:
        auc: Held-out area under the ROC curve.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: Of the permutation test, labels permuted within groups.
        boxes: Boxes of each kind, training first.
        groups: Independent groups.
        probes: By how well they tell the kinds apart, best first.
    """

    auc: float
    low: float
    high: float
    p_value: float
    boxes: tuple[int, int]
    groups: int
    probes: tuple[ProbeScore, ...]


def area(scores: Sequence[float] | np.ndarray, labels: Sequence[bool] | np.ndarray) -> float:
    """Return the area under the ROC curve: how often a production box scores higher than a training box, a tie counting half.

    Example: ``area([0.1, 0.4, 0.4, 0.9], [False, False, True, True]) == 0.875``.

    Raises:
        ValueError: Only one kind among ``labels``.
    """
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    higher, lower = scores[labels], np.sort(scores[~labels])
    if not len(higher) or not len(lower):
        raise ValueError("an area under the ROC curve needs boxes of both kinds")
    below = np.searchsorted(lower, higher, "left") + np.searchsorted(lower, higher, "right")
    return float(below.sum()) / (2 * len(higher) * len(lower))


def two_sample(observations: Sequence[Observation], *, permutations: int = 200, resamples: int = 2000, seed: int = 0) -> TwoSample:
    """Test whether the two kinds of box can be told apart.

    A bootstrap doesn't fit again, so that its interval holds for these classifiers only, which is too narrow where they have learned noise.
    The permutations do fit again: the interval is at least as wide as the spread of their areas asks for.

    Args:
        observations: Boxes of both kinds in at least two groups, each group with both.
        permutations: Permuted label vectors.
        resamples: Bootstrap draws.
        seed: Fixes folds, permutations and draws.

    Raises:
        ValueError: Fewer than two groups, or a group with boxes of one kind only.
    """
    groups = sorted({row.group for row in observations})
    for group in groups:
        if len({row.is_production for row in observations if row.group == group}) < 2:
            raise ValueError(f"group {group!r} has boxes of one kind only")
    if len(groups) < 2:
        raise ValueError(f"the test needs at least two groups, got {len(groups)}")
    labels = np.array([row.is_production for row in observations])
    member = np.array([groups.index(row.group) for row in observations])
    labels_NP = np.stack([labels, *(_permuted(labels, member, seed, number) for number in range(permutations))], axis=1)
    names = [name for name in observations[0].values if len({row.values[name] for row in observations}) > 1]
    held_out = _HeldOut(names, labels_NP)
    for number, test in enumerate(_folds(len(groups), member, seed)):
        held_out.add_fold([row.values for row in observations], test, generator("fidelity", "shuffle", seed, number))
    areas_P = held_out.areas("")
    drawn = _interval(held_out.scores_NP[""][:, 0], labels, member, resamples, seed)
    low, high = _widened(drawn, float(areas_P[0]), areas_P[1:])
    return TwoSample(
        auc=float(areas_P[0]),
        low=low,
        high=high,
        p_value=_p_value(areas_P[0], areas_P[1:]),
        boxes=(int((~labels).sum()), int(labels.sum())),
        groups=len(groups),
        probes=held_out.ranking(),
    )


def _permuted(labels: np.ndarray, member: np.ndarray, seed: int, number: int) -> np.ndarray:
    rng = generator("fidelity", "permutation", seed, number)
    found = labels.copy()
    for group in np.unique(member):
        index = np.flatnonzero(member == group)
        found[index] = labels[rng.permutation(index)]
    return found


def _folds(groups: int, member: np.ndarray, seed: int) -> list[np.ndarray]:
    order = generator("fidelity", "folds", seed).permutation(groups)
    return [np.flatnonzero(np.isin(member, part)) for part in np.array_split(order, min(FOLDS, groups))]


def _p_value(found: float, null: np.ndarray) -> float:
    return float((1 + (null >= found - 1e-12).sum()) / (1 + len(null)))


class _HeldOut:
    """Held-out scores ``[N, P]`` of the full classifier (name ``""``) and of each probe alone."""

    def __init__(self, names: Sequence[str], labels_NP: np.ndarray) -> None:
        self._names = names
        self._labels_NP = labels_NP
        self.scores_NP = {name: np.zeros(labels_NP.shape) for name in ("", *names)}
        self._shuffled = {name: np.zeros((len(labels_NP), _SHUFFLES)) for name in names}

    def add_fold(self, values: Sequence[Mapping[str, Value]], test: np.ndarray, rng: np.random.Generator) -> None:
        """Fit on all boxes but ``test``, and score those."""
        if not self._names:
            return
        train = np.setdiff1d(np.arange(len(values)), test)
        columns = encode([values[at] for at in train], [values[at] for at in test], self._names)
        targets_NP = self._labels_NP[train].astype(np.float64)
        for name in self._names:
            fitted, held_out = columns[name]
            self.scores_NP[name][test] = held_out @ _weights(fitted, targets_NP)
        fitted, held_out = (np.concatenate([columns[name][side] for name in self._names], axis=1) for side in (0, 1))
        weights_DP = _weights(fitted, targets_NP)
        scores = held_out @ weights_DP
        self.scores_NP[""][test] = scores
        start = 0
        for name in self._names:
            mine = columns[name][1]
            part = mine @ weights_DP[start : start + mine.shape[1], 0]
            start += mine.shape[1]
            for draw in range(_SHUFFLES):
                self._shuffled[name][test, draw] = scores[:, 0] - part + part[rng.permutation(len(part))]

    def areas(self, name: str) -> np.ndarray:
        """``[P]``."""
        pairs = zip(_ties(self.scores_NP[name]).T, self._labels_NP.T, strict=True)
        return np.array([area(scores, labels) for scores, labels in pairs])

    def ranking(self) -> tuple[ProbeScore, ...]:
        """Every probe whose answers differ at all, best first."""
        areas = {name: self.areas(name) for name in self._names}
        null = np.stack([found[1:] for found in areas.values()]).max(axis=0) if areas else np.zeros(0)
        labels, full = self._labels_NP[:, 0], self.areas("")[0]
        rows, order = [], [*PROBES, *self._names]  # of equally good probes, the most direct one
        for name, found in areas.items():
            left = np.mean([area(column, labels) for column in _ties(self._shuffled[name]).T])
            rows.append(ProbeScore(name=name, auc=float(found[0]), p_value=_p_value(found[0], null), drop=float(full - left)))
        return tuple(sorted(rows, key=lambda row: (-round(row.auc, 9), order.index(row.name))))


def _ties(scores: np.ndarray) -> np.ndarray:
    """Equal answers must tie, also where the arithmetic of equal rows isn't bit for bit the same."""
    return np.round(scores, 9)


def _weights(train_ND: np.ndarray, targets_NP: np.ndarray) -> np.ndarray:
    """Ridge weights ``[D, P]``, in the primal or the dual form, whichever has fewer equations.

    They are scaled to unit variance of the fitted scores, so that the scores of all folds can be held against each other.
    """
    boxes, columns = train_ND.shape
    if not columns:
        return np.zeros((0, targets_NP.shape[1]))
    centred_NP = targets_NP - targets_NP.mean(axis=0)
    penalty = RIDGE_FRAC * max(float((train_ND**2).sum()), 1e-12)
    if columns < boxes:
        weights = np.linalg.solve(train_ND.T @ train_ND + penalty * np.eye(columns), train_ND.T @ centred_NP)
    else:
        weights = train_ND.T @ np.linalg.solve(train_ND @ train_ND.T + penalty * np.eye(boxes), centred_NP)
    spread = (train_ND @ weights).std(axis=0)
    return weights / np.where(spread > 1e-12, spread, 1.0)


def _widened(drawn: tuple[float, float], auc: float, null: np.ndarray) -> tuple[float, float]:
    """Both ends moved out to where the spread of areas under refitting puts them; it shrinks towards 0 and 1 as a share's does."""
    spread = NormalDist().inv_cdf(0.975) * float(np.std(null)) * 2 * math.sqrt(auc * (1 - auc)) if len(null) > 1 else 0.0
    return max(0.0, min(drawn[0], auc - spread)), min(1.0, max(drawn[1], auc + spread))


def _interval(scores: np.ndarray, labels: np.ndarray, member: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """Percentile interval (95 %) of the area, over draws of whole groups, widened for few groups as ``numerics.stats.mean_interval`` does;
    with fewer than ``MIN_GROUPS``, which say too little about spread, over draws of boxes within groups.
    """
    scores = _ties(scores)
    production, training = np.flatnonzero(labels), np.flatnonzero(~labels)
    difference = scores[production][:, None] - scores[training][None, :]
    wins = (np.sign(difference) + 1) / 2
    rng = generator("fidelity", "bootstrap", seed)
    number = int(member.max()) + 1
    weights = np.zeros((resamples, len(labels)))
    if number >= MIN_GROUPS:
        weights = rng.multinomial(number, np.full(number, 1 / number), size=resamples)[:, member].astype(np.float64)
        tail = NormalDist().cdf(math.sqrt(number / (number - 1)) * student_quantile(0.025, number - 1))
    else:
        tail = 0.025
        for index in (np.flatnonzero((labels == side) & (member == group)) for side in (False, True) for group in range(number)):
            weights[:, index] = rng.multinomial(len(index), np.full(len(index), 1 / len(index)), size=resamples)
    above = ((weights[:, production] @ wins) * weights[:, training]).sum(axis=1)
    pairs = weights[:, production].sum(axis=1) * weights[:, training].sum(axis=1)
    low, high = np.quantile(above / pairs, [tail, 1 - tail])
    return float(low), float(high)
