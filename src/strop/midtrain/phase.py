"""Mid-training as a phase of a run: trajectories of the scripted expert and code with bugs, then supervised steps on both.

Everything is a function of the seed, so a phase that was interrupted starts again and ends in the same weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import Tokenizer

from strop.agent.episode import run_episode
from strop.agent.render import ActionRenderer
from strop.agent.scripted import ScriptedEngine
from strop.agent.workspace import TreeCache
from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import SandboxError, TaskError, first_known
from strop.core.random import generator, key_of
from strop.core.sample import Batch, Update
from strop.core.task import Task
from strop.midtrain.base.corpus import Module, read_module
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.names import NameMaker
from strop.midtrain.base.writer import Document
from strop.midtrain.expert import Expert, habits_of_level
from strop.midtrain.trajectories import as_sample, batches, rewrite_episode
from strop.ports import SandboxProvider, TaskPool
from strop.tasks.mutation import Edit, FunctionSpan

PHASE = "midtrain"
RENAME_SHARE = 0.7


@runtime_checkable
class RepairTasks(TaskPool, Protocol):
    """A pool whose tasks are repaired by single edits that are known: what mid-training and random search need."""

    def gold_edit(self, task: Task) -> Edit:
        """The edit that repairs the workspace."""
        ...

    def function(self, task: Task) -> tuple[str, FunctionSpan]:
        """Workspace-relative file and lines of the function with the bug."""
        ...

    def candidates(self, task: Task) -> list[Edit]:
        """Every edit that the catalogue offers in that function, ``gold_edit`` among them."""
        ...


class SupervisedSteps(Protocol):
    """A trainer of supervised batches."""

    def step(self, batch: Batch) -> Update:
        """One optimizer step; its metrics hold ``train/loss``.

        Raises:
            NumericsError: A loss or gradient isn't finite.
        """
        ...


class PhaseStore(Protocol):
    """What the phase writes."""

    def put_episode(self, episode: Episode) -> None:
        """Keep a finished episode with its costs."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str = "rl") -> None:
        """Append the metrics of a step."""
        ...


