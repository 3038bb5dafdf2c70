"""The RL loop: tasks to episodes to credit to weights to engine, one commit point per step.

Per step: admit what the staleness window allows, wait for this step's episodes, turn groups into advantages, train, swap the engine,
save, commit. Whether generation goes on during the update is decided by the window alone (``rl.max_staleness``); the code is the same.

Reproducibility: the tasks of a step, the key of every episode and the order of samples are fixed by the configuration; nothing depends on
who finishes first. With ``max_staleness = 0`` a resumed run continues bit for bit. With more, which tokens a swap falls between depends on
timing; every token's version is recorded, and ``strop replay`` forces the swaps to where they were.

Interrupted (Ctrl-C, error) at any point, the run stays at its last commit; nothing is finished on the way out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

from strop.core.config import RunConfig
from strop.core.episode import Episode, EpisodeKey
from strop.core.errors import ConfigError, EngineError, StropError
from strop.core.outcome import Failed, Scored
from strop.core.random import generator
from strop.core.sample import Batch, Update
from strop.grading.admission import changed_sources
from strop.grading.contrast import with_contrast
from strop.grading.quarantine import HackWatch, Quarantine, hack_metrics
from strop.ports import Engine, EngineCapabilities, Grader, Renderer, SandboxProvider, TaskPool, Trainer
from strop.rl.advantage import Credit, assign_credit, sort_key
from strop.rl.play import World, play
from strop.rl.rollout_stats import rollout_metrics
from strop.rl.schedule import Conservation, PlannedGroup, Window, check_staleness, plan_groups

PHASE = "rl"
CHECKPOINT = "rl"
WORKER_DEADLINE_S = 3600.0
SWAP_DEADLINE_S = 600.0
CLOSE_DEADLINE_S = 60.0

T = TypeVar("T")


class RunStore(Protocol):
    """What the loop writes; ``strop.store.Store`` has it, and ``strop replay`` puts a comparing one in its place."""

    def put_episode(self, episode: Episode) -> None: ...

    def rows(self, *, phase: str | None = None, step: int | None = None) -> list[Any]: ...

    def get(self, key: EpisodeKey | str) -> Episode: ...

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str = "rl") -> None: ...

    def add_costs(self, phase: str, step: int, values: Mapping[str, float]) -> None: ...

    def save_state(self, name: str, state: Any, meta: Mapping[str, Any] | None = None, *, rolling: bool = True) -> str: ...

    def load_state(self, name: str) -> tuple[Any, dict[str, Any]]: ...

    def commit_step(self, step: int, *, phase: str = "rl", checkpoint: str = "", stage: str = "", **facts: Any) -> None: ...

    def last_step(self, phase: str = "rl") -> Any: ...


class LoopView(Protocol):
    """What the loop shows; ``strop.ui.view.View`` has it."""

    def progress(self, done: int, **figures: float | str) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RlResult:
    """How an RL phase ended.

    Attributes:
        steps: Steps that are done, earlier processes included.
        policy_version: Version of the final weights.
        weights_digest: Their digest, ``""`` if no step was left to do.
        metrics: The last step's.
        conservation: The final count of episodes.
    """

    steps: int
    policy_version: int
    weights_digest: str
    metrics: Mapping[str, float]
    conservation: Mapping[str, object]


def resume_step(store: RunStore, trainer: Trainer) -> int:
    """Load the trainer's state of the last commit and return the next step; 0 (and an untouched trainer) for a fresh run."""
    commit = store.last_step(PHASE)
    if commit is None:
        return 0
    state, _ = store.load_state(commit.checkpoint)
    trainer.load_state(state)
    return commit.step + 1


