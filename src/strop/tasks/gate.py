"""The admission gate: the original passes, the mutant fails, three times in shuffled order, in the environment that an agent will have.

The original runs in a fresh process each time, the mutant three times in one (so state that it leaves behind shows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from strop.agent.output import command_output
from strop.core.random import generator
from strop.tasks.box import Box
from strop.tasks.factory import Prepared
from strop.tasks.mutation import Edit, apply_edit

ROUNDS = 3
REPLAY_DEADLINE_S = 20.0
UNITTEST_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A mutant that passed the gate.

    Attributes:
        edit: The mutation.
        output: What the visible tests print on it, as an agent sees it.
        failed: Numbers of visible and hidden cases that it fails.
    """

    edit: Edit
    output: str
    failed: tuple[int, int]


class Gate:
    """Checks functions and mutants.

    Args:
        usual: A box like a user's sandbox.
        other: A box that differs in hash seed, time zone, home and installed packages.
        seed: Fixes the shuffles.
    """

    def __init__(self, usual: Box, other: Box, seed: int) -> None:
        self._usual = usual
        self._other = other
        self._seed = seed
        self._laid = ""
        self.refused: Counter[str] = Counter()

    def admit(self, prepared: Prepared, source: str, edits: Iterable[Edit], known: dict[str, Any] | None = None) -> list[Admitted]:
        """Return the admitted mutants of one function; refusals are counted in ``refused``.

        Args:
            prepared: The function with its tests.
            source: Text of its module.
            edits: Mutations to check.
            known: Verdicts on this very function with these very tests from an earlier build, as plain data; new ones are added.
        """
        known = {} if known is None else known
        if "gold" not in known:
            known["gold"] = self._check_gold(prepared)
        if known["gold"]:
            self.refused[f"gold: {known['gold']}"] += 1
            return []
        admitted = []
        for edit in edits:
            key = repr(edit)
            if key not in known:
                verdict = self._check_mutant(prepared, apply_edit(source, edit), edit)
                known[key] = verdict if isinstance(verdict, str) else [verdict.output, *verdict.failed]
            if isinstance(known[key], str):
                self.refused[f"mutant: {known[key]}"] += 1
            else:
                output, visible, hidden = known[key]
                admitted.append(Admitted(edit, output, (visible, hidden)))
        return admitted

    def _lay(self, tree_id: str) -> None:
        if self._laid != tree_id:
            self._usual.ask("lay", tree=f"/trees/{tree_id}")
            self._laid = tree_id

    def _check_gold(self, prepared: Prepared) -> str:
        self._lay(prepared.candidate.tree_id)
        everything = list(range(len(prepared.verifier.visible) + len(prepared.verifier.hidden)))
        for number in range(ROUNDS):
            if self._replay(self._usual, prepared, "/workspace", {}, [number]) != [everything]:
                return "fails"
        if self._replay(self._other, prepared, f"/trees/{prepared.candidate.tree_id}", {}, [0]) != [everything]:
            return "depends on the environment"
        reply = self._unittests(prepared, {})
        return "" if reply.get("exit_code") == 0 else "its unit tests fail"

    def _check_mutant(self, prepared: Prepared, mutant: str, edit: Edit) -> Admitted | str:
        self._lay(prepared.candidate.tree_id)
        files = {prepared.candidate.path: mutant}
        num_visible = len(prepared.verifier.visible)
        total = num_visible + len(prepared.verifier.hidden)
        passed = self._replay(self._usual, prepared, "/workspace", files, list(range(ROUNDS)))
        if passed is None:
            return "hangs or dies"
        if any(result != passed[0] for result in passed):
            return "depends on the order"
        visible = num_visible - sum(index < num_visible for index in passed[0])
        hidden = total - num_visible - sum(index >= num_visible for index in passed[0])
        if not visible or not hidden:
            return "isn't detected"
        replies = [self._unittests(prepared, files) for _ in range(2)]
        if any("refused" in reply for reply in replies):
            return "hangs or dies"
        if not all(reply["exit_code"] for reply in replies):
            return "its unit tests pass"
        outputs = {command_output(reply["output"]) for reply in replies}
        if len(outputs) > 1:
            return "its output varies"
        return Admitted(edit, outputs.pop(), (visible, hidden))

    def _replay(self, box: Box, prepared: Prepared, tree: str, files: dict[str, str], rounds: list[int]) -> list[list[int]] | None:
        """Indices of the cases that hold in each round of one fresh process, or ``None`` if it gave no answer."""
        verifier = prepared.verifier
        cases = [case.to_json() for case in (*verifier.visible, *verifier.hidden)]
        cluster = prepared.candidate.cluster
        reply = box.ask(
            "replay",
            deadline_s=REPLAY_DEADLINE_S,
            tree=tree,
            files=files,
            module=verifier.module,
            name=verifier.qualname,
            drain=verifier.drain,
            cases=cases,
            orders=[generator("gate", self._seed, cluster, number).permutation(len(cases)).tolist() for number in rounds],
        )
        return None if "refused" in reply else reply["passed"]

    def _unittests(self, prepared: Prepared, files: dict[str, str]) -> dict[str, Any]:
        return self._usual.ask("unittests", deadline_s=UNITTEST_DEADLINE_S, files={prepared.test_path: prepared.test_text, **files})
