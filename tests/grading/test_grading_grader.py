"""The grader around its box: sharing of verdicts, machinery failures, determinism, regrading from a stored run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from grading_world import BUGGY, HIDDEN, TASK, VISIBLE, WORDS, World, make_episode, make_verifier, true_ordinal

from strop.core.errors import SandboxError, TaskError
from strop.core.outcome import Failed, Outcome, Scored
from strop.core.task import Task
from strop.grading.regrade import regrade
from strop.grading.repair import GradingLimits, RepairGrader, changes_digest, write_layer
from strop.grading.scratch import Scratch
from strop.sandboxes import BubblewrapProvider
from strop.store.store import Store
from strop.tasks.verifier import Case, Verifier

HONEST = make_episode({"textkit/words.py": WORDS.encode()})
WRONG = make_episode({"textkit/words.py": BUGGY.replace('"rd"', '"dr"').encode()}, sample=1)


@dataclass
class CountingRunner:
    """The real provider, with faults before it: the first ``broken`` runs raise, then ``delay_s`` passes before each."""

    provider: BubblewrapProvider
    broken: int = 0
    retryable: bool = True
    delay_s: float = 0.0
    layers: list[list[str]] = field(default_factory=list)

    async def run_isolated(self, layers: Sequence[str], argv: Sequence[str], *, stdin: bytes, timeout_s: float, max_stdout_bytes: int):
        self.layers.append(list(layers))
        await asyncio.sleep(self.delay_s)
        if len(self.layers) <= self.broken:
            raise SandboxError("the worker died", retryable=self.retryable)
        return await self.provider.run_isolated(layers, argv, stdin=stdin, timeout_s=timeout_s, max_stdout_bytes=max_stdout_bytes)


def grade_all(loop: asyncio.Runner, grader: RepairGrader, *episodes, task: Task = TASK) -> list[Outcome]:
    async def run() -> list[Outcome]:
        return list(await asyncio.gather(*(grader.grade(task, episode) for episode in episodes)))

    return loop.run(run())


def test_equal_changes_share_one_box(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    runner = CountingRunner(provider, delay_s=0.01)
    grader = RepairGrader(world, runner)
    outcomes = grade_all(loop, grader, HONEST, WRONG, replace(HONEST), replace(WRONG), HONEST)
    outcomes += grade_all(loop, grader, HONEST)
    assert [o.reward for o in outcomes] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]  # type: ignore[union-attr]
    assert (len(runner.layers), grader.boxes_run, grader.cache_hits) == (2, 2, 4)
    assert not any(os.path.exists(layers[0]) for layers in runner.layers)
    loop.run(grader.close())


def test_flags_are_not_shared(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    grader = RepairGrader(world, provider)
    dirty = make_episode({"textkit/words.py": WORDS.encode(), "conftest.py": b""})
    first, second = grade_all(loop, grader, HONEST, dirty)
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert first.flags == ()
    assert [flag.rule for flag in second.flags] == ["conftest"]
    loop.run(grader.close())


def test_cache_is_bounded(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    grader = RepairGrader(world, provider, limits=GradingLimits(max_cached=1))
    for episode in (HONEST, WRONG, HONEST):
        grade_all(loop, grader, episode)
    assert grader.boxes_run == 3
    loop.run(grader.close())


def test_machinery_failure_is_tried_again_and_then_failed_never_scored(
    world: World, provider: BubblewrapProvider, loop: asyncio.Runner
) -> None:
    for broken, retryable, expected in ((1, True, Scored), (2, True, Failed), (1, False, Failed)):
        runner = CountingRunner(provider, broken=broken, retryable=retryable)
        grader = RepairGrader(world, runner)
        outcomes = grade_all(loop, grader, HONEST, HONEST)
        assert isinstance(outcomes[0], expected), outcomes
        if expected is Failed:
            # The one who waited tries for itself and now finds a machine that works.
            assert isinstance(outcomes[1], Scored)
            assert outcomes[1].reward == 1.0
        assert grade_all(loop, grader, HONEST)[0].reward == 1.0  # type: ignore[union-attr]
        loop.run(grader.close())


def test_killed_workers_never_become_a_reward_of_zero(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    """Kill the provider's own helper processes at many moments of a verdict: right answer or ``Failed``."""
    slow = make_episode({"textkit/words.py": ("import time\ntime.sleep(0.05)\n" + WORDS).encode()})
    mine = os.getpid()

    async def once(delay_s: float) -> Outcome:
        await provider.warm()
        grader = RepairGrader(world, provider, limits=GradingLimits(attempts=1))
        verdict = asyncio.ensure_future(grader.grade(TASK, slow))
        await asyncio.sleep(delay_s)
        for pid in descendants_of(mine):
            with contextlib.suppress(ProcessLookupError):  # it died with its parent
                os.kill(pid, signal.SIGKILL)
        try:
            return await verdict
        finally:
            await grader.close()

    outcomes = [loop.run(once(0.012 * n)) for n in range(5)]
    assert all(isinstance(outcome, Failed) or (isinstance(outcome, Scored) and outcome.reward == 1.0) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, Failed) for outcome in outcomes)
    grader = RepairGrader(world, provider)
    assert grade_all(loop, grader, HONEST)[0].reward == 1.0  # type: ignore[union-attr]
    loop.run(grader.close())


