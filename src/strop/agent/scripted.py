"""An engine that plays given actions through the same token path as a model.

The scripted expert, the baselines and the tests run through the very same ``run_episode``: their actions become token ids, the ids are
parsed again, observations come back as ids and are decoded for the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from strop.agent.render import ActionRenderer
from strop.agent.toolspec import name_arguments
from strop.core.episode import EpisodeKey, Trace, VersionSpan
from strop.core.errors import EngineError
from strop.ports import EngineCapabilities, Generation


class Policy(Protocol):
    """Decides actions from observations."""

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        """Return tool name and positional arguments.

        Args:
            observation: Answer to the last action, ``None`` before the first.
        """
        ...


class ScriptedEngine:
    """Implements ``ports.Engine`` with policies instead of a model.

    Args:
        renderer: The renderer that the episodes use.
        script: Makes the policy of an episode.
    """

    def __init__(self, renderer: ActionRenderer, script: Callable[[EpisodeKey], Policy]) -> None:
        self._renderer = renderer
        self._script = script
        self._version = 0
        self._is_closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        """Log-probabilities (all 0, since nothing is left to chance) and swaps, but no routes."""
        return EngineCapabilities(returns_logprobs=True, returns_routes=False, swaps_in_flight=True, is_exact=True)

    @property
    def version(self) -> int:
        """Version that tokens are stamped with."""
        return self._version

    async def open(self, key: EpisodeKey) -> ScriptedSession:
        """Start an empty stream that the policy of ``key`` acts in.

        Raises:
            EngineError: The engine is closed.
        """
        self.check_open(key)
        return ScriptedSession(self, self._renderer, self._script(key), key)

    async def swap(self, weights: Mapping[str, Any], version: int) -> None:
        """Stamp later tokens with ``version``; there is nothing to load."""
        self._version = version

    def metrics(self) -> Mapping[str, float]:
        """Nothing: no model runs."""
        return {}

    async def close(self) -> None:
        """Stop; open sessions raise ``EngineError`` from their next ``generate`` on."""
        self._is_closed = True

    def check_open(self, key: EpisodeKey) -> None:
        """Raises ``EngineError`` after ``close``."""
        if self._is_closed:
            raise EngineError("the engine is closed", ids={"episode": str(key)})


class ScriptedSession:
    """One stream of a ``ScriptedEngine``; log-probabilities are 0, routes ``None``."""

    def __init__(self, engine: ScriptedEngine, renderer: ActionRenderer, policy: Policy, key: EpisodeKey) -> None:
        self._engine = engine
        self._renderer = renderer
        self._policy = policy
        self._key = key
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._spans: list[VersionSpan] = []
        self._has_acted = False

    async def generate(self, new_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float) -> Generation:
        """Feed ``new_ids``, show the policy the observation in them, and append its action, cut at ``max_new_tokens``.

        Raises:
            EngineError: The engine is closed.
        """
        self._engine.check_open(self._key)
        observation = self._renderer.read_observation(new_ids) if self._has_acted else None
        self._has_acted = True
        name, values = self._policy.act(observation)
        action = self._renderer.render_action(name, name_arguments(name, values))[:max_new_tokens]
        self._append(new_ids, is_sampled=False)
        self._append(action, is_sampled=True)
        reason = "stop" if action[-1] in stop_ids else "length"
        return Generation(token_ids=np.array(action, dtype=np.int32), finish_reason=reason)

    def feed(self, new_ids: Sequence[int]) -> None:
        """Append tokens that no action follows."""
        self._append(new_ids, is_sampled=False)

    def trace(self) -> Trace:
        """The stream so far, log-probabilities 0."""
        return Trace(
            token_ids=np.array(self._ids, dtype=np.int32),
            loss_mask=np.array(self._mask, dtype=np.bool_),
            logprobs=np.zeros(len(self._ids), dtype=np.float32),
            versions=tuple(self._spans),
        )

    async def close(self) -> None:
        """Nothing to give back."""
        return None

    def _append(self, ids: Sequence[int], *, is_sampled: bool) -> None:
        if not ids:
            return
        start = len(self._ids)
        self._ids.extend(int(token) for token in ids)
        self._mask.extend([is_sampled] * len(ids))
        version = self._engine.version
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(start=start, end=len(self._ids), version=version))
