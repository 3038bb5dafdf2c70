"""Records a model's routes on the streams that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from strop.core.route_pack import RoutePack, RouteSegment, token_digest
from strop.core.routes import RouterSpec, id_dtype
from strop.core.sample import Sample
from strop.rl.anchor import RouteRecord, distil
from strop.rl.pack import pack
from strop.rl.scoring import ScoringModel, score
from strop.rl.trainer import MICRO_BATCH_ROWS


def record_streams(
    model: ScoringModel,
    samples: Sequence[Sample],
    *,
    spec: RouterSpec,
    vocab: int,
    version: int,
    facts: Mapping[str, Any],
    micro_batch_rows: int = MICRO_BATCH_ROWS,
) -> RouteRecord:
    """Run a model over its data and keep the live routes, stream by stream and distilled.

    Args:
        model: With the weights to record.
        samples: Streams; those that predict nothing are left out.
        spec: Of the router.
        vocab: Size of the vocabulary.
        version: Of the weights, for the packs.
        facts: Kept with the record.
        micro_batch_rows: Token rows of one pass.
    """
    device = next(iter(model.parameters.values())).device
    packs: list[RoutePack] = []
    counts = np.zeros((len(spec.layers), 0, spec.experts), np.int64)
    for micro in pack(samples, micro_batch_rows):
        with torch.no_grad():
            routes = score(model, micro, temperature=1.0, device=device).forward.natural_ids.cpu().numpy()
        found = distil([(micro.token_ids, routes)], spec=spec, vocab=vocab)
        counts = found if not counts.size else counts + found
        at = 0
        for length in micro.lengths:
            rows = slice(at, at + length)
            packs.append(
                RoutePack(
                    start=0,
                    experts=spec.experts,
                    expert_ids=routes[rows].astype(id_dtype(spec.experts)),
                    valid=np.ones(length, np.bool_),
                    router=spec.digest(),
                    tokens=token_digest(micro.token_ids[rows]),
                    segments=(RouteSegment(start=0, end=length, version=version),),
                )
            )
            at += length
    return RouteRecord(spec, counts, tuple(packs), {**facts, "rows": sum(map(len, packs))})
