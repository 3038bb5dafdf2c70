"""Tasks without code: made by reasoning-gym and by a taskset of verifiers, played by an agent in a box, judged by the package in another.

    python benchmarks/env_answers.py --python build/venv-answers/bin/python

A scripted agent writes the reference answer into the file with the ordinary tools, another a wrong one, a third submits at once. Task and
Episode are what they are for programs. Writes docs/results/env-answers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))

from agent_kit import Plays, train_tokenizer

from strop.agent.episode import run_episode
from strop.agent.render import CompactRenderer
from strop.agent.scripted import ScriptedEngine
from strop.core.config import SandboxConfig
from strop.core.episode import EpisodeKey
from strop.core.outcome import Outcome, Scored
from strop.core.task import Task
from strop.sandboxes import BubblewrapProvider
from strop.tasks.importers.answers import ANSWER_FILE, AnswerGrader, make_tasks, packages_of
from strop.tasks.importers.pool import ImportPool, write_pool
from strop.ui.results import write_result

DATASETS = ("chain_sum", "leg_counting", "number_sorting")
TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.total))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            yield SumTask(SumData(prompt=f"What is {number} + {number + 2}?", total=2 * number + 2), self.config.task)
"""


async def play(pool: ImportPool, task: Task, provider: BubblewrapProvider, grader: AnswerGrader, *actions: tuple[str, ...]) -> Outcome:
    """Play a task with given actions and grade it."""
    renderer = CompactRenderer(train_tokenizer())
    key = EpisodeKey(phase="eval.answers", step=0, task_id=task.task_id, sample=0)
    episode = await run_episode(
        task,
        key,
        engine=ScriptedEngine(renderer, lambda _: Plays(*actions)),
        sandbox_provider=provider,
        pool=pool,
        renderer=renderer,
        temperature=1.0,
    )
    return await grader.grade(task, episode)


async def measure(python: str, size: int, folder: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Make, play and grade; returns counts by source, and what is wrong."""
    tasks = [task for name in DATASETS for task in make_tasks("reasoning-gym", name, size=size, seed=7, python=python)]
    tasks += make_tasks("verifiers", "strop_sums:Sums", size=size, python=python)
    write_pool(folder / "pool", tasks, source="benchmark")
    pool, wrong = ImportPool(folder / "pool", folder / "cache"), []
    counts: dict[str, dict[str, int]] = {}
    provider = BubblewrapProvider(SandboxConfig(workers=1))
    grader = AnswerGrader(pool, provider, python=python)
    try:
        for record in tasks:
            task, row = (
                record.task,
                counts.setdefault(record.task.provenance["source"], {"tasks": 0, "gold 1": 0, "wrong below 1": 0, "nothing 0": 0}),
            )
            row["tasks"] += 1
            gold = record.fields["answer"] if "answer" in record.fields else str(record.fields["data"]["total"])
            plays = {
                "gold 1": (("edit", ANSWER_FILE, "ANSWER", "1", gold), ("submit",)),
                "wrong below 1": (("edit", ANSWER_FILE, "ANSWER", "1", "no idea"), ("submit",)),
                "nothing 0": (("submit",),),
            }
            for name, actions in plays.items():
                outcome = await play(pool, task, provider, grader, *actions)
                reward = outcome.reward if isinstance(outcome, Scored) else -1.0
                met = {"gold 1": reward == 1.0, "wrong below 1": 0.0 <= reward < 1.0, "nothing 0": reward == 0.0}[name]
                row[name] += met
                if not met:
                    wrong.append(f"{task.task_id}, {name}: {outcome}")
    finally:
        await provider.close()
    return counts, wrong


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python with reasoning-gym and verifiers, of strop's own version")
    parser.add_argument("--size", type=int, default=2, help="tasks of each source")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    Path(packages_of(arguments.python), "strop_sums.py").write_text(TASKSET, encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        counts, wrong = asyncio.run(measure(arguments.python, arguments.size, Path(name)))
    total = sum(row["tasks"] for row in counts.values())
    for source, row in counts.items():
        print(f"{source:24}" + "".join(f"{key} {value:3}   " for key, value in row.items()))
    print("\n".join(wrong) or "no problem")
    if not arguments.no_write:
        path = write_result(
            "env-answers",
            bar="tasks without code: reasoning-gym and a verifiers taskset, played and judged",
            goal="reference answer 1, wrong answer below 1, nothing 0, for every task",
            figure=f"{3 * total - len(wrong)} of {3 * total} as expected",
            met=not wrong,
            command="make test-answers",
            seeds=(7,),
            details=counts,
        )
        print(path)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