async def run_rl(
    config: RunConfig,
    *,
    pool: TaskPool,
    engine: Engine,
    sandbox_provider: SandboxProvider,
    grader: Grader,
    renderer: Renderer,
    trainer: Trainer,
    store: RunStore,
    view: LoopView | None = None,
    start_step: int = 0,
    certify: Callable[[int], Awaitable[None]] | None = None,
) -> RlResult:
    """Run steps ``start_step`` to ``config.rl.steps`` and commit each.

    Args:
        config: The run.
        pool: Training tasks; each is used once.
        engine: Generates; gets the trainer's weights before the first and after every step.
        sandbox_provider: Boxes of the episodes.
        grader: Verdicts.
        renderer: The chat format.
        trainer: Its version must be ``start_step``.
        store: Gets every episode when it finishes and a commit for each step.
        view: Shows progress.
        start_step: First step to do, see ``resume_step``.
        certify: Called with the step at the end of every epoch (``numerics.certify_steps``) but the last, after its commit.

    Raises:
        ConfigError: The engine lacks a capability that the configuration needs, or there are too few tasks.
        NumericsError: See ``Trainer.step``; the run stays at the last commit.
        StropError: Machinery failed ``rl.max_infra_failures`` times in a row, or more episodes than ``grading.max_hack_rate`` are
            flagged; the message has the reason.
    """
    rl = config.rl
    check_capabilities(config, engine.capabilities)
    quarantine = Quarantine.of(config.grading)
    plan = _plan(config, pool)
    conservation = _conservation(store)
    watch = _watch(config, store, start_step)
    world = World(pool=pool, engine=engine, sandbox_provider=sandbox_provider, grader=grader, renderer=renderer)
    crew = _Crew(config, world, store, conservation, view)
    window = Window(steps=rl.steps, max_staleness=rl.max_staleness, next_slot=start_step)
    update: Update | None = None
    metrics: dict[str, float] = {}
    try:
        await _swap(engine, trainer, start_step)
        if certify is not None and start_step and _is_epoch_end(config, start_step - 1):
            await certify(start_step - 1)  # the process before may have died between the commit and its certificate
        for step in range(start_step, rl.steps):
            began = time.perf_counter()
            for slot in window.admit(version=step):
                crew.dispatch(slot, plan[slot])
            episodes = await crew.collect(step)
            waited = time.perf_counter() - began

            if config.grading.contrast:
                episodes = _compare(pool, plan[step], episodes)
            watch.add(episodes)
            watch.check()
            credit = _credit(config, step, plan[step], episodes, quarantine)
            conservation.settle(len(episodes), trained=credit.trained, dropped=credit.dropped, failed=credit.failed)
            batch = _batch(config, step, credit)
            update = await crew.in_worker(trainer.step, batch)
            assert update.policy_version == step + 1, f"step {step} made version {update.policy_version}, expected {step + 1}"
            moved = await _swap(engine, trainer, update.policy_version)

            metrics = rollout_metrics(episodes, wall_s=waited) | _credit_metrics(credit) | dict(update.metrics) | conservation.metrics()
            metrics |= hack_metrics(episodes, quarantine) | {"hacks/window_frac": watch.rate}
            metrics |= dict(engine.metrics()) | {"rollout/wait_s": waited, "train/step_s": time.perf_counter() - began}
            conservation.check()
            await crew.in_worker(_commit, store, step, trainer, update, conservation, metrics, moved)
            if view is not None:
                view.metrics(step, metrics)
            if certify is not None and _is_epoch_end(config, step):
                await certify(step)
        conservation.check(finished=True)
    finally:
        await crew.close()
    version, digest = (update.policy_version, update.weights_digest) if update else (start_step, "")
    return RlResult(steps=rl.steps, policy_version=version, weights_digest=digest, metrics=metrics, conservation=conservation.facts())


def _is_epoch_end(config: RunConfig, step: int) -> bool:
    every = config.numerics.certify_steps
    return every > 0 and (step + 1) % every == 0 and step + 1 < config.rl.steps


def _plan(config: RunConfig, pool: TaskPool) -> list[tuple[PlannedGroup, ...]]:
    rl = config.rl
    tasks = list(pool.tasks("train"))[: config.tasks.train_limit or None]
    return plan_groups(tasks, seed=config.seed, steps=rl.steps, groups=rl.groups, drop_system_prompt=rl.drop_system_prompt)


def _conservation(store: RunStore) -> Conservation:
    last = store.last_step(PHASE)
    return Conservation.of(last.facts["conservation"]) if last is not None else Conservation()


