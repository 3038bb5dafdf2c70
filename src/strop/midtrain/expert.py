"""A scripted, imperfect, exploring expert: it knows the workflow and, now and then, the repair.

Its trajectories teach how to work with the tools. It is imperfect on purpose: it tries wrong edits, sometimes submits without running
the tests or although they fail, and gives up; so a policy that imitates it has something left to learn from rewards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strop.agent.baselines import is_green
from strop.core.random import generator
from strop.midtrain.base.cases import choose_edits
from strop.tasks.mutation import Edit

_HIT = re.compile(r"^\[(\d+)\] (.+?):(\d+):(.*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """Probabilities of what the expert does.

    Attributes:
        right: A try is the true repair.
        list_first: It lists the files before searching.
        search_bare: It searches for the name alone instead of ``def name``.
        skip_test: It submits after an edit without running the tests.
        submit_red: It submits although the tests fail.
        forget_undo: It leaves a failed edit in place before the next try.
        slip: It swaps the old text and the new, so that the call is refused as a rule; it then tries again.
    """

    right: float = 0.5
    list_first: float = 0.1
    search_bare: float = 0.15
    skip_test: float = 0.25
    submit_red: float = 0.4
    forget_undo: float = 0.05
    slip: float = 0.0


class Expert:
    """Acts on one task.

    Args:
        function: Name of the function under repair (``"Class.method"`` for a method).
        path: Its file, workspace-relative.
        gold: The repair, as an edit of the broken file.
        candidates: All edits of the broken function, for its wrong tries.
        habits: Probabilities.
        seed: With ``key``, fixes every choice.
        key: Names the episode.
    """

    def __init__(self, *, function: str, path: str, gold: Edit, candidates: Sequence[Edit], habits: Habits, seed: int, key: object) -> None:
        self._name = function.split(".")[-1]
        self._path = path
        self._gold = gold
        self._candidates = list(candidates)
        self._habits = habits
        self._rng = generator("expert", seed, key)
        self._file = path
        self._line = gold.line
        self._tried: set[Edit] = set()
        self._last = ""

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        """Return the next call."""
        name, args = self._decide(observation or "")
        self._last = name
        return name, args

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _decide(self, observation: str) -> tuple[str, list[str]]:
        h = self._habits
        if self._last == "":
            if self._chance(h.list_first):
                return "list", []
            return self._search()
        if self._last == "list":
            return self._search()
        if self._last == "search":
            self._locate(observation)
            return "read", [self._file, str(self._line)]
        if self._last == "edit" and observation.startswith("error"):
            return self._edit()
        if self._last == "edit":
            return ("submit", []) if self._chance(h.skip_test) else ("test", [])
        if self._last == "test":
            if is_green(observation) or self._chance(h.submit_red):
                return "submit", []
            return self._edit() if self._chance(h.forget_undo) else ("undo", [])
        return self._edit()

    def _search(self) -> tuple[str, list[str]]:
        return "search", [self._name if self._chance(self._habits.search_bare) else f"def {self._name}"]

    def _locate(self, observation: str) -> None:
        """Take file number and line from the hit that defines the function in its own file."""
        for row in observation.split("\n"):
            hit = _HIT.match(row)
            if hit and hit[2] == self._path and f"def {self._name}" in hit[4]:
                self._file, self._line = hit[1], int(hit[3])
                return

    def _edit(self) -> tuple[str, list[str]]:
        edit = self._gold
        fresh = [c for c in self._candidates if c not in self._tried and c != self._gold]
        if fresh and not self._chance(self._habits.right):
            edit = choose_edits(self._rng, fresh, 1)[0]
        if self._chance(self._habits.slip):
            return "edit", [self._file, edit.new, str(edit.line), edit.old]
        self._tried.add(edit)
        return "edit", [self._file, edit.old, str(edit.line), edit.new]


def habits_of_level(rng: np.random.Generator) -> Habits:
    """Return habits for one episode: experts differ in how careful they are, and most soon have enough.

    They show what every tool is for. That it pays to test, to undo and to try again is left to the rewards.
    """
    careless = float(rng.random())
    return Habits(right=0.4, skip_test=0.2 + 0.4 * careless, submit_red=0.4 + 0.4 * careless, slip=0.3)
