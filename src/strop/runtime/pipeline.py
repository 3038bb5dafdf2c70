"""A run from base to report, stage by stage; an interrupted one continues with the first stage that isn't done.

    base_eval -> midtrain -> mid_eval -> rl -> rl_eval -> report

Each stage reads what earlier ones published in the run directory and ends in a commit point. RL commits every step; the other stages
start again from their beginning, and end in the same bits because every random choice is keyed by the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.agent.baselines import NoChange
from strop.agent.scripted import Policy, ScriptedEngine
from strop.cli.models import model_dir, pool_dir
from strop.core.config import RunConfig
from strop.core.episode import EpisodeKey
from strop.core.errors import NumericsError
from strop.core.task import Task
from strop.engine.embedded import EmbeddedEngine
from strop.ledger import CostBook
from strop.midtrain.phase import expert_for, rl_tasks, run_midtraining
from strop.model.checkpoint import load_checkpoint, save_checkpoint
from strop.numerics.certificate import FOLDER, NAME
from strop.ports import Engine
from strop.production.promotion import Evaluation, TaskResult, decide
from strop.rl.evaluate import EvalResult, evaluate
from strop.rl.loop import RlResult, resume_step, run_rl
from strop.rl.trainer import PolicyTrainer
from strop.runtime.base import check_base
from strop.runtime.blind import random_edits
from strop.runtime.build import Parts, PoolView, build_parts
from strop.runtime.certify import certify_policy, explain
from strop.runtime.replay import ReplayReport, ReplayStore, replay
from strop.store import RunDir
from strop.store.files import write_atomic
from strop.ui.report import build_report
from strop.ui.view import View


def run_pipeline(config: RunConfig, run: RunDir, resumed: bool, view: View) -> None:
    """Do every stage of ``run`` that isn't done.

    Args:
        config: The resolved configuration.
        run: The open run directory.
        resumed: Whether an earlier process had begun the run (for messages only).
        view: Shows progress.
    """
    if resumed:
        view.message(f"continuing after stage {run.store.stage() or 'none'}")
    asyncio.run(_run(config, run, view))


async def _run(config: RunConfig, run: RunDir, view: View, record: ReplayStore | None = None) -> None:
    parts = build_parts(config, model_dir(config.model.base), pool_dir(config.tasks.pool))
    pipeline = Pipeline(parts, run, view, record)
    try:
        check_base(run, parts.base_weights)
        await pipeline.base_eval()
        await pipeline.midtrain()
        await pipeline.mid_eval()
        await pipeline.rl()
        await pipeline.rl_eval()
        await pipeline.report()
    finally:
        await parts.close()


class Pipeline:
    """The stages of one run. Each method does its stage unless it is done.

    Args:
        parts: The machinery.
        run: The run directory.
        view: Shows progress.
        record: Set in a replay: everything is held against it.
    """

    def __init__(self, parts: Parts, run: RunDir, view: View, record: ReplayStore | None = None) -> None:
        self.parts = parts
        self.record = record
        self.grader = record.forced_grader(parts.grader) if record is not None else parts.grader
        self.config = parts.config
        self.run = run
        self.store = run.store
        self.costs = CostBook(run.store)
        self.view = view

    # ------------------------------------------------------------------------------------------------ stages

    async def base_eval(self) -> None:
        """Held-out success of the base, and of policies that need no model."""
        if self.store.is_done("base_eval"):
            return
        with self.costs.measure("base_eval"):
            if self.config.eval.baselines:
                await self._baselines()
            await self._evaluate_policy("base", self.parts.base_weights, is_trained=False)
        self.store.set_stage("base_eval")

    async def midtrain(self) -> None:
        """Mid-training; publishes ``mid``."""
        if self.store.is_done("midtrain"):
            return
        weights = self.parts.base_weights
        facts: dict[str, Any] = {"skipped": True}
        pool = self.parts.tasks.repairs
        if self.config.midtrain.enabled and pool is not None:  # the recipe was refused if there is none
            trainers: list[Any] = []

            def make_trainer(steps: int) -> Any:
                trainers.append(self.parts.supervised_trainer(weights, steps))
                return trainers[0]

            with self.costs.measure("midtrain"):
                result = await run_midtraining(
                    self.config,
                    pool=pool,
                    sandbox_provider=self.parts.sandbox_provider,
                    renderer=self.parts.renderer,
                    tokenizer=self.parts.tokenizer,
                    make_trainer=make_trainer,
                    store=self.store,
                    view=self.view,
                )
            weights, facts = trainers[0].weights(), asdict(result)
        self._publish("mid", weights)
        self.store.set_stage("midtrain", **facts)

    async def mid_eval(self) -> None:
        """Held-out success after mid-training."""
        if self.store.is_done("mid_eval"):
            return
        with self.costs.measure("mid_eval"):
            await self._evaluate_policy("mid", self._weights("mid"))
        self.store.set_stage("mid_eval")

    async def rl(self) -> None:
        """RL on training tasks that mid-training didn't use; publishes ``rl``."""
        if self.store.is_done("rl"):
            return
        weights = self._weights("mid")
        facts: dict[str, Any] = {"skipped": True}
        if self.config.rl.enabled and self.config.rl.steps:
            trainer = self.parts.policy_trainer(weights)
            start = resume_step(self.store, trainer)
            with self.costs.measure("rl"):
                result = await self._train_policy(trainer, start)
            weights = trainer.weights()
            facts = {"steps": result.steps, "policy_version": result.policy_version, "conservation": result.conservation}
        digest = self._publish("rl", weights)
        self.store.set_stage("rl", weights_digest=digest, **facts)

    async def rl_eval(self) -> None:
        """Held-out success after RL, and the promotion gate against mid-training."""
        if self.store.is_done("rl_eval"):
            return
        with self.costs.measure("rl_eval"):
            candidate = await self._evaluate_policy("rl", self._weights("rl"))
        incumbent = _stored_evaluation("mid", self.store.fact("success.mid"))
        measured = self._evaluation("rl", candidate, self.config.eval.samples, True)
        decision = decide(incumbent, measured, self.config.promotion, seed=self.config.seed)
        self.store.put_fact("promotion", asdict(decision))
        self.store.put_fact("promoted", "rl" if decision.promote else "mid")
        self.view.message(f"promotion gate: {decision.reason}")
        self.store.set_stage("rl_eval")

    async def report(self) -> None:
        """The tables and the HTML report (a replay has no page of its own)."""
        if self.record is not None:
            self.store.set_stage("report")
            return
        write_atomic(self.run.report_path, build_report(self.store).encode())
        if not self.store.is_done("report"):
            self.store.set_stage("report")
        self.view.table(self.store.fact("baselines", []), title="policies that need no model")
        self.view.table(self.store.fact("evaluations", []), title="held-out success")

    # ------------------------------------------------------------------------------------------------ pieces

    async def _train_policy(self, trainer: PolicyTrainer, start: int) -> RlResult:
        """Run the RL loop from ``start`` and write its certificate."""
        engine = self.parts.engine(trainer.weights(), version=start)
        played = engine if self.record is None else self.record.forced_engine(engine, self.config)
        self.view.stage("RL", self.config.rl.steps)
        if self.config.numerics.replay_routes == "auto":
            self.view.message(f"router replay: {trainer.routes.replay.mode}: {trainer.routes.replay.choice.reason}")
        try:
            result = await run_rl(
                self.config,
                pool=PoolView(self.parts.tasks.played, self._rl_tasks()),
                engine=played,
                sandbox_provider=self.parts.sandbox_provider,
                grader=self.grader,
                renderer=self.parts.renderer,
                trainer=trainer,
                store=self.store,
                view=self.view,
                start_step=start,
                certify=lambda step: self._certify(trainer, engine, f"{FOLDER}/rl-{step:05d}.json"),
            )
            await self._certify(trainer, engine, NAME)
        except NumericsError as error:
            explained = await explain(error, trainer, engine)
            if explained is error:
                raise
            raise explained from error
        finally:
            await engine.close()
        return result

    async def _certify(self, trainer: PolicyTrainer, engine: EmbeddedEngine, file: str) -> None:
        """Write the certificate of the RL phase so far; refuses if ranks, trainer and engine differ."""
        summary = await certify_policy(self.run, trainer, engine, file, threads=self.parts.threads)
        self.store.put_fact("certificate", summary)

    def _rl_tasks(self) -> list[Task]:
        found, share = self.parts.tasks, self.config.grading.probe_frac
        if found.repairs is None:  # mid-training can't have shown any
            return list(found.pool.tasks("train"))
        # Left out where mid-training is off, too: the base may come from a run that saw them.
        tasks = rl_tasks(found.repairs, self.config.midtrain.episodes, self.config.seed)
        return found.probes.mix(tasks, share, seed=self.config.seed) if share and found.probes is not None else tasks

    def _publish(self, name: str, weights: Mapping[str, Any]) -> str:
        return self.store.publish(name, lambda path: save_checkpoint(path, self.parts.decoder, weights, tokenizer_from=self.parts.base_dir))

    def _weights(self, name: str) -> Mapping[str, Any]:
        return load_checkpoint(self.store.checkpoint_path(name))[1]

    async def _evaluate_policy(self, name: str, weights: Mapping[str, Any], *, is_trained: bool = True) -> EvalResult:
        """Evaluate; a trained policy also without the system prompt and on the harder split. Keeps one row for the table.

        What only gives the scale (the base, and the two other evaluations) gets a quarter of the samples.
        """
        settings = self.config.eval
        few = max(1, settings.samples // 4)
        engine = self.parts.engine(weights)
        try:
            tasks = list(self.parts.tasks.pool.tasks("heldout"))[: settings.tasks]
            main = await self._evaluate(name, tasks, settings.samples if is_trained else few, engine)
            row = _row(name, main) | {"no_system_frac": None, "hard_frac": None}
            if is_trained:
                plain = await self._evaluate(f"{name}.nosystem", tasks, few, engine, system_prompt=False)
                row["no_system_frac"] = plain.mean.mean
            tough = list(self.parts.tasks.pool.tasks("hard"))[: settings.hard_tasks]
            if is_trained and tough:
                row["hard_frac"] = (await self._evaluate(f"{name}.hard", tough, few, engine)).mean.mean
        finally:
            await engine.close()
        rows = [r for r in self.store.fact("evaluations", []) if r["policy"] != name]
        self.store.put_fact("evaluations", [*rows, row])
        return main

    def _evaluation(self, name: str, result: EvalResult, samples: int, system_prompt: bool) -> Evaluation:
        return Evaluation(
            name=name,
            tasks=tuple(
                TaskResult(task_id=task, cluster=result.clusters[task], successes=values, missing=samples - len(values))
                for task, values in result.success.items()
            ),
            settings={"temperature": str(self.config.eval.temperature), "system_prompt": "yes" if system_prompt else "no"},
        )

    async def _baselines(self) -> None:
        settings = self.config.eval
        tasks = list(self.parts.tasks.pool.tasks("heldout"))[: settings.tasks]
        by_id = {task.task_id: task for task in tasks}
        pool, seed = self.parts.tasks.repairs, self.config.seed
        policies: dict[str, Callable[[EpisodeKey], Policy]] = {"unchanged": lambda key: NoChange()}
        if pool is not None:
            policies |= {
                "random edits": lambda key: random_edits(pool, by_id[key.task_id], key, seed=seed, by_kind=False),
                "random edits by kind": lambda key: random_edits(pool, by_id[key.task_id], key, seed=seed, by_kind=True),
                "expert": lambda key: expert_for(pool, by_id[key.task_id], key, seed),
            }
        rows = []
        for name, script in policies.items():
            # Only random edits stand in a bar; the others give the scale.
            samples = max(1, settings.samples // 4) if name == "random edits" else 1
            engine = ScriptedEngine(self.parts.renderer, script)
            rows.append(_row(name, await self._evaluate(name.replace(" ", "_"), tasks, samples, engine)))
        self.store.put_fact("baselines", rows)

    async def _evaluate(self, name: str, tasks: Sequence[Task], samples: int, engine: Engine, *, system_prompt: bool = True) -> EvalResult:
        self.view.stage(f"evaluation {name}", len(tasks) * samples)
        result = await evaluate(
            name,
            tasks,
            samples,
            pool=self.parts.tasks.pool,
            engine=engine,
            sandbox_provider=self.parts.sandbox_provider,
            grader=self.grader,
            renderer=self.parts.renderer,
            store=self.store,
            view=self.view,
            temperature=self.config.eval.temperature,
            system_prompt=system_prompt,
            max_sessions=self.config.engine.max_sessions,
            max_infra_failures=self.config.rl.max_infra_failures,
        )
        self.store.log(0, result.metrics(), phase=f"eval.{name}")
        self.store.put_fact(f"success.{name}", asdict(self._evaluation(name, result, samples, system_prompt)))
        return result


def _row(name: str, result: EvalResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "policy": name,
        "success_frac": result.mean.mean,
        "low_frac": result.mean.low,
        "high_frac": result.mean.high,
        "first_edit_right_frac": result.first_edit_right,
        "tasks": len(result.success),
        "samples": max(map(len, result.success.values())),
    }
    if 8 in result.best_of:
        row["best_of_8_frac"] = result.best_of[8]
    return row


def _stored_evaluation(name: str, data: Mapping[str, Any]) -> Evaluation:
    tasks = tuple(TaskResult(**{**task, "successes": tuple(task["successes"])}) for task in data["tasks"])
    return Evaluation(name=name, tasks=tasks, settings=data["settings"])


def evaluate_checkpoint(config: RunConfig, checkpoint: Path, view: View) -> list[dict[str, Any]]:
    """Evaluate a checkpoint on the held-out tasks and return the rows of its table."""
    return asyncio.run(_evaluate_checkpoint(config, checkpoint, view))


async def _evaluate_checkpoint(config: RunConfig, checkpoint: Path, view: View) -> list[dict[str, Any]]:
    parts = build_parts(config, checkpoint, pool_dir(config.tasks.pool))
    engine = parts.engine(parts.base_weights)
    tasks = list(parts.tasks.pool.tasks("heldout"))[: config.eval.tasks]
    rows = []
    try:
        for name, system_prompt in (("with system prompt", True), ("without", False)):
            view.stage(f"evaluation {name}", len(tasks) * config.eval.samples)
            result = await evaluate(
                name.replace(" ", "_"),
                tasks,
                config.eval.samples,
                pool=parts.tasks.pool,
                engine=engine,
                sandbox_provider=parts.sandbox_provider,
                grader=parts.grader,
                renderer=parts.renderer,
                view=view,
                temperature=config.eval.temperature,
                system_prompt=system_prompt,
                max_sessions=config.engine.max_sessions,
                max_infra_failures=config.rl.max_infra_failures,
            )
            rows.append(_row(name, result))
    finally:
        await engine.close()
        await parts.close()
    return rows


def replay_run(run: RunDir, view: View) -> list[str]:
    """Execute a finished run again, from its base to its report, and return what differs (nothing, if it is reproduced)."""
    report = replay_report(run, view)
    view.message(
        f"replayed {report.episodes:,} episodes with {report.tokens:,} tokens, {report.commits} commit points and "
        f"{report.digests} digests: {'identical' if not report.differences else 'different'}"
        + (f"; {report.unplayed} episodes that the record lost to machinery could not be compared" if report.unplayed else "")
    )
    return report.differences


def replay_report(run: RunDir, view: View) -> ReplayReport:
    """Execute a finished run again and return what was compared and what differs."""

    def execute(copy: RunDir, record: ReplayStore) -> None:
        asyncio.run(_run(run.config, copy, view, record))

    return replay(run, execute)