def _watch(config: RunConfig, store: RunStore, start_step: int) -> HackWatch:
    """Return the watch as it was at the last commit."""
    watch = HackWatch.of(config.grading)
    done = sorted((row.key for row in store.rows(phase=PHASE) if row.step < start_step), key=sort_key)
    graded = (episode for episode in map(store.get, reversed(done)) if isinstance(episode.outcome, Scored))
    watch.add(reversed([*islice(graded, config.grading.hack_window)]))
    return watch


def _compare(pool: TaskPool, groups: tuple[PlannedGroup, ...], episodes: list[Episode]) -> list[Episode]:
    """Hold the samples of each task against each other; the flags are for this step's credit and counts."""
    tasks = {group.task.task_id: group.task for group in groups}
    return with_contrast(episodes, lambda episode: changed_sources(pool.base_dir(tasks[episode.key.task_id]), episode.changes))


def _credit(config: RunConfig, step: int, groups: tuple[PlannedGroup, ...], episodes: list[Episode], quarantine: Quarantine) -> Credit:
    shuffle = generator("permute-rewards", config.seed, step) if config.rl.permute_rewards else None
    return assign_credit(
        episodes,
        permutation=shuffle,
        reward_of=quarantine.reward,
        wasted_call_cost=config.rl.wasted_call_cost,
        right_edit_credit=config.rl.right_edit_credit,
        instructions={group.task.task_id: group.task.instruction for group in groups},
    )


def _batch(config: RunConfig, step: int, credit: Credit) -> Batch:
    rl = config.rl
    check_staleness(credit.samples, version=step, max_staleness=rl.max_staleness)
    return Batch(step=step, samples=credit.samples, normaliser=float(rl.groups * rl.group_size * rl.length_constant))


def _commit(
    store: RunStore, step: int, trainer: Trainer, update: Update, conservation: Conservation, metrics: Mapping[str, float], moved: float
) -> None:
    """Write metrics, costs and state, then make the step permanent: kill -9 falls before or after the last line."""
    store.log(step, metrics, phase=PHASE)
    costs = {key: value for key, value in metrics.items() if key.startswith("cost/")}
    store.add_costs(PHASE, step, costs | {"cost/trained_tokens": metrics.get("train/tokens", 0.0), "cost/moved_bytes": moved})
    name = f"{CHECKPOINT}-{step:05d}"
    store.save_state(name, trainer.state(), {"step": step}, rolling=True)
    facts = {"weights_digest": update.weights_digest, "policy_version": update.policy_version, "conservation": conservation.facts()}
    store.commit_step(step, phase=PHASE, checkpoint=name, **facts)


async def _swap(engine: Engine, trainer: Trainer, version: int) -> float:
    """Give the engine the trainer's weights; returns their bytes."""
    weights = trainer.weights()
    try:
        async with asyncio.timeout(SWAP_DEADLINE_S):
            await engine.swap(weights, version)
    except TimeoutError:
        raise EngineError(f"swapping the engine to version {version} took longer than {SWAP_DEADLINE_S:g} s") from None
    return float(sum(tensor.nbytes for tensor in weights.values()))


def _credit_metrics(credit: Credit) -> dict[str, float]:
    return {
        "rl/groups_no_signal": float(credit.groups_no_signal),
        "rl/groups_signal_frac": (credit.num_groups - credit.groups_no_signal) / max(credit.num_groups, 1),
        "rl/training_reward": float(credit.rewards.mean()) if len(credit.rewards) else 0.0,
        "rl/advantage_abs": float(abs(credit.advantages).mean()) if len(credit.advantages) else 0.0,
    }


