"""The attack suite against graders in use, beside ours: how many attacks each accepts, in one table.

    python benchmarks/grading_peers.py [--only NAME]

Peers (``benchmarks/peer_graders.py``) run hidden tests in the agent's box with pytest; their tests hold all 26 inputs, those that the agent
never saw too, which is more than most give. Ours grades the same changes. Writes docs/results/grader-peers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from grading_common import ATTACKS, CONTROLS, in_parallel, provider
from grading_world import HIDDEN, VISIBLE, Attack, World, graded, played, true_ordinal
from peer_graders import GRADERS, Evidence

from strop.core.errors import SandboxError
from strop.core.outcome import Scored
from strop.sandboxes import BubblewrapProvider
from strop.ui.results import write_result

TEST_FILE = "tests/test_words.py"
REPORT = "junit.xml"
RUNNER = ("-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", f"--junitxml={REPORT}", TEST_FILE)
OURS = "strop"
NUMBERS = (*VISIBLE, *HIDDEN)


def hidden_tests() -> bytes:
    """The test file that peers restore: one test for each input."""
    lines = ["from textkit.words import ordinal", "", ""]
    for number in NUMBERS:
        lines += [f"def test_{number}():", f"    assert ordinal({number}) == {true_ordinal(number)!r}", "", ""]
    return "\n".join(lines).encode()


async def verdicts(attack: Attack, world: World, boxes: BubblewrapProvider, timeout_s: float) -> dict[str, bool]:
    """Play an attack, let the peers run their tests in its box, and ours grade its changes; returns who accepts it."""
    async with played(attack, world, boxes, timeout_s=5.0) as box:
        changes = box.changes()
        evidence = await run_tests(box, timeout_s)
    outcome = await graded(attack, changes, world, boxes)
    accepted = {name: grade(evidence) for name, grade in GRADERS.items()}
    return accepted | {OURS: isinstance(outcome, Scored) and outcome.reward > 0}


async def run_tests(box: Any, timeout_s: float) -> Evidence:
    """Restore the test file in the agent's box and run it there."""
    wanted = [f"{TEST_FILE}::test_{number}" for number in NUMBERS]
    try:
        box.write(TEST_FILE, hidden_tests())
        run = await box.run_python(RUNNER, timeout_s=timeout_s)
    except (OSError, SandboxError):  # the agent left something where the tests belong
        return Evidence(exit_code=1, log="", junit=b"", wanted=wanted)
    try:
        junit = box.read(REPORT)
    except (OSError, SandboxError):
        junit = b""
    return Evidence(exit_code=run.exit_code if not run.killed_by else None, log=run.output, junit=junit, wanted=wanted)


async def play(attacks: list[Attack], folder: Path, workers: int, timeout_s: float) -> list[dict[str, bool]]:
    """Play each in its own world."""
    boxes = provider(workers)
    worlds = {attack.name: World(folder / attack.name) for attack in attacks}
    try:
        return await in_parallel(attacks, lambda attack: verdicts(attack, worlds[attack.name], boxes, timeout_s), workers)
    finally:
        await boxes.close()


def main() -> int:
    """Run, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that peers give their tests")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    attacks = [attack for attack in ATTACKS if not arguments.only or attack.name in arguments.only]
    controls = list(CONTROLS)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(play([*attacks, *controls], Path(folder), arguments.workers, arguments.timeout))
    names = [*GRADERS, OURS]
    accepted = {name: [a.name for a, v in zip(attacks, found, strict=False) if v[name]] for name in names}
    wrong = {name: [c.name for c, v in zip(controls, found[len(attacks) :], strict=True) if v[name] != (c.reward > 0)] for name in names}
    print(f"| grader | accepted of {len(attacks)} | controls wrong of {len(controls)} |\n|---|---|---|")
    for name in names:
        print(f"| {name} | {len(accepted[name])} | {len(wrong[name])} |")
    for name in names:
        print(f"{name}: {', '.join(accepted[name]) or '-'}; controls wrong: {', '.join(wrong[name]) or '-'}")
    if not arguments.no_write:
        path = write_result(
            "grader-peers",
            bar="real graders beside ours on the same attack suite",
            goal="the table, produced by one command",
            figure=", ".join(f"{name}: {len(accepted[name])}" for name in names) + f" of {len(attacks)} accepted",
            met=not accepted[OURS] and not wrong[OURS],
            command="python benchmarks/grading_peers.py",
            notes="Our own small implementations of their rules; the suite is ours, so it says nothing about attacks that nobody wrote.",
            details={"accepted": accepted, "controls_wrong": wrong},
        )
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
