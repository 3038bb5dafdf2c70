"""Statistics of evaluation: intervals that respect clusters, paired gains, best of k.

Tasks made from one function are not independent, so every interval here resamples whole clusters. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from strop.core.random import generator

RESAMPLES = 4000
_CHUNK = 500  # resamples at once: keeps the count matrix small with thousands of clusters


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        mean: The estimate.
        low: Lower end; ``-inf`` with fewer than two clusters, which say nothing about spread.
        high: Upper end; ``inf`` with fewer than two clusters.
        confidence: For example 0.95, two-sided.
        clusters: Independent units behind it.
    """

    mean: float
    low: float
    high: float
    confidence: float
    clusters: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
    values: Sequence[float] | np.ndarray, clusters: Sequence[str], *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the mean of ``values`` with a cluster-bootstrap interval.

    Whole clusters are drawn with replacement; the estimate of a draw is the sum over the number of its values. The percentiles are
    widened for few clusters.
    Source: Hesterberg, "What teachers should know about the bootstrap", arXiv 1411.5279, section 5.2 (expanded percentile interval).

    Example: ``mean_interval([1, 1, 0, 0], ["f", "f", "g", "h"])`` has mean 0.5 over 3 clusters.

    Args:
        values: ``[n]``, for example the success of each task averaged over its samples.
        clusters: ``[n]``, which values belong together (``task.provenance["cluster"]``).
        confidence: Two-sided, in ``(0, 1)``.
        resamples: Bootstrap draws.
        seed: Fixes the draws.

    Returns:
        The interval; the same arguments in any order of the tasks give the same one.

    Raises:
        ValueError: Lengths differ, nothing given, a value isn't finite, or ``confidence`` is out of range.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) != len(clusters) or not len(array):
        raise ValueError(
            f"mean_interval needs as many values as clusters, at least one; got {array.shape} values, {len(clusters)} clusters"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"mean_interval got a value that is not finite at index {int(np.flatnonzero(~np.isfinite(array))[0])}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    names, index = np.unique(np.asarray([str(c) for c in clusters]), return_inverse=True)
    by_cluster: list[list[float]] = [[] for _ in names]
    for at, value in zip(index, array, strict=True):
        by_cluster[at].append(float(value))
    sums = np.array([math.fsum(members) for members in by_cluster])  # fsum: the order of the tasks must not matter
    counts = np.array([len(members) for members in by_cluster], dtype=np.float64)
    mean = math.fsum(array.tolist()) / len(array)
    number = len(names)
    if number < 2:
        return Interval(mean=mean, low=-math.inf, high=math.inf, confidence=confidence, clusters=number)
    rng = generator("cluster-bootstrap", seed)
    draws = []
    for start in range(0, resamples, _CHUNK):
        times = rng.multinomial(number, np.full(number, 1 / number), size=min(_CHUNK, resamples - start))
        draws.append((times @ sums) / (times @ counts))
    tail = NormalDist().cdf(math.sqrt(number / (number - 1)) * student_quantile((1 - confidence) / 2, number - 1))
    low, high = np.quantile(np.concatenate(draws), [tail, 1 - tail])
    return Interval(mean=mean, low=float(low), high=float(high), confidence=confidence, clusters=number)


def paired_interval(
    before: Sequence[float] | np.ndarray,
    after: Sequence[float] | np.ndarray,
    clusters: Sequence[str],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of ``after - before`` on the same tasks with a cluster-bootstrap interval.

    Args:
        before: ``[n]``, one value per task.
        after: ``[n]``, the same tasks in the same order.
        clusters: ``[n]``.
        confidence: As in ``mean_interval``.
        resamples: As in ``mean_interval``.
        seed: As in ``mean_interval``.

    Raises:
        ValueError: As ``mean_interval``, or if the lengths of ``before`` and ``after`` differ.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"paired_interval needs the same tasks on both sides, got {first.shape} and {second.shape} values")
    return mean_interval(second - first, clusters, confidence=confidence, resamples=resamples, seed=seed)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of ``k`` attempts succeeds.

    Source: Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374, eq. 1.

    Example: 4 samples with 1 success give ``pass_at_k(4, 1, 2) == 0.5``.

    Args:
        samples: Attempts made, ``n``.
        successes: How many succeeded, ``c``, in ``[0, n]``.
        k: In ``[1, n]``.

    Raises:
        ValueError: If the numbers don't fit together.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"pass_at_k needs 1 <= k <= samples and 0 <= successes <= samples, got n={samples}, c={successes}, k={k}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def best_of_k(rewards: Sequence[float] | np.ndarray, k: int) -> float:
    """Return the expected best reward of ``k`` attempts drawn without replacement from ``rewards``.

    Equals ``pass_at_k`` when every reward is 0 or 1.

    Args:
        rewards: ``[n]``, rewards of one task's samples.
        k: In ``[1, n]``.

    Raises:
        ValueError: If ``k`` is out of range.
    """
    ordered = np.sort(np.asarray(rewards, dtype=np.float64))
    number = len(ordered)
    if ordered.ndim != 1 or not 1 <= k <= number:
        raise ValueError(f"best_of_k needs 1 <= k <= {number} rewards, got k={k}")
    # The i-th smallest (from 0) is the best of a draw when the other k - 1 come from the i below it.
    total = math.comb(number, k)
    return math.fsum(float(ordered[i]) * (math.comb(i, k - 1) / total) for i in range(k - 1, number))


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with ``freedom`` degrees of freedom.

    Exact for 1 and 2 degrees; otherwise the asymptotic form, within 1e-3 of the exact value for ``probability`` in ``[0.005, 0.995]``.
    Source: Hill, "Algorithm 396: Student's t-quantiles", CACM 13(10), 1970.

    Raises:
        ValueError: ``probability`` outside ``(0, 1)`` or ``freedom`` below 1.
    """
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(f"student_quantile needs a probability in (0, 1) and at least 1 degree of freedom, got {probability}, {freedom}")
    if probability == 0.5:
        return 0.0
    sign = -1.0 if probability < 0.5 else 1.0
    tails = 2 * min(probability, 1 - probability)
    if freedom == 1:
        return sign / math.tan(tails * math.pi / 2)
    if freedom == 2:
        return sign * math.sqrt(2 / (tails * (2 - tails)) - 2)
    a = 1 / (freedom - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * tails) ** (2 / freedom)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tails / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3) + 0.5 / (freedom + 4)) * y - 1) * (
            freedom + 1
        ) / (freedom + 2) + 1 / y
    return sign * math.sqrt(freedom * y)


def proportion_interval(hits: int, total: int, *, confidence: float = 0.95) -> Interval:
    """Return a share with Wilson's score interval, which is right for few trials and for shares near 0 and 1.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927.

    Example: ``proportion_interval(0, 200)`` is 0 with the interval [0, 0.0188].

    Args:
        hits: In ``[0, total]``.
        total: Independent trials, at least 1.
        confidence: Two-sided, in ``(0, 1)``.

    Raises:
        ValueError: The numbers don't fit together.
    """
    if not 0 <= hits <= total or total < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"proportion_interval needs 0 <= hits <= total, total >= 1 and a confidence in (0, 1), got {hits}, {total}, {confidence}"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = hits / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == total else min(1.0, centre + half)
    return Interval(mean=share, low=low, high=high, confidence=confidence, clusters=total)
