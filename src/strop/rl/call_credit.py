"""Credit for single calls, charged to the tokens of that call alone: what a wasted call costs, and what the edit that repaired earns.

A verdict says nothing about which of twelve calls was careless, and not which of three edits it was for. Whether a call was wasted is known
at once; which edit earned the verdict is known at the end, since an agent undoes the others. Pure: no torch, no waiting, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strop.agent.toolspec import TOOL_NAMES
from strop.core.episode import Episode, EpisodeKey, Turn

MIN_TOLD = 32
"""Characters of an answer from which on it can be recognised in an instruction; shorter ones stand there by chance."""


def wasted(turns: Sequence[Turn], told: str = "") -> np.ndarray:
    """Return which calls of an episode were wasted, ``bool [turns]``.

    A call is wasted if it was malformed, if the tool refused it, if the same call had the same answer before while the files were the same
    (as told by the edits in place), if it is an ``edit`` that was made before at all, or if nothing is edited and the instruction has its
    answer word for word. Calls are compared by their answers, not by their spelling: a file has a path and a number, and ``03`` is 3.

    Example: in ``edit A, test, test, undo, test, test, edit A`` the second and the fourth ``test`` and the last ``edit`` are wasted; so is
    the third if ``told`` has its output.

    Args:
        turns: Of the episode.
        told: The task's instruction.
    """
    made: set[tuple[object, ...]] = set()
    in_place: list[tuple[object, ...]] = []
    flags = np.zeros(len(turns), np.bool_)
    for index, turn in enumerate(turns):
        if turn.call == "edit":
            call: tuple[object, ...] = (turn.arguments.get("old"), turn.arguments.get("new"), turn.observation)
        else:  # without arguments it is the same call, however often its answer varies
            call = (turn.call, turn.observation if turn.arguments else "", *in_place)
        is_told = not in_place and turn.call != "edit" and len(turn.observation) >= MIN_TOLD and turn.observation in told
        flags[index] = turn.status != "ok" or call in made or is_told
        made.add(call)
        if turn.status == "ok" and turn.call == "edit":
            in_place.append(call)
        elif turn.status == "ok" and turn.call == "undo" and in_place:
            in_place.pop()
    return flags


def stands(turns: Sequence[Turn]) -> np.ndarray:
    """Return which edits of an episode were in place when it ended, ``bool [turns]``; false for every other call.

    Example: in ``edit A, test, undo, edit B, test, submit`` that is ``edit B`` alone.
    """
    in_place: list[int] = []
    for index, turn in enumerate(turns):
        if turn.status == "ok" and turn.call == "edit":
            in_place.append(index)
        elif turn.status == "ok" and turn.call == "undo" and in_place:
            in_place.pop()
    flags = np.zeros(len(turns), np.bool_)
    flags[in_place] = True
    return flags


def call_credit(
    episodes: Sequence[tuple[Episode, float]],
    *,
    wasted_call_cost: float = 0.0,
    right_edit_credit: float = 0.0,
    instructions: Mapping[str, str] | None = None,
    permutation: np.random.Generator | None = None,
) -> Mapping[EpisodeKey, np.ndarray]:
    """Return the advantage of every call, ``float64 [turns]`` by episode.

    It is ``wasted_call_cost * (expected - wasted)``, and for an edit that the tool took ``right_edit_credit * (right - expected)`` more,
    where right is an edit that stood at the end of an episode with full reward.

    Expected is the share of such calls: of wasted ones among the calls of the same tool, so that trying an ``edit`` costs nothing as such
    and only a careless one does, against a careful one; of right ones among all edits taken. Either credit adds up to zero. Calls that
    name no tool can't be compared with better ones of their kind and are measured against all calls.

    Example: of four ``edit`` calls one was refused and the cost is ``.4``: that one gets ``-.3``, the three others ``+.1``.

    Source: a reward for each turn beside the final one, as in Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
    Reward Design", arXiv 2505.11821; here with a baseline for each tool and without discounted later rewards.

    Args:
        episodes: Those of a step that train, in a fixed order, with their rewards in ``[0, 1]``.
        wasted_call_cost: Reward that a wasted call costs, at least 0.
        right_edit_credit: Reward that the edit earns for which an episode got its reward, at least 0.
        instructions: Instruction of each task; an answer that stands in it tells nothing new.
        permutation: Where set, wasted calls are permuted over the calls of their tool, and right edits over all edits taken (a control
            experiment whose credit is as large as that of the real one).
    """
    turns = [turn for episode, _ in episodes for turn in episode.turns]
    credit = np.zeros(len(turns))
    if wasted_call_cost:
        told = instructions or {}
        flags = _joined([wasted(episode.turns, told.get(episode.key.task_id, "")) for episode, _ in episodes])
        names = np.array([turn.call if turn.call in TOOL_NAMES and turn.status != "malformed" else "" for turn in turns], np.str_)
        for name in sorted(set(names.tolist())):
            lost = flags[names == name]
            expected = lost.mean() if name else flags.mean()
            if permutation is not None:
                lost = permutation.permutation(lost)
            credit[names == name] += wasted_call_cost * (expected - lost)
    if right_edit_credit:
        right = _joined([stands(episode.turns) & (reward >= 1) for episode, reward in episodes])
        taken = np.array([turn.call == "edit" and turn.status == "ok" for turn in turns], np.bool_)
        earned = right[taken]
        if permutation is not None:
            earned = permutation.permutation(earned)
        if len(earned):
            credit[taken] += right_edit_credit * (earned - earned.mean())
    ends = np.cumsum([len(episode.turns) for episode, _ in episodes])
    parts = np.split(credit, ends[:-1]) if len(ends) else []
    return {episode.key: part for (episode, _), part in zip(episodes, parts, strict=True)}


def _joined(flags: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([*flags, np.zeros(0, np.bool_)]).astype(np.float64)