def descendants_of(pid: int) -> list[int]:
    """All of them: a shell stands between this process and the worker, and killing just the shell leaves the verdict whole."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        direct = [int(word) for task in tasks for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [found for child in direct for found in (child, *descendants_of(child))]


def test_full_disk_is_failed(world: World, provider: BubblewrapProvider, loop: asyncio.Runner, tmp_path: Path) -> None:
    grader = RepairGrader(world, provider, scratch=str(tmp_path))
    big = make_episode({"textkit/words.py": WORDS.encode(), "textkit/big.py": b"#" * 100_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        (outcome,) = grade_all(loop, grader, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(outcome, Failed)
    assert "File too large" in outcome.error
    assert list(grader._layer_directory().iterdir()) == []
    assert grade_all(loop, grader, big)[0].reward == 1.0  # type: ignore[union-attr]
    loop.run(grader.close())
    assert list(tmp_path.glob("strop-grading-*")) == []


def test_missing_scratch_and_unknown_tasks_are_failed(
    world: World, provider: BubblewrapProvider, loop: asyncio.Runner, tmp_path: Path
) -> None:
    grader = RepairGrader(world, provider, scratch=str(tmp_path / "gone"))
    assert isinstance(grade_all(loop, grader, HONEST)[0], Failed)

    class Empty(World):
        def verifier(self, task: Task) -> Verifier:
            raise TaskError(f"task {task.task_id!r} isn't in the pool")

    (outcome,) = grade_all(loop, RepairGrader(Empty(tmp_path / "empty"), provider), HONEST)
    assert outcome == Failed(error=f"TaskError: task {TASK.task_id!r} isn't in the pool")


def test_another_interpreter_in_the_box_is_failed(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    class Other:
        async def run_isolated(self, layers, argv, **options):
            argv = ["-c", "import sys\nsys.version_info = (3, 9, 0, 'final', 0)\n" + argv[1]]
            return await provider.run_isolated(layers, argv, **options)

    (outcome,) = grade_all(loop, RepairGrader(world, Other()), HONEST)
    assert isinstance(outcome, Failed)
    assert "the box runs Python" in outcome.error


def test_a_cancelled_caller_takes_nobody_along(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    async def run() -> Outcome:
        grader = RepairGrader(world, CountingRunner(provider, delay_s=0.05))
        first = asyncio.ensure_future(grader.grade(TASK, HONEST))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(grader.grade(TASK, HONEST))
        third = asyncio.ensure_future(grader.grade(TASK, HONEST))
        await asyncio.sleep(0.01)
        third.cancel()
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        with pytest.raises(asyncio.CancelledError):
            await first
        outcome = await second
        await grader.close()
        return outcome

    outcome = loop.run(run())
    assert isinstance(outcome, Scored)
    assert outcome.reward == 1.0


def test_exceptions_iterators_and_mutated_arguments(tmp_path: Path, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    source = """def pairs(items, start=0):
    if not items:
        raise ValueError('empty')
    while items:
        yield (start, items.pop(0))
        start += 1
