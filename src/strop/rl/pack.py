"""Samples to micro-batches of packed rows. Pure numpy; deterministic; nothing is padded or cut.

Row ``i`` of a stream feeds token ``i`` and predicts token ``i + 1``. Rows after the last prediction teach nothing and are not fed.
Shape legend: R rows, N predictions (sampled tokens), M MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strop.core.episode import Trace
from strop.core.sample import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Streams laid end to end, and what to compute about them.

    Example: one sample ``ids = [5, 6, 7, 8, 9]``, ``mask = [0, 0, 1, 1, 0]`` gives ``token_ids = [5, 6, 7]``, ``positions = [0, 1, 2]``,
    ``lengths = (3,)``, ``rows = [1, 2]`` and ``targets = [7, 8]``.

    Attributes:
        samples: Index into the packed samples of every stream, in stream order.
        token_ids: ``int64 [R]`` tokens fed.
        positions: ``int64 [R]`` within their stream.
        lengths: Rows of each stream, sums to R.
        rows: ``int64 [N]`` rows whose next token was sampled.
        targets: ``int64 [N]`` that token.
        generator_logprobs: ``float32 [N]``, the sampler's.
        advantage: ``float32 [N]``; the loss weight in supervised phases.
        versions: ``int64 [N]`` policy version that sampled the token.
        oldest: ``int64 [N]`` oldest version of the stream up to that token; equal to the trainer's only where rollout and trainer
            computed from the same weights throughout.
        routes: ``int64 [R, M, K]`` recorded experts, or ``None`` if any sample lacks them; meaningless where ``routes_valid`` is false.
        routes_valid: ``bool [R]``.
        row_oldest: ``int64 [R]`` oldest version of the weights behind each row, those of the rows that it attends to included.
    """

    samples: tuple[int, ...]
    token_ids: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    rows: np.ndarray
    targets: np.ndarray
    generator_logprobs: np.ndarray
    advantage: np.ndarray
    versions: np.ndarray
    oldest: np.ndarray
    routes: np.ndarray | None
    routes_valid: np.ndarray
    row_oldest: np.ndarray


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split streams into micro-batches of at most ``budget`` rows (a longer stream gets one of its own).

    Longest first, so that streams of a micro-batch are alike and attention wastes little on padding; ties keep their order.

    Args:
        lengths: Rows of each stream.
        budget: Largest sum of rows of a micro-batch.

    Returns:
        Indices of the streams of each micro-batch; every index exactly once.

    Raises:
        ValueError: If ``budget`` isn't positive.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 row, got {budget}")
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    used = budget + 1
    for index in order:
        if used + lengths[index] > budget:
            batches.append([])
            used = 0
        batches[-1].append(index)
        used += lengths[index]
    return batches


def pack(samples: Sequence[Sample], budget: int) -> list[MicroBatch]:
    """Pack samples; those without a sampled token to predict are left out.

    Args:
        samples: In a fixed order; the packing depends on nothing else.
        budget: Rows of a micro-batch, see ``plan``.
    """
    rows = [num_rows(sample) for sample in samples]
    usable = [index for index, count in enumerate(rows) if count]
    parts = plan([rows[index] for index in usable], budget)
    return [_lay_out([usable[index] for index in part], samples) for part in parts]


def num_rows(sample: Sample) -> int:
    """Return the rows that a sample needs: up to the one that predicts its last sampled token, 0 where there is none."""
    predicted = np.flatnonzero(sample.trace.loss_mask[1:])
    return int(predicted[-1]) + 1 if len(predicted) else 0


def split_by_episode(samples: Sequence[Sample], parts: int) -> list[tuple[Sample, ...]]:
    """Deal whole episodes out to ``parts`` mini-batches round robin, so that each holds members of every group.

    Args:
        samples: Sorted by episode.
        parts: How many; mini-batches that would be empty are left out.
    """
    numbers: dict[object, int] = {}
    for sample in samples:
        numbers.setdefault(sample.key, len(numbers))
    dealt = [tuple(s for s in samples if numbers[s.key] % parts == part) for part in range(parts)]
    return [part for part in dealt if part]


def trace_versions(trace: Trace) -> np.ndarray:
    """Return the policy version of every token, ``int64 [L]``."""
    return np.repeat(np.array([s.version for s in trace.versions], np.int64), [s.end - s.start for s in trace.versions])


def _lay_out(indices: Sequence[int], samples: Sequence[Sample]) -> MicroBatch:
    chosen = [samples[index] for index in indices]
    lengths = tuple(num_rows(sample) for sample in chosen)
    starts = np.cumsum([0, *lengths[:-1]])
    predicted = [np.flatnonzero(sample.trace.loss_mask[1:]) for sample in chosen]

    def gather(values: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([v[1:][at] for v, at in zip(values, predicted, strict=True)]).astype(dtype)

    recorded = [(sample.trace.routes, n) for sample, n in zip(chosen, lengths, strict=True) if sample.trace.routes is not None]
    has_routes = len(recorded) == len(chosen)
    return MicroBatch(
        samples=tuple(indices),
        token_ids=np.concatenate([sample.trace.token_ids[:n] for sample, n in zip(chosen, lengths, strict=True)]).astype(np.int64),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int64),
        lengths=lengths,
        rows=np.concatenate([at + start for at, start in zip(predicted, starts, strict=True)]).astype(np.int64),
        targets=gather([sample.trace.token_ids for sample in chosen], np.int64),
        generator_logprobs=gather([sample.trace.logprobs for sample in chosen], np.float32),
        advantage=gather([sample.advantage for sample in chosen], np.float32),
        versions=gather([trace_versions(sample.trace) for sample in chosen], np.int64),
        oldest=gather([np.minimum.accumulate(trace_versions(sample.trace)) for sample in chosen], np.int64),
        routes=np.concatenate([routes.expert_ids[:n] for routes, n in recorded]).astype(np.int64) if has_routes else None,
        routes_valid=np.concatenate([routes.valid[:n] for routes, n in recorded]) if has_routes else np.zeros(sum(lengths), np.bool_),
        # Row i was computed under the version of token i + 1, see ``strop.engine.stream``.
        row_oldest=np.concatenate(
            [np.minimum.accumulate(trace_versions(s.trace))[1 : n + 1] for s, n in zip(chosen, lengths, strict=True)]
        ),
    )
