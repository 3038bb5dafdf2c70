"""The attack suite through the real sandbox and the real grader: none accepted, each with its expected class and flag, controls right.

    python benchmarks/grading_attacks.py [--only NAME] [--timings]

The programs are those of ``tests/grading/attacks``. Writes docs/results/grader-attacks.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from grading_common import ATTACKS, CONTROLS, in_parallel, is_flagged, provider
from grading_world import Attack, World, run_attack

from strop.core.outcome import Failed, Outcome, Scored
from strop.numerics.stats import proportion_interval
from strop.ui.results import write_result

LISTED = 39
"""Attacks of the list that the suite follows."""


async def play(attacks: list[Attack], folder: Path, workers: int) -> list[Outcome]:
    """Play each in its own world."""
    boxes = provider(workers, memory_mb=128)
    worlds = {attack.name: World(folder / attack.name) for attack in attacks}
    try:
        return await in_parallel(attacks, lambda attack: run_attack(attack, worlds[attack.name], boxes), workers)
    finally:
        await boxes.close()


def problem(attack: Attack, outcome: Outcome) -> str:
    """What isn't as expected, or ``""``."""
    if not isinstance(outcome, Scored):
        return f"{outcome}"
    if outcome.reward != attack.reward:
        return f"reward {outcome.reward}"
    if outcome.reason not in attack.reasons:
        return f"reason {outcome.reason!r}, expected one of {list(attack.reasons)}"
    missing = set(attack.flags) - {flag.rule for flag in outcome.flags}
    return f"flags {sorted(missing)} missing" if missing else ""


def main() -> int:
    """Run, print what isn't as expected, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    attacks = [attack for attack in ATTACKS if not arguments.only or attack.name in arguments.only]
    controls = [control for control in CONTROLS if not arguments.only or control.name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(play([*attacks, *controls], Path(folder), arguments.workers))
    hostile, honest = outcomes[: len(attacks)], outcomes[len(attacks) :]
    problems = {a.name: text for a, o in zip(attacks, hostile, strict=True) if (text := problem(a, o))}
    problems |= {c.name: text for c, o in zip(controls, honest, strict=True) if (text := problem(c, o))}
    problems |= {c.name: "flagged" for c, o in zip(controls, honest, strict=True) if is_flagged(o)}
    accepted = [a.name for a, o in zip(attacks, hostile, strict=True) if isinstance(o, Scored) and o.reward > 0]
    numbers = {attack.number for attack in attacks if attack.number}
    rules: dict[str, list[bool]] = defaultdict(list)
    for attack, outcome in zip(attacks, hostile, strict=True):
        for rule in attack.flags:
            rules[rule].append(isinstance(outcome, Scored) and rule in {flag.rule for flag in outcome.flags})
    recall: dict[str, Any] = {name: str(proportion_interval(sum(hits), len(hits))) for name, hits in sorted(rules.items())}
    reasons = Counter(outcome.reason if isinstance(outcome, Scored) else "failed" for outcome in hostile)
    right = sum(control.name not in problems for control in controls)
    print(f"{len(attacks)} attacks ({len(numbers)} numbers of the list), {len(accepted)} accepted {accepted}")
    print(f"{right} of {len(controls)} controls right; by reason {dict(reasons)}")
    for name, text in problems.items():
        print(f"{name}: {text}")
    if not arguments.no_write:
        path = write_result(
            "grader-attacks",
            bar="attack suite through bubblewrap",
            goal="0 accepted, controls right, expected class and flag for each",
            figure=f"{len(accepted)} of {len(attacks)} accepted, {right} of {len(controls)} controls right, {len(problems)} surprises",
            met=not problems and not any(isinstance(outcome, Failed) for outcome in outcomes),
            command="python benchmarks/grading_attacks.py",
            details={
                "listed_numbers": sorted(numbers),
                "listed_numbers_missing": sorted(set(range(1, LISTED + 1)) - numbers),
                "own": sum(not attack.number for attack in attacks),
                "by_reason": dict(reasons),
                "recall_by_rule": recall,
                "problems": problems,
            },
        )
        print(path)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
