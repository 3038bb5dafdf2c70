"""A run from base to report, stage by stage; an interrupted one continues with the first stage that isn't done.

    base_eval -> midtrain -> mid_eval -> rl -> rl_eval -> report

Each stage reads what earlier ones published in the run directory and ends in a commit point. RL commits every step; the other stages
start again from their beginning, and end in the same bits because every random choice is keyed by the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.agent.baselines import NoChange, RandomEdits
from strop.agent.scripted import ScriptedEngine
from strop.cli.models import model_dir, pool_dir
from strop.core.config import RunConfig
from strop.core.episode import EpisodeKey
from strop.core.task import Task
from strop.midtrain.phase import expert_for, midtrain_tasks, run_midtraining
from strop.model.checkpoint import load_checkpoint, save_checkpoint
from strop.ports import Engine
from strop.production.promotion import Evaluation, decide
from strop.rl.evaluate import EvalResult, evaluate
from strop.rl.loop import resume_step, run_rl
from strop.runtime.build import Parts, PoolView, build_parts
from strop.store import RunDir
from strop.tasks.mutation import IDENTIFIER_KINDS, candidate_edits
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


async def _run(config: RunConfig, run: RunDir, view: View) -> None:
    parts = build_parts(config, model_dir(config.model.base), pool_dir(config.tasks.pool))
    pipeline = Pipeline(parts, run, view)
    try:
        await pipeline.base_eval()
        await pipeline.midtrain()
        await pipeline.mid_eval()
        await pipeline.rl()
        await pipeline.rl_eval()
        await pipeline.report()
    finally:
        await parts.close()


class Pipeline:
    """The stages of one run. Each method does its stage unless it is done."""

    def __init__(self, parts: Parts, run: RunDir, view: View) -> None:
        self.parts = parts
        self.config = parts.config
        self.run = run
        self.store = run.store
        self.view = view

    # ------------------------------------------------------------------------------------------------ stages

    async def base_eval(self) -> None:
        """Held-out success of the base, and of policies that need no model."""
        if self.store.is_done("base_eval"):
            return
        if self.config.eval.baselines:
            await self._baselines()
        await self._evaluate_policy("base", self.parts.base_weights, hard=False)
        self.store.set_stage("base_eval")

    async def midtrain(self) -> None:
        """Mid-training; publishes ``mid``."""
        if self.store.is_done("midtrain"):
            return
        weights = self.parts.base_weights
        facts: dict[str, Any] = {"skipped": True}
        if self.config.midtrain.enabled:
            trainers: list[Any] = []

            def make_trainer(steps: int) -> Any:
                trainers.append(self.parts.supervised_trainer(weights, steps))
                return trainers[0]

            result = await run_midtraining(
                self.config,
                pool=self.parts.pool,
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
            engine = self.parts.engine(trainer.weights(), version=start)
            self.view.stage("RL", self.config.rl.steps)
            try:
                result = await run_rl(
                    self.config,
                    pool=PoolView(self.parts.pool, self._rl_tasks()),
                    engine=engine,
                    sandbox_provider=self.parts.sandbox_provider,
                    grader=self.parts.grader,
                    renderer=self.parts.renderer,
                    trainer=trainer,
                    store=self.store,
                    view=self.view,
                    start_step=start,
                )
            finally:
                await engine.close()
            weights = trainer.weights()
            facts = {"steps": result.steps, "policy_version": result.policy_version, "conservation": result.conservation}
        digest = self._publish("rl", weights)
        self.store.set_stage("rl", weights_digest=digest, **facts)

    async def rl_eval(self) -> None:
        """Held-out success after RL, and the promotion gate against mid-training."""
        if self.store.is_done("rl_eval"):
            return
        candidate = await self._evaluate_policy("rl", self._weights("rl"))
        incumbent = Evaluation(**self.store.fact("success.mid"))
        decision = decide(incumbent, _evaluation("rl", candidate), self.config.promotion, seed=self.config.seed)
        self.store.put_fact("promotion", asdict(decision))
        self.store.put_fact("promoted", "rl" if decision.promote else "mid")
        self.view.message(f"promotion gate: {decision.reason}")
        self.store.set_stage("rl_eval")

    async def report(self) -> None:
        """The certificate, the tables and the HTML report."""
        if not self.store.is_done("report"):
            self.store.set_stage("report")
        self.run.report_path.write_text(build_report(self.store), encoding="utf-8")
        self.view.table(self.store.fact("baselines", []), title="policies that need no model")
        self.view.table(self.store.fact("evaluations", []), title="held-out success")

    # ------------------------------------------------------------------------------------------------ pieces

    def _rl_tasks(self) -> list[Task]:
        shown = {task.task_id for task in midtrain_tasks(self.parts.pool, self.config.midtrain.episodes, self.config.seed)}
        return [task for task in self.parts.pool.tasks("train") if task.task_id not in shown or not self.config.midtrain.enabled]

    def _publish(self, name: str, weights: Mapping[str, Any]) -> str:
        return self.store.publish(name, lambda path: save_checkpoint(path, self.parts.decoder, weights, tokenizer_from=self.parts.base_dir))

    def _weights(self, name: str) -> Mapping[str, Any]:
        return load_checkpoint(self.store.checkpoint_path(name))[1]

    async def _evaluate_policy(self, name: str, weights: Mapping[str, Any], *, hard: bool = True) -> EvalResult:
        """Evaluate with and without the system prompt and on the harder split; keeps one row for the table."""
        settings = self.config.eval
        engine = self.parts.engine(weights)
        try:
            tasks = list(self.parts.pool.tasks("heldout"))[: settings.tasks]
            main = await self._evaluate(name, tasks, settings.samples, engine)
            plain = await self._evaluate(f"{name}.nosystem", tasks, max(1, settings.samples // 2), engine, system_prompt=False)
            row = _row(name, main) | {"no_system_frac": plain.mean.mean}
            if hard and settings.hard_tasks:
                tough = list(self.parts.pool.tasks("hard"))[: settings.hard_tasks]
                row["hard_frac"] = (await self._evaluate(f"{name}.hard", tough, max(1, settings.samples // 2), engine)).mean.mean
        finally:
            await engine.close()
        rows = [r for r in self.store.fact("evaluations", []) if r["policy"] != name]
        self.store.put_fact("evaluations", [*rows, row])
        self.store.put_fact(f"success.{name}", asdict(_evaluation(name, main)))
        return main

    async def _baselines(self) -> None:
        settings = self.config.eval
        tasks = list(self.parts.pool.tasks("heldout"))[: settings.tasks]
        by_id = {task.task_id: task for task in tasks}
        policies = {
            "unchanged": lambda key: NoChange(),
            "random edits": lambda key: random_edits(self.parts, by_id[key.task_id], key),
            "expert": lambda key: expert_for(self.parts.pool, by_id[key.task_id], key, self.config.seed),
        }
        rows = []
        for name, script in policies.items():
            samples = 1 if name == "unchanged" else settings.samples
            engine = ScriptedEngine(self.parts.renderer, script)
            rows.append(_row(name, await self._evaluate(name.replace(" ", "_"), tasks, samples, engine)))
        self.store.put_fact("baselines", rows)

    async def _evaluate(self, name: str, tasks: Sequence[Task], samples: int, engine: Engine, *, system_prompt: bool = True) -> EvalResult:
        self.view.stage(f"evaluation {name}", len(tasks) * samples)
        result = await evaluate(
            name,
            tasks,
            samples,
            pool=self.parts.pool,
            engine=engine,
            sandbox_provider=self.parts.sandbox_provider,
            grader=self.parts.grader,
            renderer=self.parts.renderer,
            store=self.store,
            view=self.view,
            temperature=self.config.eval.temperature,
            system_prompt=system_prompt,
            max_sessions=self.config.engine.max_sessions,
        )
        self.store.log(0, result.metrics(), phase=f"eval.{name}")
        return result


def random_edits(parts: Parts, task: Task, key: EpisodeKey) -> RandomEdits:
    """Return the random searcher, in its strongest form: it is told the function, and draws kinds as the bugs were drawn."""
    path, span = parts.pool.function(task)
    source = (Path(parts.pool.base_dir(task)) / path).read_text(encoding="utf-8")
    candidates = candidate_edits(source, span)
    return RandomEdits(path, candidates, seed=parts.config.seed, key=key, weights=kind_weights([e.kind for e in candidates]))


def kind_weights(kinds: Sequence[str]) -> list[float]:
    """Return a weight for each candidate so that every kind present is equally likely, identifier kinds together a fifth.

    This is how the pool draws its bugs, so no other blind order finds them sooner.
    """
    present = sorted(set(kinds))
    named = [kind for kind in present if kind in IDENTIFIER_KINDS]
    plain = [kind for kind in present if kind not in IDENTIFIER_KINDS]
    share = {kind: (0.2 if plain else 1.0) / len(named) for kind in named}
    share |= {kind: (0.8 if named else 1.0) / len(plain) for kind in plain}
    counts = {kind: kinds.count(kind) for kind in present}
    return [share[kind] / counts[kind] for kind in kinds]


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


def _evaluation(name: str, result: EvalResult) -> Evaluation:
    return Evaluation(name=name, success={task: list(values) for task, values in result.success.items()}, clusters=dict(result.clusters))


def evaluate_checkpoint(config: RunConfig, checkpoint: Path, view: View) -> list[dict[str, Any]]:
    """Evaluate a checkpoint on the held-out tasks and return the rows of its table."""
    return asyncio.run(_evaluate_checkpoint(config, checkpoint, view))


async def _evaluate_checkpoint(config: RunConfig, checkpoint: Path, view: View) -> list[dict[str, Any]]:
    parts = build_parts(config, checkpoint, pool_dir(config.tasks.pool))
    engine = parts.engine(parts.base_weights)
    tasks = list(parts.pool.tasks("heldout"))[: config.eval.tasks]
    rows = []
    try:
        for name, system_prompt in (("with system prompt", True), ("without", False)):
            view.stage(f"evaluation {name}", len(tasks) * config.eval.samples)
            result = await evaluate(
                name.replace(" ", "_"),
                tasks,
                config.eval.samples,
                pool=parts.pool,
                engine=engine,
                sandbox_provider=parts.sandbox_provider,
                grader=parts.grader,
                renderer=parts.renderer,
                view=view,
                temperature=config.eval.temperature,
                system_prompt=system_prompt,
                max_sessions=config.engine.max_sessions,
            )
            rows.append(_row(name, result))
    finally:
        await engine.close()
        await parts.close()
    return rows
