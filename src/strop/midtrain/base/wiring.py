"""The start of the tiny base: a handful of attention heads are wired so that copying and pointing work, roughly, before the first step.

Both need two heads in a row, and the second gets no gradient before the first exists (Olsson et al., arXiv 2209.11895); from a random
start pointing had not formed after 7 M tokens. So the residual stream starts with four registers of ``WIDTH`` dimensions

    OWN       the token itself (its embedding starts here)
    LINE      the nearest number to the left: in a listing, the number of the token's own line
    BEFORE    the token before
    BEFORE2   the token before that

and the heads in ``LOOKUPS`` match one register with another and copy a third. These are initial weights only: training may change all of
them, and the checkpoint is an ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from strop.model.decoder import Attention, Decoder, Layer

WIDTH = 30
CONSTANT, IS_NUMBER = 0, 1
OWN, LINE, BEFORE, BEFORE2 = (slice(2 + WIDTH * i, 2 + WIDTH * (i + 1)) for i in range(4))
OWN_STD, OTHER_STD = 0.03, 0.005
READ, WRITE = 0.3, 0.15
NOISE = 0.1
FIRST_SLOW_PAIR = 7
"""Rotary pairs from here on turn by less than a radian over 400 tokens (base 1e6, head size 32): content matches at any distance."""

PREVIOUS_PAIRS = {0: 0.38, 1: 0.14, 2: 0.11, 3: 0.11, 4: 0.10, 5: 0.08, 6: 0.08}
NUMBER_PAIRS = {2: 0.026, 3: 0.128, 4: 0.218, 5: 0.179, 6: 0.211, 8: 0.014, **dict.fromkeys(range(9, 16), 0.032)}
"""Share of each rotary pair in the attention logits of a first-layer head, chosen by gradient ascent on the weight of the token that it
must look at: 0.78 of the attention among 700 tokens for the previous token, 0.88 among 150 to 1,000 for the nearest number."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Two heads that share a key: attend where ``key`` equals ``queries[i]``, copy ``value`` to OWN, where it raises that token's logit.

    Attributes:
        layer: Layer.
        group: Key-value head.
        value: Register copied.
        key: Register compared at the places looked at; ``None`` leaves where to look to training, which then gets a gradient at once.
        queries: Register of the looking token, one for each query head of the group.
    """

    layer: int
    group: int
    value: slice
    key: slice | None = None
    queries: tuple[slice, ...] = ()


LOOKUPS = (
    Lookup(1, 0, value=OWN, key=BEFORE, queries=(OWN, OWN)),  # what came after this token last time
    Lookup(1, 1, value=LINE, key=OWN, queries=(BEFORE, BEFORE2)),  # the line of the token just named
    Lookup(2, 0, value=OWN, key=LINE, queries=(BEFORE, BEFORE2)),  # a token of the line just named
    Lookup(2, 1, value=OWN),  # whatever looks wrong
    Lookup(3, 0, value=LINE),
    Lookup(3, 1, value=OWN),
)


@torch.no_grad()
def wire(model: Decoder, numbers: Sequence[int]) -> None:
    """Set the start of ``model``.

    Args:
        model: Freshly initialised, with two query heads to a key-value head.
        numbers: Ids of the tokens that are numbers of two or three digits.
    """
    embedding = model.model.embed_tokens.weight
    std = float(embedding.std())
    embedding[:, OWN] *= OWN_STD / std
    embedding[:, LINE.start :] *= OTHER_STD / std
    embedding[:, CONSTANT] = 0.1
    embedding[:, IS_NUMBER] = -0.1
    embedding[list(numbers), IS_NUMBER] = 0.1
    layers = [cast(Layer, layer).self_attn for layer in model.model.layers]
    first = layers[0]
    for group in (0, 1):
        _quieten(first, group)
        _copy(first, group, OWN)
    for head, target in ((0, BEFORE), (1, BEFORE2), (2, LINE)):
        _write(first, head, target)
    _look_back(first)
    for lookup in LOOKUPS:
        attention = layers[lookup.layer]
        _copy(attention, lookup.group, lookup.value)
        for head in (2 * lookup.group, 2 * lookup.group + 1):
            _write(attention, head, OWN)
        if lookup.key is not None:
            _match(attention, lookup)


def _match(attention: Attention, lookup: Lookup) -> None:
    size = attention.config.head_dim
    half = size // 2
    rows = [row for pair in range(FIRST_SLOW_PAIR, half) for row in (pair, pair + half)]
    _quieten(attention, lookup.group)
    _select(attention.k_proj.weight, lookup.group * size, rows, cast(slice, lookup.key))
    for head, register in enumerate(lookup.queries, 2 * lookup.group):
        _select(attention.q_proj.weight, head * size, rows, register)


def _quieten(attention: Attention, group: int) -> None:
    """Shrink the random weights of the keys of a key-value head and of the queries of its two heads."""
    size = attention.config.head_dim
    attention.k_proj.weight[group * size : (group + 1) * size] *= NOISE
    attention.q_proj.weight[2 * group * size : 2 * (group + 1) * size] *= NOISE


def _copy(attention: Attention, group: int, source: slice) -> None:
    size = attention.config.head_dim
    attention.v_proj.weight[group * size : (group + 1) * size] *= NOISE
    _select(attention.v_proj.weight, group * attention.config.head_dim, range(WIDTH), source)


def _write(attention: Attention, head: int, target: slice) -> None:
    start = head * attention.config.head_dim
    for i in range(WIDTH):
        attention.o_proj.weight[target.start + i, start + i] += WRITE


def _select(weight: torch.Tensor, start: int, rows: Sequence[int], source: slice) -> None:
    """Let ``rows`` of a head that begins at row ``start`` read the dimensions of ``source``, in order."""
    for i, row in enumerate(rows):
        weight[start + row, source.start + i] += READ


def _look_back(attention: Attention) -> None:
    """Heads 0 and 1 look one and two tokens back, head 2 at the nearest number to the left."""
    c = attention.config
    half = c.head_dim // 2
    query, key = attention.q_proj.weight, attention.k_proj.weight
    for pair, share in PREVIOUS_PAIRS.items():
        angle, strength = c.rope_theta ** (-pair / half), 2 * share**0.5
        key[pair, CONSTANT] = strength * math.cos(angle)
        key[pair + half, CONSTANT] = strength * math.sin(angle)
        for head in (0, 1):
            query[head * c.head_dim + pair, CONSTANT] = strength * math.cos(head * angle)
            query[head * c.head_dim + pair + half, CONSTANT] = -strength * math.sin(head * angle)
    for pair, share in NUMBER_PAIRS.items():
        key[c.head_dim + pair, IS_NUMBER] = query[2 * c.head_dim + pair, CONSTANT] = 2 * share**0.5