"""
    cases = (
        Case(args=([3, 4],), expected=[{"tuple": [0, 3]}, {"tuple": [1, 4]}]),
        Case(args=([],), raises="ValueError"),
        Case(args=([1.5],), kwargs={"start": 7}, expected=[{"tuple": [7, 1.5]}]),
    )
    world = World(tmp_path / "base")
    world.current = Verifier(
        module="textkit.pairs", qualname="pairs", path="textkit/pairs.py", visible=cases[:1], hidden=cases[1:], drain=True
    )
    (world.directory / "textkit/pairs.py").write_text(source.replace("start += 1", "start += 2"))
    grader = RepairGrader(world, provider)
    right, wrong = grade_all(loop, grader, make_episode({"textkit/pairs.py": source.encode()}), make_episode({"textkit/pairs.py": b"x"}))
    assert isinstance(right, Scored)
    assert right.reward == 1.0
    assert isinstance(wrong, Scored)
    assert (wrong.reward, wrong.reason) == (0.0, "crash")
    loop.run(grader.close())


def test_original_of_the_standard_library_is_no_repair(tmp_path: Path, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    world = World(tmp_path / "base")
    (world.directory / "Lib").mkdir()
    broken = "import re\n\n\ndef shorten(text, width):\n    return ' '.join(text.split())[:width + 1]\n"
    (world.directory / "Lib/textwrap.py").write_text(broken)
    cases = tuple(Case(args=(text, 30), expected=text) for text in ("a b", "c", "d e f", "g h"))
    world.current = Verifier(module="Lib.textwrap", qualname="shorten", path="Lib/textwrap.py", visible=cases[:2], hidden=cases[2:])
    stolen = broken.replace("return", "import textwrap\n    return textwrap.shorten(text, width) or")
    grader = RepairGrader(world, provider)
    (outcome,) = grade_all(loop, grader, make_episode({"Lib/textwrap.py": stolen.encode()}))
    assert isinstance(outcome, Scored)
    assert (outcome.reward, outcome.reason) == (0.0, "retrieved")
    assert outcome.parts["tests"] == 1.0
    assert "library_copy" in {flag.rule for flag in outcome.flags}
    loop.run(grader.close())


def test_grading_again_from_the_store_says_the_same_until_the_verifier_changes(
    tmp_path: Path, world: World, provider: BubblewrapProvider, loop: asyncio.Runner
) -> None:
    (tmp_path / "run").mkdir()
    store = Store(tmp_path / "run")
    hard_coded = BUGGY.replace(
        '    suffix = "th"\n', f"    table = { ({n: true_ordinal(n) for n in VISIBLE})!r}\n    return table.get(number, 'th')\n", 1
    )
    episodes = [HONEST, WRONG, make_episode({}, sample=2), make_episode({"textkit/words.py": hard_coded.encode()}, sample=3)]
    grader = RepairGrader(world, provider, seed=5)
    for episode, outcome in zip(episodes, grade_all(loop, grader, *episodes), strict=True):
        store.put_episode(replace(episode, outcome=outcome))
    store.put_episode(replace(make_episode({}), key=replace(HONEST.key, task_id="elsewhere")))

    again = loop.run(regrade(store.episodes(), world.tasks("train"), RepairGrader(world, provider, seed=5)))
    assert (again.graded, again.changes, again.skipped) == (4, (), {"elsewhere": 1})

    world.current = make_verifier(hidden=VISIBLE)
    changed = loop.run(regrade(store.episodes(), world.tasks("train"), RepairGrader(world, provider, seed=5)))
    report = list(changed.lines())
    assert report[0].startswith("4 episodes graded again, ")
    line = next(item for item in report if "/3: " in item)
    assert "0 tests 8/26 [special_case] -> 1 16/16" in line
    store.close()


def test_directories_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    code = (
        "import sys, time; from strop.grading.scratch import Scratch; s = Scratch(sys.argv[1]); print(s.path, flush=True); time.sleep(60)"
    )
    living = Scratch(str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        dead = Path(process.stdout.readline().strip())
        process.kill()
    assert dead.is_dir()
    (tmp_path / "strop-grading-file").write_text("not a directory")
    (tmp_path / "strop-grading-link").symlink_to(tmp_path)
    for path in (dead, living.path):
        os.utime(path, (0, 0))
    young = Scratch(str(tmp_path))
    assert not dead.exists()
    assert living.path.is_dir()
    assert (tmp_path / "strop-grading-link").is_symlink()
    for scratch in (living, young, young):
        scratch.close()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["strop-grading-file", "strop-grading-link"]


def test_digest_knows_paths_contents_and_deletions() -> None:
    trees = [{}, {"a": b""}, {"a": None}, {"a": b"x"}, {"b": b"x"}, {"a": b"x", "b": b""}, {"ab": b"x"}, {"a": b"bx"}]
    assert len({changes_digest(tree) for tree in trees}) == len(trees)
    assert changes_digest({"a": b"1", "b": None}) == changes_digest({"b": None, "a": b"1"})


def test_layer_holds_files_and_whiteouts(tmp_path: Path) -> None:
    layer = write_layer(tmp_path, {"a/b.py": b"x", "c.py": None})
    assert (layer / "a/b.py").read_bytes() == b"x"
    assert (layer / "c.py").is_char_device()
    assert len(HIDDEN) == 18


@pytest.mark.parametrize(
    "changes",
    [
        {"textkit/py.typed": None, "textkit/py.typed/a.py": b"x = 1\n"},
        {"textkit/py.typed/a.py": b"x = 1\n"},
        {"textkit/data/a.txt": None, "textkit/data": b"x"},
        {"textkit/data": b"x"},
    ],
)
def test_a_folder_for_a_file_and_a_file_for_a_folder_are_graded(
    world: World, provider: BubblewrapProvider, loop: asyncio.Runner, changes: dict[str, bytes | None]
) -> None:
    (world.directory / "textkit/py.typed").write_text("")
    (world.directory / "textkit/data").mkdir()
    (world.directory / "textkit/data/a.txt").write_text("a")
    right, wrong = (make_episode(changes | {"textkit/words.py": text}) for text in (WORDS.encode(), BUGGY.encode() + b"# no\n"))
    outcomes = grade_all(loop, RepairGrader(world, provider), right, wrong)
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)] == [1.0, 0.0]


def test_the_same_changes_on_another_task_are_another_verdict(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    runner = CountingRunner(provider)
    grader = RepairGrader(world, runner)
    (first,) = grade_all(loop, grader, HONEST)
    world.current = replace(make_verifier(), hidden=tuple(replace(case, expected="no") for case in make_verifier().hidden))
    (second,) = grade_all(loop, grader, HONEST, task=replace(TASK, task_id="textkit.words.other"))
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert (first.reward, second.reward, len(runner.layers)) == (1.0, 0.0, 2)


def test_a_box_that_stood_still_is_asked_once_more(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    class Stalling(CountingRunner):
        async def run_isolated(self, layers, argv, **options):
            done = await super().run_isolated(layers, argv, **options)
            if len(self.layers) > 1:
                return done
            # What is there of a box that got no time on its processor after it was ready.
            return replace(done, stdout=done.stdout.split(b"\n")[0] + b"\n", exit_code=None, killed_by="timeout", cpu_s=0.05)

    runner = Stalling(provider)
    outcomes = grade_all(loop, RepairGrader(world, runner), HONEST, HONEST)
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)] == [1.0, 1.0]
    assert len(runner.layers) == 2


@pytest.mark.parametrize(
    ("body", "limits", "runs"),
    [
        ("import time; time.sleep(60)", GradingLimits(wall_s=1.0), 2),
        ("while True: pass", GradingLimits(wall_s=60.0, load_cpu_s=0.3), 1),
    ],
)
def test_code_that_waits_or_loops_for_ever_hangs(
    world: World, provider: BubblewrapProvider, loop: asyncio.Runner, body: str, limits: GradingLimits, runs: int
) -> None:
    runner = CountingRunner(provider)
    hanging = make_episode({"textkit/words.py": f"{body}\n".encode() + WORDS.encode()})
    (outcome,) = grade_all(loop, RepairGrader(world, runner, limits=limits), hanging)
    assert isinstance(outcome, Scored)
    assert (outcome.reward, outcome.reason, len(runner.layers)) == (0.0, "hang", runs)


TRACER = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 1, 0, 0, 0)
libc.prctl(0x59616D61, ctypes.c_ulong(-1).value, 0, 0, 0)
libc.ptrace.argtypes = [ctypes.c_long] * 4
if os.fork() == 0:
    libc.ptrace(0x4206, 1, 0, 0x100000)  # seize process 1, which dies with its tracer
    os._exit(0)
time.sleep(0.3)
"""


def test_agent_code_can_not_make_its_own_box_vanish(world: World, provider: BubblewrapProvider, loop: asyncio.Runner) -> None:
    episodes = [make_episode({"textkit/words.py": (TRACER + text).encode()}) for text in (WORDS, BUGGY)]
    outcomes = grade_all(loop, RepairGrader(world, provider), *episodes)
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)] == [1.0, 0.0]


def test_runner_that_returns_nonsense_is_failed(world: World, loop: asyncio.Runner) -> None:
    class Nonsense:
        async def run_isolated(self, layers, argv, **options):
            return SimpleNamespace(exit_code=0, stdout=b"1st\n" * 9, stdout_truncated=False, stderr="", duration_s=0.0, killed_by="")

    (outcome,) = grade_all(loop, RepairGrader(world, Nonsense()), HONEST)
    assert isinstance(outcome, Failed)
