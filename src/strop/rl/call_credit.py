"""Credit for single calls: what a wasted call costs, charged to the tokens of that call alone.

A verdict says nothing about which of fifty calls was careless; whether a call was wasted is known at once and belongs to the call. Pure: no
torch, no waiting, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strop.agent.toolspec import TOOL_NAMES
from strop.core.episode import Episode, EpisodeKey, Turn


def wasted(turns: Sequence[Turn]) -> np.ndarray:
    """Return which calls of an episode were wasted, ``bool [turns]``.

    A call is wasted if it was malformed, if the tool refused it, if the same call had the same answer before while the files were the same
    (as told by the edits in place), or if it is an ``edit`` that was made before at all. Calls are compared by their answers, not by their
    spelling: a file has a path and a number, and ``03`` is 3.

    Example: in ``edit A, test, test, undo, test, test, edit A`` the second and the fourth ``test`` and the last ``edit`` are wasted.
    """
    made: set[tuple[object, ...]] = set()
    in_place: list[tuple[object, ...]] = []
    flags = np.zeros(len(turns), np.bool_)
    for index, turn in enumerate(turns):
        if turn.call == "edit":
            call: tuple[object, ...] = (turn.arguments.get("old"), turn.arguments.get("new"), turn.observation)
        else:  # without arguments it is the same call, however often its answer varies
            call = (turn.call, turn.observation if turn.arguments else "", *in_place)
        flags[index] = turn.status != "ok" or call in made
        made.add(call)
        if turn.status == "ok" and turn.call == "edit":
            in_place.append(call)
        elif turn.status == "ok" and turn.call == "undo" and in_place:
            in_place.pop()
    return flags


def call_credit(
    episodes: Sequence[Episode], cost: float, *, permutation: np.random.Generator | None = None
) -> Mapping[EpisodeKey, np.ndarray]:
    """Return the advantage of every call, ``float64 [turns]`` by episode: ``cost * (expected - wasted)``.

    Expected is the share of wasted calls among those of the same tool, so that trying an ``edit`` costs nothing as such; only a careless
    one does, against a careful one. The credit of a tool's calls adds up to zero. Calls that name no tool can't be compared with better
    ones of their kind and are measured against all calls.

    Example: of four ``edit`` calls one was refused and ``cost`` is ``.4``: that one gets ``-.3``, the three others ``+.1``.

    Source: a reward for each turn beside the final one, as in Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
    Reward Design", arXiv 2505.11821; here with a baseline for each tool and without discounted later rewards.

    Args:
        episodes: Those of a step that train, in a fixed order.
        cost: Reward that a wasted call costs, at least 0.
        permutation: Where set, the flags are permuted over all calls first (a control experiment).
    """
    flags = [wasted(episode.turns) for episode in episodes]
    names = [turn.call if turn.call in TOOL_NAMES and turn.status != "malformed" else "" for episode in episodes for turn in episode.turns]
    lost = np.concatenate([*flags, np.zeros(0, np.bool_)]).astype(np.float64)
    if permutation is not None:
        lost = lost[permutation.permutation(len(lost))]
    expected = {name: float(lost[[other == name for other in names]].mean()) for name in set(names)}
    if "" in expected:
        expected[""] = float(lost.mean())
    credit = cost * (np.array([expected[name] for name in names], dtype=np.float64) - lost)
    ends = np.cumsum([len(episode.turns) for episode in episodes])
    return {episode.key: part for episode, part in zip(episodes, np.split(credit, ends[:-1]) if len(ends) else (), strict=True)}
