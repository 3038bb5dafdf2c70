"""Faults of the machine during a verdict: never a wrong reward, never a lost episode.

    python benchmarks/grading_faults.py [--rounds 20]

Grader killed: a process that grades in a loop dies by SIGKILL at many moments; every outcome it wrote is right and the next process grades
the same. Box killed: process 1 of the box dies at many moments, from outside. Helpers killed: so does everything that the sandbox runs.
Disk full: writes fail beyond many sizes. Clock jump: the wall clock leaps by days, back and forth, all the time. Channel cut: a real result
stream ends after each of its bytes, with every way in which a box can end. An outcome is right (the reward that the change deserves), or
``Failed`` (tried again by whoever asked). Anything else is wrong. Writes docs/results/grader-faults.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from grading_common import provider
from grading_world import BUGGY, TASK, WORDS, World, make_episode

from strop.core.errors import GradingError
from strop.core.outcome import Failed, Outcome, Scored
from strop.grading.protocol import make_plan
from strop.grading.repair import GradingLimits, RepairGrader
from strop.grading.verdict import BoxReport, judge
from strop.sandboxes import BubblewrapProvider
from strop.ui.results import write_result

SLOW = "import time\ntime.sleep(0.05)\n"
RIGHT = make_episode({"textkit/words.py": (SLOW + WORDS).encode()})
WRONG = make_episode({"textkit/words.py": (SLOW + BUGGY.replace('"rd"', '"dr"')).encode()}, sample=1)
MUST_FAIL = ("box killed", "helpers killed", "disk full")
"""Faults that some verdict can't survive: if none is lost, the fault wasn't there."""
MERIT = ((RIGHT, 1.0), (WRONG, 0.0))
CHILD = """
import asyncio, sys
sys.path[:0] = {path!r}
import grading_faults
asyncio.run(grading_faults.grade_forever(sys.argv[1]))
"""


def classify(outcome: Outcome | None, merit: float) -> str:
    """``"right"``, ``"failed"`` or ``"wrong"``."""
    if isinstance(outcome, Failed):
        return "failed"
    return "right" if isinstance(outcome, Scored) and outcome.reward == merit else "wrong"


async def grade_pair(world: World, boxes: BubblewrapProvider, scratch: str | None = None, attempts: int = 1) -> Counter[str]:
    """Grade one right and one wrong repair in fresh boxes."""
    grader = RepairGrader(world, boxes, limits=GradingLimits(attempts=attempts), scratch=scratch)
    found: Counter[str] = Counter()
    try:
        for episode, merit in MERIT:
            found[classify(await grader.grade(TASK, episode), merit)] += 1
    finally:
        await grader.close()
    return found


async def grade_forever(folder: str) -> None:
    """Write one line for every verdict until killed."""
    boxes, world = provider(1), World(Path(folder) / "base")
    while True:
        grader = RepairGrader(world, boxes, scratch=folder)
        for episode, merit in MERIT:
            outcome = await grader.grade(TASK, episode)
            os.write(1, f"{classify(outcome, merit)}\n".encode())


def grader_killed(rounds: int) -> Counter[str]:
    """Kill a grading process at many moments; what it said counts, and what the next one says."""
    found: Counter[str] = Counter()
    path = [str(Path(__file__).parent), *sys.path]
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", CHILD.format(path=path), folder]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
                assert child.stdout is not None
                found[child.stdout.readline().strip() or "lost"] += 1
                time.sleep(0.011 * number)
                os.kill(child.pid, signal.SIGKILL)
                for line in child.stdout:
                    if line.endswith("\n"):
                        found[line.strip()] += 1
    return found


async def box_killed(world: World, boxes: BubblewrapProvider, rounds: int) -> Counter[str]:
    """Kill process 1 of the box during a verdict, which kills the rest of it."""
    return await killed(world, boxes, rounds, first_processes)


async def helpers_killed(world: World, boxes: BubblewrapProvider, rounds: int) -> Counter[str]:
    """Kill everything that the sandbox runs during a verdict."""
    return await killed(world, boxes, rounds, descendants)


async def killed(world: World, boxes: BubblewrapProvider, rounds: int, victims: Callable[[], list[int]]) -> Counter[str]:
    """Kill at moments that are spread over the time of two verdicts."""
    await grade_pair(world, boxes)
    began = time.perf_counter()
    found = await grade_pair(world, boxes)
    usual_s = time.perf_counter() - began
    for number in range(rounds):
        await boxes.warm()
        verdict = asyncio.ensure_future(grade_pair(world, boxes))
        await asyncio.sleep(usual_s * number / rounds)
        for pid in victims():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found += await verdict
    return found + await grade_pair(world, boxes)


def descendants() -> list[int]:
    """Processes below this one, parents first; those that end meanwhile may be missing."""
    found, at = [os.getpid()], 0
    while at < len(found):
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{found[at]}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        at += 1
    return found[1:]


def first_processes() -> list[int]:
    """Descendants that are process 1 of the innermost process namespace: those of boxes, running or waiting for a run."""
    inside: dict[int, list[str]] = {}
    for pid in descendants():
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().split("\n")
            inside[pid] = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
    deepest = max(map(len, inside.values()), default=0)
    return [pid for pid, numbers in inside.items() if len(numbers) == deepest and numbers[-1] == "1"]


async def disk_full(world: World, boxes: BubblewrapProvider, rounds: int) -> Counter[str]:
    """Let writes fail beyond a size, from nothing to more than enough."""
    found: Counter[str] = Counter()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    await grade_pair(world, boxes)
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (number * 1000 // rounds, hard))
            try:
                found += await grade_pair(world, boxes, scratch=folder)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return found + await grade_pair(world, boxes)


async def clock_jump(world: World, boxes: BubblewrapProvider, rounds: int) -> Counter[str]:
    """Let the wall clock leap by days between any two looks at it."""
    found: Counter[str] = Counter()
    real, looks = time.time, iter(range(1 << 62))

    def leaping() -> float:
        return real() + (86_400.0 * 30) * (-1) ** next(looks)

    with mock.patch("time.time", leaping):
        for _ in range(rounds):
            found += await grade_pair(world, boxes)
    return found


async def channel_cut(world: World, boxes: BubblewrapProvider, rounds: int) -> Counter[str]:
    """End the real stream of a right repair after each byte: only the whole one may be worth 1."""
    streams: list[bytes] = []

    class Tap:
        async def run_isolated(self, layers: Sequence[str], argv: Sequence[str], **options: Any) -> Any:
            run = await boxes.run_isolated(layers, argv, **options)
            streams.append(run.stdout)
            return run

    with mock.patch("secrets.token_hex", lambda size: "ab" * size):
        grader = RepairGrader(world, Tap(), seed=0)
        outcome = await grader.grade(TASK, RIGHT)
        await grader.close()
        from strop.grading.repair import changes_digest

        key = (0, TASK.task_id, changes_digest(RIGHT.changes))
        plan = make_plan(world.verifier(TASK), key=key, cpu_s=2.0, load_cpu_s=8.0)
    found = Counter({classify(outcome, 1.0): 1})
    whole, ready = streams[0], streams[0].index(b"\n") + 1
    for length in range(len(whole) + 1):
        for exit_code, killed_by in ((0, ""), (1, ""), (None, ""), (None, "timeout"), (None, "memory"), (None, "processes")):
            report = BoxReport(stream=whole[:length], exit_code=exit_code, killed_by=killed_by)
            try:
                reward = judge(plan, report).reward
            except GradingError:
                found["failed" if length < ready else "wrong"] += 1
                continue
            found["right" if reward == float(length == len(whole) and not killed_by) and length >= ready else "wrong"] += 1
    return found


def main() -> int:
    """Run every fault, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    table: dict[str, Counter[str]] = {}

    async def with_boxes(work: Callable[..., Any]) -> Counter[str]:
        boxes = provider(1)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return await work(World(Path(folder) / "base"), boxes, arguments.rounds)
        finally:
            await boxes.close()

    faults = {"box killed": box_killed, "helpers killed": helpers_killed, "disk full": disk_full, "clock jump": clock_jump}
    for name, work in {**faults, "channel cut": channel_cut}.items():
        table[name] = asyncio.run(with_boxes(work))
        print(f"{name}: {dict(table[name])}", flush=True)
    table["grader killed"] = grader_killed(max(2, arguments.rounds // 4))
    print(f"grader killed: {dict(table['grader killed'])}")
    bad = sum(count for row in table.values() for kind, count in row.items() if kind not in ("right", "failed"))
    is_met = not bad and all(row["right"] for row in table.values()) and all(table[name]["failed"] for name in MUST_FAIL)
    if not arguments.no_write:
        path = write_result(
            "grader-faults",
            bar="faults during grading: grader killed, box killed, disk full, clock jump, result channel cut at every step",
            goal="never a wrong reward, never a lost episode",
            figure=f"{bad} wrong or lost of {sum(row.total() for row in table.values())}",
            met=is_met,
            command=f"python benchmarks/grading_faults.py --rounds {arguments.rounds}",
            details={name: dict(row) for name, row in table.items()},
        )
        print(path)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
