"""Builds token streams with a loss weight for every token; shared by base pre-training and mid-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from strop.agent.compact import CALL, END, USER, Segment, action_segments, encode_segments, observation_segments, start_segments


@dataclass(frozen=True, slots=True)
class Document:
    """A stream to learn from.

    Attributes:
        token_ids: ``int32 [L]``.
        weights: ``float32 [L]``, weight of the loss of predicting each token from those before it; 0 for the first.
        is_action: ``bool [L]``, true for tokens that an agent would sample.
    """

    token_ids: np.ndarray
    weights: np.ndarray
    is_action: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


class StreamWriter:
    """Appends turns to one stream.

    Args:
        tokenizer: From ``content_tokenizer``.
        rng: Decides which observation tokens are learned.
        observed_weight: Mean loss weight of text that the agent reads.
        observed_share: Share of those tokens that carry it (logits of the others are never computed).
    """

    def __init__(
        self, tokenizer: Tokenizer, rng: np.random.Generator, *, observed_weight: float = 0.15, observed_share: float = 0.25
    ) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._weight = observed_weight / observed_share if observed_share else 0.0
        self._share = observed_share
        self._ids: list[int] = []
        self._weights: list[float] = []
        self._actions: list[bool] = []

    def start(self, instruction: str, system_prompt: str | None) -> None:
        """Write everything before the first action."""
        self._observed(start_segments(instruction, system_prompt=system_prompt))

    def act(self, name: str, args: Sequence[str], *, learned: int | None = None, emphasis: float = 1.0) -> None:
        """Write an action.

        Args:
            name: Tool, always learned with weight 1.
            args: Arguments.
            learned: How many of them are learned, from the first on (``None``: all); the others are context only.
            emphasis: Weight of the learned arguments.
        """
        head = encode_segments(self._tokenizer, [name])
        ids = encode_segments(self._tokenizer, action_segments(name, args))
        stop = len(ids)
        if learned is not None and learned < len(args):
            stop = len(encode_segments(self._tokenizer, action_segments(name, args[:learned])))  # its end token stands for the next <|arg|>
        self._ids += ids
        self._actions += [True] * len(ids)
        self._weights += [1.0 if i < len(head) else emphasis if i < stop else 0.0 for i in range(len(ids))]

    def observe(self, text: str, *, last: bool = False) -> None:
        """Write an observation, up to where the next action begins (or, with ``last``, without that)."""
        segments = observation_segments(text)
        self._observed(segments[:-1] if last else segments)

    def ask(self, text: str) -> None:
        """Write a user turn in the middle of a stream, up to where the action begins."""
        self._observed([USER, text, END, CALL])

    def tokens(self, ids: Sequence[int], *, weight: float) -> None:
        """Write tokens with one loss weight."""
        self._ids += ids
        self._weights += [weight] * len(ids)
        self._actions += [False] * len(ids)

    def raw(self, text: str) -> None:
        """Write plain text, for example code."""
        self._observed([text])

    def finish(self) -> Document:
        """Return the stream."""
        weights = np.asarray(self._weights, np.float32)
        weights[:1] = 0.0
        return Document(np.asarray(self._ids, np.int32), weights, np.asarray(self._actions, np.bool_))

    def _observed(self, segments: Sequence[Segment]) -> None:
        ids = encode_segments(self._tokenizer, segments)
        self._ids += ids
        self._actions += [False] * len(ids)
        self._weights += [self._weight if self._rng.random() < self._share else 0.0 for _ in ids]