def check_capabilities(config: RunConfig, engine: EngineCapabilities) -> None:
    """Refuse a run that needs more than its engine can do.

    Raises:
        ConfigError: Names the key and the missing capability.
    """
    needs = [
        (not engine.returns_logprobs, "rl.enabled", "returns_logprobs"),
        (config.numerics.mode == "exact" and not engine.is_exact, "numerics.mode = 'exact'", "is_exact"),
        (
            config.numerics.replay_routes not in ("off", "r2") and not engine.returns_routes,
            f"numerics.replay_routes = {config.numerics.replay_routes!r}",
            "returns_routes",
        ),
        (config.rl.max_staleness > 0 and not engine.swaps_in_flight, f"rl.max_staleness = {config.rl.max_staleness}", "swaps_in_flight"),
    ]
    for is_missing, key, capability in needs:
        if is_missing:
            raise ConfigError(f"{key} needs an engine with the capability {capability!r}; engine {config.engine.backend!r} lacks it")


class _Crew:
    """Runs episodes in the background, in the order of their dispatch, at most ``engine.max_sessions`` at once."""

    def __init__(self, config: RunConfig, world: World, store: RunStore, conservation: Conservation, view: LoopView | None) -> None:
        self.config = config
        self.world = world
        self.store = store
        self.conservation = conservation
        self.view = view
        self.slots = asyncio.Semaphore(config.engine.max_sessions)
        self.running: dict[int, list[asyncio.Task[Episode]]] = {}
        self.failures_in_a_row = 0
        # One worker: training and saving never overlap, and always run in the same thread.
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-train")
        self.job: Future[Any] | None = None

    def dispatch(self, step: int, groups: tuple[PlannedGroup, ...]) -> None:
        """Start the episodes of a step; those that an earlier process finished and committed are taken from the store."""
        stored = {row.key for row in self.store.rows(phase=PHASE, step=step)}
        self.running[step] = []
        for group in groups:
            for sample in range(self.config.rl.group_size):
                key = EpisodeKey(phase=PHASE, step=step, task_id=group.task.task_id, sample=sample)
                work = self._stored(key) if key in stored else self._play(group, key)
                self.running[step].append(asyncio.create_task(work, name=str(key)))
        self.conservation.dispatch(len(self.running[step]))

    async def collect(self, step: int) -> list[Episode]:
        """Wait for the episodes of a step (each has its own deadline); sorted by key."""
        tasks = self.running[step]
        for done, task in enumerate(asyncio.as_completed(tasks), 1):
            await task
            if self.view is not None:
                self.view.progress(step, episodes=f"{done}/{len(tasks)}")
        del self.running[step]
        return sorted((task.result() for task in tasks), key=lambda episode: sort_key(episode.key))

    async def _play(self, group: PlannedGroup, key: EpisodeKey) -> Episode:
        async with self.slots:
            temperature = self.config.rl.temperature
            episode = await play(self.world, group.task, key, temperature=temperature, system_prompt=group.system_prompt)
        self.store.put_episode(episode)
        self.failures_in_a_row = self.failures_in_a_row + 1 if isinstance(episode.outcome, Failed) else 0
        if isinstance(episode.outcome, Failed) and self.failures_in_a_row >= self.config.rl.max_infra_failures:
            raise StropError(
                f"{self.failures_in_a_row} episodes in a row were lost to machinery failures (rl.max_infra_failures = "
                f"{self.config.rl.max_infra_failures}); the last one, {key}: {episode.outcome.error}",
                ids={"episode": str(key)},
            )
        return episode

    async def _stored(self, key: EpisodeKey) -> Episode:
        return self.store.get(key)

    async def in_worker(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call beside the event loop, so that generation may go on."""
        self.job = self.worker.submit(call, *arguments)
        try:
            async with asyncio.timeout(WORKER_DEADLINE_S):
                return await asyncio.wrap_future(self.job)
        except TimeoutError:
            raise StropError(f"{getattr(call, '__name__', call)} took longer than {WORKER_DEADLINE_S:g} s") from None

    async def close(self) -> None:
        """Cancel what runs and give everything back."""
        tasks = [task for step_tasks in self.running.values() for task in step_tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_DEADLINE_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # the first error is on its way up already; the others must not be reported as lost
        if self.job is not None and not self.job.done():
            # A thread can't be stopped. Nobody may close the store or read the weights under it.
            await asyncio.to_thread(wait, [self.job], CLOSE_DEADLINE_S)
        self.worker.shutdown(wait=False, cancel_futures=True)
