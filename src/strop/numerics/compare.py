"""Rollout against trainer: how far two sets of log-probabilities of the same sampled tokens lie apart. Pure numpy.

``d = trainer - generator`` throughout, in nats, in float64. On-policy with equal code ``d`` is exactly 0.
"""

from __future__ import annotations

import numpy as np


def compare_logprobs(
    generator: np.ndarray, trainer: np.ndarray, advantage: np.ndarray, *, ratio_low: float = 0.8, ratio_high: float = 1.28
) -> dict[str, float]:
    """Return the ``numerics/*`` metrics of tokens that the generator sampled with the very weights of the trainer.

    Source: k1 and k3: Schulman, "Approximating KL divergence" (2020), on samples of the generator; multiplicative token probability
    error ``mean exp|d|`` as in NeMo-RL (1 is perfect, above 1.05 calls for a look); effective sample size: Kong (1992). The
    advantage-signed skew ``mean A (exp(d) - 1)`` finds a bias whose mean is 0, which k3 can't see.

    Args:
        generator: ``float32 [N]``.
        trainer: ``float32 [N]``.
        advantage: ``float32 [N]``.
        ratio_low: Clip band, for the share that the difference alone would clip.
        ratio_high: Its upper end.

    Returns:
        Values by metric key; only ``numerics/tokens`` with no token.
    """
    metrics = {"numerics/tokens": float(len(generator))}
    if not len(generator):
        return metrics
    d = trainer.astype(np.float64) - generator.astype(np.float64)
    finite = np.isfinite(d)
    metrics["numerics/nonfinite"] = float(np.count_nonzero(~finite))
    metrics["numerics/is_exact"] = float(np.array_equal(generator, trainer))
    if not finite.all():
        return metrics
    size = np.abs(d)
    ratio = np.exp(d)
    probability_error = np.abs(np.exp(trainer.astype(np.float64)) - np.exp(generator.astype(np.float64)))
    a = advantage.astype(np.float64)
    skew = a * (ratio - 1)
    metrics |= {
        "numerics/logprob_diff_mean_nats": float(size.mean()),
        "numerics/logprob_diff_p99_nats": float(np.quantile(size, 0.99)),
        "numerics/logprob_diff_p999_nats": float(np.quantile(size, 0.999)),
        "numerics/logprob_diff_max_nats": float(size.max()),
        "numerics/prob_error_mean": float(probability_error.mean()),
        "numerics/prob_error_max": float(probability_error.max()),
        "numerics/token_mult_error": float(np.exp(size).mean()),
        "numerics/k1_nats": float(-d.mean()),
        "numerics/k3_nats": float((np.expm1(d) - d).mean()),
        "numerics/ratio_above_2_frac": float((size > np.log(2)).mean()),
        "numerics/ess_frac": effective_sample_frac(ratio),
        "numerics/clip_frac": float(((ratio < ratio_low) | (ratio > ratio_high)).mean()),
        "numerics/advantage_skew": float(skew.mean()),
        "numerics/advantage_skew_positive": float(skew[a > 0].sum() / len(a)),
        "numerics/advantage_skew_negative": float(skew[a < 0].sum() / len(a)),
        "numerics/correlation": correlation(generator, trainer),
    }
    return metrics


def effective_sample_frac(weights: np.ndarray) -> float:
    """Return ``(sum w)^2 / (n sum w^2)``, in ``(0, 1]``; 1 for equal weights, 0 where all are 0."""
    total, squares = float(weights.sum()), float(np.square(weights).sum())
    return total * total / (len(weights) * squares) if squares > 0 else 0.0


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation; 1 for equal arrays also where they don't vary."""
    x, y = first.astype(np.float64), second.astype(np.float64)
    if np.array_equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def differing_routes(recorded: np.ndarray, natural: np.ndarray) -> np.ndarray:
    """Return where expert sets differ, ``bool [R, M]``.

    Args:
        recorded: ``[R, M, K]``, ascending within a row.
        natural: ``[R, M, K]``, ascending within a row.
    """
    unequal = recorded != natural
    # Reducing over an axis of two or eight costs much more than looking for any difference at all, and mostly there is none.
    return unequal.any(-1) if unequal.any() else np.zeros(unequal.shape[:2], np.bool_)
