"""What one step of the embedded engine asks of the model; runs in the engine's worker thread and touches no state of streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.core.errors import EngineError
from strop.engine.backend import Cache, ModelBackend
from strop.engine.scheduler import Plan


def compute_step(
    model: ModelBackend, cache: Cache, plan: Plan, stale: Sequence[int], *, version: int
) -> tuple[np.ndarray, list[int], list[float]]:
    """Free, copy, compute and sample, in this order.

    Args:
        model: Nobody else calls it meanwhile.
        cache: Its keys and values.
        plan: Rows, copied prefixes and wanted rows of the step.
        stale: Slots whose contents nobody will read.
        version: Of the weights, for messages.

    Returns:
        Expert ids ``uint8`` or ``uint16 [R, L, K]`` of all rows, and a token id and its log-probability (nats) for each wanted row.

    Raises:
        EngineError: A log-probability isn't finite; names the stream and the position.
    """
    for slot in stale:
        cache.free(slot)
    for copy in plan.copies:
        cache.copy_prefix(copy.source.slot, copy.stream.slot, copy.count)
    result = model.infer(plan.rows, cache, plan.want)
    if not len(plan.want):
        return result.expert_ids, [], []
    tokens, logprobs = model.sample(result.logits, plan.uniforms, plan.temperatures)
    if not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        owner = next(segment for segment in plan.segments if segment.want == at)
        raise EngineError(f"log-probability {logprobs[at]} at position {owner.stream.length} of {owner.stream.key} under version {version}")
    return result.expert_ids, tokens.tolist(), logprobs.tolist()
