"""Router decisions: which experts every token used in every MoE layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

Scoring = Literal["softmax", "softmax-topk", "sigmoid"]
"""How a router weighs its chosen experts: softmax over all experts, softmax over the chosen ones, or a sigmoid for each."""


def id_dtype(experts: int) -> np.dtype:
    """Return the number type of the ids of ``experts`` experts."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What routes mean: two models may exchange them only where this is equal.

    Example: a DeepSeek-V3 of 61 layers whose first three are dense has ``layers = (3, ..., 60)``, ``experts = 256``, ``top_k = 8``,
    ``scoring = "sigmoid"``; its multi-token-prediction layer isn't counted.

    Attributes:
        layers: Global index of every MoE layer, ascending; dense layers are left out.
        experts: Experts of a layer; ids are logical, never a placement.
        top_k: Experts of a token.
        scoring: How chosen experts are weighed.
        normalised: Whether the weights of the chosen experts are made to sum to 1.
        has_bias: Whether a bias takes part in the choice and not in the weights.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    has_bias: bool = False

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal specs alone."""
        text = repr((self.layers, self.experts, self.top_k, self.scoring, self.normalised, self.has_bias))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteOrigin:
    """What an engine says about the routes that it made, so that whoever uses them finds out if they were mixed up or damaged on the way.

    Example: 4 tokens whose last one was sampled after a swap from version 3 to 4 have ``versions == ((0, 2, 3), (2, 3, 4))``.

    Attributes:
        router: 16 bytes, ``RouterSpec.digest()`` of the model.
        tokens: 16 bytes, ``token_digest`` of the tokens that the rows fed.
        ids: 16 bytes, ``ids_digest`` of expert ids and validity.
        versions: Rows ``[start, end)`` and the version of the weights that computed them; contiguous from 0.
    """

    router: bytes
    tokens: bytes
    ids: bytes
    versions: tuple[tuple[int, int, int], ...]


def ids_digest(expert_ids: np.ndarray, valid: np.ndarray) -> bytes:
    """Return 16 bytes that name expert ids (``uint8`` or ``uint16 [rows, layers, top_k]``) and which rows have them (``bool [rows]``)."""
    digest = hashlib.blake2b(repr(expert_ids.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(expert_ids, "<u2").tobytes())
    digest.update(np.packbits(valid).tobytes())
    return digest.digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Expert ids of one token stream.

    A stream of ``L`` tokens has ``L - 1`` rows: the last token was sampled but never fed to the model.
    Routes are never padded or truncated to fit; a row that is unknown has ``valid = False``.

    Example: 5 tokens, 2 MoE layers, top-2 gives ``expert_ids.shape == (4, 2, 2)`` and ``valid.shape == (4,)``.

    Attributes:
        expert_ids: ``uint8`` (at most 256 experts) or ``uint16``, shape ``[tokens - 1, moe_layers, top_k]``,
            logical expert ids, ascending within a row.
        valid: ``bool``, shape ``[tokens - 1]``.
        origin: What the engine says about them, or ``None`` where it says nothing.
    """

    expert_ids: np.ndarray
    valid: np.ndarray
    origin: RouteOrigin | None = None

    def __post_init__(self) -> None:
        ids, valid = self.expert_ids, self.valid
        if ids.ndim != 3 or ids.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"expert_ids must be uint8 or uint16 [tokens-1, layers, top_k], got {ids.dtype} {ids.shape}")
        if valid.shape != ids.shape[:1] or valid.dtype != np.bool_:
            raise ValueError(f"valid must be bool [{ids.shape[0]}], got {valid.dtype} {valid.shape}")
        ids.flags.writeable = False
        valid.flags.writeable = False

    def __len__(self) -> int:
        return int(self.expert_ids.shape[0])