class PhaseView(Protocol):
    """What the phase shows."""

    def stage(self, name: str, total: int = 0) -> None:
        """A stage begins, with ``total`` units of progress."""
        ...

    def progress(self, done: int, **figures: float | str) -> None:
        """``done`` units of the stage are finished."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MidtrainResult:
    """How the phase ended.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens seen.
        weights_digest: Of the final weights.
        loss: Mean weighted loss of the last tenth of the steps, in nats.
    """

    steps: int
    tokens: int
    weights_digest: str
    loss: float


def midtrain_tasks(pool: RepairTasks, count: int, seed: int) -> list[Task]:
    """Return at most ``count`` training tasks for mid-training, of at most half of them.

    They are taken module by module, so that few modules are shown in part.
    """
    ordered = sorted(pool.tasks("train"), key=lambda task: (key_of("midtrain", seed, *_module(pool, task)), task.task_id))
    return ordered[: min(count, len(ordered) // 2)]


def rl_tasks(pool: RepairTasks, count: int, seed: int) -> list[Task]:
    """Return the training tasks for RL: those of modules of which mid-training with ``count`` and ``seed`` sees nothing.

    Where repairs of a module were shown, remembering them earns rewards, and RL would strengthen that instead of finding bugs.
    """
    shown = {_module(pool, task) for task in midtrain_tasks(pool, count, seed)}
    return [task for task in pool.tasks("train") if _module(pool, task) not in shown]


def _module(pool: RepairTasks, task: Task) -> tuple[str, str]:
    return task.provenance.get("source", ""), pool.function(task)[0]


def expert_for(pool: RepairTasks, task: Task, key: EpisodeKey, seed: int) -> Expert:
    """Return the scripted expert for one episode."""
    path, span = pool.function(task)
    return Expert(
        function=span.name,
        path=path,
        gold=pool.gold_edit(task),
        candidates=pool.candidates(task),
        habits=habits_of_level(generator("habits", seed, key)),
        seed=seed,
        key=key,
    )


async def collect_trajectories(
    config: RunConfig,
    tasks: Sequence[Task],
    *,
    pool: RepairTasks,
    sandbox_provider: SandboxProvider,
    renderer: ActionRenderer,
    store: PhaseStore,
    view: PhaseView,
) -> list[tuple[Task, Episode]]:
    """Run the expert once on every task, in real sandboxes, and keep the episodes.

    Raises:
        StropError: The machinery lost an episode twice; the others are cancelled.
    """
    by_id = {task.task_id: task for task in tasks}
    engine = ScriptedEngine(renderer, lambda key: expert_for(pool, by_id[key.task_id], key, config.seed))
    slots = asyncio.Semaphore(4 * config.sandbox.workers)
    cache = TreeCache()
    done = 0
    view.stage("trajectories", len(tasks))

    async def play(task: Task, key: EpisodeKey) -> Episode:
        return await run_episode(
            task, key, engine=engine, sandbox_provider=sandbox_provider, pool=pool, renderer=renderer, temperature=1.0, cache=cache
        )

    async def one(task: Task) -> tuple[Task, Episode]:
        nonlocal done
        key = EpisodeKey(phase=PHASE, step=0, task_id=task.task_id, sample=0)
        async with slots:
            try:
                episode = await play(task, key)
            except SandboxError:  # a box that broke is no news about the task; twice is
                episode = await play(task, key)
        store.put_episode(episode)
        done += 1
        view.progress(done)
        return task, episode

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task)) for task in tasks]
    except ExceptionGroup as errors:
        raise first_known(errors) from None
    return [task.result() for task in running]


def pool_modules(pool: RepairTasks, tasks: Sequence[Task]) -> list[Module]:
    """Return the source modules around ``tasks``, each once; never those of other splits."""
    found: dict[str, Module] = {}
    for task in tasks:
        path, _ = pool.function(task)
        source = task.provenance.get("source", "")
        if f"{source}/{path}" in found:
            continue
        text = (Path(pool.base_dir(task)) / path).read_text(encoding="utf-8", errors="replace")
        module = read_module(source, path, text)
        if module is not None:
            found[f"{source}/{path}"] = module
    return list(found.values())


def make_documents(config: RunConfig, played: Sequence[tuple[Task, Episode]], *, pool: RepairTasks, tokenizer: Tokenizer) -> list[Document]:
    """Return trajectory documents, and code documents up to ``midtrain.code_frac`` of all tokens."""
    settings = config.midtrain
    names = NameMaker(pool.function(task)[1].name for task, _ in played)
    documents = []
    for task, episode in played:
        documents.append(
            rewrite_episode(
                episode,
                task,
                pool.gold_edit(task),
                function=pool.function(task)[1].name,
                tokenizer=tokenizer,
                names=names,
                rng=generator("rewrite", config.seed, episode.key),
                rename=RENAME_SHARE,
                drop_system_prompt=settings.drop_system_prompt,
            )
        )
    wanted = settings.code_frac / (1 - settings.code_frac) * sum(map(len, documents))
    if wanted:
        maker = DocumentMaker(pool_modules(pool, [task for task, _ in played]), tokenizer, config.seed)
        index, written = 0, 0
        while written < wanted:
            document = maker.make(index, "repair" if index % 4 else "code")
            documents.append(document)
            written += len(document)
            index += 1
    return documents


async def run_midtraining(
    config: RunConfig,
    *,
    pool: RepairTasks,
    sandbox_provider: SandboxProvider,
    renderer: ActionRenderer,
    tokenizer: Tokenizer,
    make_trainer: Callable[[int], SupervisedSteps],
    store: PhaseStore,
    view: PhaseView,
) -> MidtrainResult:
    """Collect trajectories and train on them; ``make_trainer`` gets the number of steps.

    Raises:
        TaskError: There are too few training tasks.
        NumericsError: A loss or gradient isn't finite.
    """
    settings = config.midtrain
    tasks = midtrain_tasks(pool, settings.episodes, config.seed)
    if not tasks:
        raise TaskError("mid-training needs at least 2 training tasks in the pool; choose another tasks.pool")
    played = await collect_trajectories(
        config, tasks, pool=pool, sandbox_provider=sandbox_provider, renderer=renderer, store=store, view=view
    )
    documents = make_documents(config, played, pool=pool, tokenizer=tokenizer)
    rng = generator("midtrain-order", config.seed)
    plan = batches(documents, batch_tokens=settings.batch_tokens, epochs=settings.epochs, rng=rng)
    trainer = make_trainer(len(plan))
    view.stage("mid-training", len(plan))
    losses: list[float] = []
    tokens = 0
    update: Update | None = None
    for step, chosen in enumerate(plan):
        keys = [EpisodeKey(phase=PHASE, step=step, task_id=f"document-{index}", sample=0) for index in chosen]
        samples = tuple(as_sample(documents[index], key) for index, key in zip(chosen, keys, strict=True))
        weight = float(sum(sample.advantage.sum() for sample in samples))
        began = time.perf_counter()
        update = await asyncio.to_thread(trainer.step, Batch(step=step, samples=samples, normaliser=max(weight, 1.0)))
        count = sum(len(sample.trace) for sample in samples)
        tokens += count
        losses.append(update.metrics["train/loss"])
        rate = count / (time.perf_counter() - began)
        store.log(step, update.metrics, phase=PHASE)
        view.progress(step + 1, loss=losses[-1], tokens_per_s=rate)
    assert update is not None
    tail = losses[-max(1, len(losses) // 10) :]
    return MidtrainResult(steps=len(plan), tokens=tokens, weights_digest=update.weights_digest, loss=sum(tail) / len(tail))
