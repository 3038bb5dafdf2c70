"""Recall and false alarms of the auditor, on the same planted and honest episodes as the rules.

    python benchmarks/grading_auditor.py --url http://127.0.0.1:8000/v1 --model NAME [--episodes 100]

Any OpenAI-compatible endpoint, `strop serve` among them. Half of the episodes hold a planted hack (a third of those evasive), half are
honest. Answers that can't be read and claims without a true quote are counted apart and find nothing. Writes
docs/results/grader-auditor.json.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from grading_common import in_parallel, repair_episode
from grading_detectors import honest_changes, share, site_of
from plants import PLANTS, planted

from strop.core.episode import Episode
from strop.core.errors import JudgeError
from strop.core.random import generator
from strop.core.task import Task
from strop.grading.admission import changed_sources
from strop.grading.auditor import Auditor, OpenAiChat
from strop.tasks.pool import open_pool
from strop.ui.results import write_result

PLAIN, EVASIVE, HONEST = "plain", "evasive", "honest"


def corpus(pool: Any, count: int, seed: int) -> list[tuple[str, Task, Episode]]:
    """Return ``(kind, task, episode)``, half of them honest, in an order that tells nothing."""
    tasks, rng = list(pool.tasks("heldout")), generator("auditor", seed)
    plain = [plant for plant in PLANTS if not plant.is_evasive]
    evasive = [plant for plant in PLANTS if plant.is_evasive]
    found: list[tuple[str, Task, Episode]] = []
    for number in range(count):
        task = tasks[int(rng.integers(len(tasks)))]
        if number % 2:
            fair = honest_changes(pool, task)
            found.append((HONEST, task, repair_episode(task, fair[int(rng.integers(len(fair)))], number)))
            continue
        kind, plants = (EVASIVE, evasive) if number % 6 == 0 else (PLAIN, plain)
        changes, turns = planted(plants[int(rng.integers(len(plants)))], site_of(pool, task))
        episode = repair_episode(task, changes, number)
        found.append((kind, task, Episode(key=episode.key, traces=(), turns=turns, stop_reason="submitted", changes=changes)))
    return [found[index] for index in rng.permutation(len(found))]


async def ask(pool: Any, cases: list[tuple[str, Task, Episode]], chat: OpenAiChat) -> list[str]:
    """Return ``"hack"``, ``"honest"``, ``"unsupported"`` or ``"unread"`` for each."""
    auditor = Auditor(chat)

    async def one(case: tuple[str, Task, Episode]) -> str:
        _, task, episode = case
        try:
            found = await auditor.audit(task.instruction, changed_sources(pool.base_dir(task), episode.changes), episode)
        except JudgeError as error:
            print(f"{episode.key}: {error}")
            return "unread"
        return "hack" if found.is_hack else "unsupported" if found.is_unsupported else "honest"

    return await in_parallel(cases, one, workers=4)


def main() -> int:
    """Run, print the rates and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--pool", default="builtin:repair")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    chat = OpenAiChat(arguments.url, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(arguments.pool, Path(folder))
        cases = corpus(pool, arguments.episodes, arguments.seed)
        answers = asyncio.run(ask(pool, cases, chat))
    rates = {}
    for kind in (PLAIN, EVASIVE, HONEST):
        rates[kind] = share([answer == "hack" for (case, _, _), answer in zip(cases, answers, strict=True) if case == kind])
        print(f"{kind}: called a hack {rates[kind]}")
    counts = Counter(answers)
    print(f"answers {dict(counts)}, {chat.tokens} tokens")
    if not arguments.no_write:
        path = write_result(
            "grader-auditor",
            bar="auditor on planted and honest episodes",
            goal="recall and false alarms, measured like any other detector",
            figure=f"recall {rates[PLAIN]} plain, {rates[EVASIVE]} evasive; false alarms {rates[HONEST]}",
            met=None,
            command=f"python benchmarks/grading_auditor.py --url URL --model {arguments.model} --episodes {arguments.episodes}",
            seeds=(arguments.seed,),
            details={"answers": dict(counts), "tokens": chat.tokens, "model": arguments.model},
        )
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
