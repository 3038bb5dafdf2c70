"""A small package with a bug, its hidden verifier, and what a hostile agent does in it: shared by the tests of the grading room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from strop.core.episode import Episode, EpisodeKey, Turn
from strop.core.outcome import Outcome
from strop.core.task import Task
from strop.grading.repair import GradingLimits, RepairGrader
from strop.ports import Sandbox
from strop.sandboxes import BubblewrapProvider
from strop.tasks.verifier import Case, Verifier

WORDS = '''"""Words for numbers."""

_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


def ordinal(number):
    suffix = "th"
    if number % 100 not in (11, 12, 13):
        suffix = _SUFFIXES.get(number % 10, suffix)
    return str(number) + suffix


def parts(number):
    """The digits with their place."""
    return [(place, int(digit)) for place, digit in enumerate(reversed(str(number)))]
'''
BUGGY = WORDS.replace("number % 100 not in", "number % 10 not in")
TESTS = """import unittest

from textkit.words import ordinal


class TestOrdinal(unittest.TestCase):
    def test_1(self):
        self.assertEqual(ordinal(1), "1st")

    def test_2(self):
        self.assertEqual(ordinal(11), "11th")


if __name__ == "__main__":
    unittest.main()
"""
VISIBLE = (1, 2, 3, 4, 11, 12, 21, 113)
HIDDEN = (0, 5, 13, 14, 22, 23, 31, 42, 101, 111, 112, 211, 311, 1011, 1013, 33, 10, 100)
TASK = Task(
    task_id="textkit.words.ordinal", instruction="The tests fail.", workspace="textkit", tools=("edit",), verifier="textkit", split="train"
)


def true_ordinal(number: int) -> str:
    return f"{number}th" if number % 100 in (11, 12, 13) else str(number) + {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def make_verifier(visible: Sequence[int] = VISIBLE, hidden: Sequence[int] = HIDDEN) -> Verifier:
    def cases(numbers: Sequence[int]) -> tuple[Case, ...]:
        return tuple(Case(args=(n,), expected=true_ordinal(n)) for n in numbers)

    return Verifier(module="textkit.words", qualname="ordinal", path="textkit/words.py", visible=cases(visible), hidden=cases(hidden))


class World:
    """The pool of one task."""

    def __init__(self, directory: Path, verifier: Verifier | None = None) -> None:
        self.directory = directory
        self.current = verifier or make_verifier()
        for path, text in {
            "textkit/__init__.py": '"""Text."""\n',
            "textkit/words.py": BUGGY,
            "textkit/lines.py": "from textkit.words import parts\n\n\ndef lines(text):\n    return text.split('\\n')\n",
            "tests/test_words.py": TESTS,
        }.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        directory.chmod(0o755)

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK] if split == TASK.split else []

    def base_dir(self, task: Task) -> str:
        return str(self.directory)

    def verifier(self, task: Task) -> Verifier:
        return self.current


def make_turn(call: str, status: str = "ok", text: str = "", **arguments: str) -> Turn:
    return Turn(trace=0, start=0, end=1, call=call, arguments=arguments, text=text or call, observation="", status=status)


def make_episode(changes: Mapping[str, bytes | None], turns: Sequence[Turn] = (), sample: int = 0) -> Episode:
    key = EpisodeKey(phase="rl", step=1, task_id=TASK.task_id, sample=sample)
    return Episode(key=key, traces=(), turns=tuple(turns), stop_reason="submitted", changes=changes)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A hostile program and what the grader must say.

    Attributes:
        name: Short.
        number: Number in the list of attacks that the suite follows, 0 for one of our own.
        files: What the agent writes into its box.
        runs: What it then runs there, as arguments of ``python``; visible tests run with ``["-m", "unittest"]``.
        turns: What it typed.
        reward: Expected reward.
        reasons: Allowed reasons.
        flags: Rules that must have fired.
        wall_s: Seconds that its grading box gets.
    """

    name: str
    number: int = 0
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    runs: Sequence[Sequence[str]] = ()
    turns: Sequence[Turn] = ()
    reward: float = 0.0
    reasons: Sequence[str] = ("tests",)
    flags: Sequence[str] = ()
    wall_s: float = 8.0


async def run_attack(attack: Attack, world: World, provider: BubblewrapProvider) -> Outcome:
    """Play the attack in a real box, collect what it changed there, stop the box, grade in another one."""
    async with played(attack, world, provider) as box:
        changes = box.changes()
    return await graded(attack, changes, world, provider)


@asynccontextmanager
async def played(attack: Attack, world: World, provider: BubblewrapProvider, *, timeout_s: float = 3.0) -> AsyncIterator[Sandbox]:
    """The box in which an attack was played; ``timeout_s`` for each of its runs. Stopped at the end."""
    box = await provider.start(world.base_dir(TASK))
    try:
        for path, text in attack.files.items():
            box.write(path, text.encode() if isinstance(text, str) else text)
        for argv in attack.runs:
            await box.run_python(argv, timeout_s=timeout_s)
        yield box
    finally:
        await box.stop()


async def graded(attack: Attack, changes: Mapping[str, bytes | None], world: World, provider: BubblewrapProvider) -> Outcome:
    """What the grader says of an attack's changes and turns."""
    grader = RepairGrader(world, provider, limits=GradingLimits(wall_s=attack.wall_s, cpu_s=0.4, load_cpu_s=1.0))
    try:
        return await grader.grade(TASK, make_episode(changes, attack.turns))
    finally:
        await grader.close()
