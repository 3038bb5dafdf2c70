"""The gate before mid-training: can the base copy what the tools need, and does it find bugs in functions it never saw?"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F

from strop.agent.compact import ARG, END
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.pretrain import pack
from strop.midtrain.base.writer import Document
from strop.model.decoder import Decoder


@torch.no_grad()
def repair_accuracy(model: Decoder, maker: DocumentMaker, cases: int) -> dict[str, float]:
    """Greedy repair of one injected bug per held-out function: share of exact repairs, and of each argument given those before it.

    Teacher forcing with arg-max equals greedy decoding for an exact match.
    """
    hits: dict[str, list[float]] = defaultdict(list)
    for index in range(cases):
        document = maker.make_single_repair(index)
        predicted, target = greedy(model, document)
        start = last_edit(document)
        ends = np.flatnonzero(np.isin(document.token_ids[start:], (ARG, END))) + start
        right = predicted[start:] == target[start:]
        for name, first, stop in zip(("file", "old", "line", "new"), ends, ends[1:], strict=False):
            hits[name].append(float(right[first + 1 - start : stop + 1 - start].all()))
        hits["repair"].append(float(right[: ends[4] + 1 - start].all()))
    return {name: float(np.mean(values)) for name, values in hits.items()}


@torch.no_grad()
def copy_accuracy(model: Decoder, maker: DocumentMaker, documents: int) -> dict[str, float]:
    """Share of arguments copied exactly (names, listing indexes, line numbers) in held-out copy documents, by tool."""
    hits: dict[str, list[float]] = defaultdict(list)
    for index in range(documents):
        document = maker.make(index, "copy")
        predicted, target = greedy(model, document)
        for name, start, stop in argument_spans(maker, document):
            if document.weights[start:stop].all():
                hits[name].append(float((predicted[start:stop] == target[start:stop]).all()))
    return {name: float(np.mean(values)) for name, values in hits.items()}


@torch.no_grad()
def heldout_loss(model: Decoder, maker: DocumentMaker, documents: int) -> dict[str, float]:
    """Mean loss in nats a token on held-out documents, for code and for actions."""
    sums: dict[str, list[float]] = defaultdict(list)
    for index in range(documents):
        packed, targets, rows, _, actions = pack([maker.make(index)])
        losses = F.cross_entropy(model.logits(model(packed).hidden[rows]), targets, reduction="none")
        sums["action"] += losses[actions].tolist()
        sums["text"] += losses[~actions].tolist()
    return {name: float(np.mean(values)) for name, values in sums.items()}


def greedy(model: Decoder, document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Return arg-max predictions aligned with the tokens they predict (index 0 has none), and the tokens."""
    packed, *_ = pack([document])
    best = model.logits(model(packed).hidden).argmax(-1).numpy()
    return np.concatenate([[-1], best[:-1]]), document.token_ids


def last_edit(document: Document) -> int:
    """Index of the first token of the last action that has four arguments."""
    starts = np.flatnonzero(document.is_action & ~np.roll(document.is_action, 1))
    return int(starts[-1])


def argument_spans(maker: DocumentMaker, document: Document) -> list[tuple[str, int, int]]:
    """Return ``(tool.position, start, stop)`` of every argument in a document, its closing token included."""
    spans = []
    starts = np.flatnonzero(document.is_action & ~np.roll(document.is_action, 1))
    for start in starts:
        stop = start
        while document.token_ids[stop] != END:
            stop += 1
        bounds = [i for i in range(start, stop + 1) if document.token_ids[i] in (ARG, END)]
        tool = maker.decode(document.token_ids[start : bounds[0]])
        for position, (a, b) in enumerate(itertools.pairwise(bounds), 1):
            spans.append((f"{tool}.{position}", a + 1, b + 1))
    return spans
