"""The composition root: turns a configuration into running parts. The only place, with ``cli``, that knows concrete adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from strop.agent.compact import content_tokenizer
from strop.agent.render import ActionRenderer, CompactRenderer, renderer_for
from strop.cli.registry import GRADERS, SANDBOXES
from strop.core.config import RunConfig
from strop.core.errors import ConfigError
from strop.core.task import Task
from strop.engine.embedded import EmbeddedEngine
from strop.model.checkpoint import load_checkpoint
from strop.model.config import DecoderConfig
from strop.model.inference import InferenceModel
from strop.model.routing.families import router_spec
from strop.model.training import TrainModel
from strop.numerics.precision import Precision
from strop.ports import Grader, PoolCapabilities, SandboxProvider, TaskPool
from strop.rl.anchor import load_anchor
from strop.rl.supervised import SupervisedTrainer, linear_schedule
from strop.rl.trainer import PolicyTrainer
from strop.runtime.tasks import RunTasks, check_tasks, open_tasks
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.domain import VariedProvider
from strop.sandboxes.reuse import ReusingProvider


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What every stage of a run uses.

    Attributes:
        config: The run.
        tasks: The pool, and what can be done with its tasks.
        sandbox_provider: Boxes that agents work in, of the back end that the configuration names.
        grading_provider: Where verdicts are found: always bubblewrap, whatever agents work in.
        grader: Verdicts, by the grader that the pool names.
        renderer: The chat format of the base.
        tokenizer: The base's, for text only.
        base_dir: Checkpoint of the base.
        decoder: Its shape.
        base_weights: Its weights under Hugging Face names.
        threads: CPU threads of the model.
    """

    config: RunConfig
    tasks: RunTasks
    sandbox_provider: SandboxProvider
    grading_provider: BubblewrapProvider
    grader: Grader
    renderer: ActionRenderer
    tokenizer: Tokenizer
    base_dir: Path
    decoder: DecoderConfig
    base_weights: Mapping[str, Any]
    threads: int

    def engine(self, weights: Mapping[str, Any], *, version: int = 0) -> EmbeddedEngine:
        """Return an engine that holds ``weights``."""
        return make_engine(self.config, self.decoder, weights, threads=self.threads, version=version)

    def train_model(self, weights: Mapping[str, Any]) -> TrainModel:
        """Return a trainable copy of ``weights``."""
        mode = "exact" if self.config.numerics.mode == "exact" else "tolerant"
        return TrainModel(self.decoder, weights, mode=mode, threads=self.threads, device=device(self.config))

    def supervised_trainer(self, weights: Mapping[str, Any], steps: int) -> SupervisedTrainer:
        """Return the trainer of mid-training."""
        settings = self.config.midtrain
        schedule = linear_schedule(settings.learning_rate, steps=steps, warmup_frac=settings.warmup_frac)
        model = self.train_model(weights)
        return SupervisedTrainer(
            model, schedule, anchor=load_anchor(self.config.routes, router_spec(self.decoder), "midtrain", model.device)
        )

    def policy_trainer(self, weights: Mapping[str, Any]) -> PolicyTrainer:
        """Return the trainer of RL."""
        model = self.train_model(weights)
        router = router_spec(self.decoder)
        anchor = load_anchor(self.config.routes, router, "rl", model.device)
        return PolicyTrainer(model, self.config.rl, self.config.numerics, routes=self.config.routes, router=router, anchor=anchor)

    async def close(self) -> None:
        """Stop every process that was started."""
        await self.grader.close()
        await self.sandbox_provider.close()
        await self.grading_provider.close()


def build_parts(config: RunConfig, base_dir: Path, pool_dir: Path) -> Parts:
    """Load the base and the tasks, start nothing yet.

    Raises:
        ConfigError: A setting that this machine can't serve.
        CheckpointError: The base is missing or damaged.
        TaskError: The pool is missing or damaged.
    """
    decoder, weights = load_checkpoint(base_dir)
    tasks, provider, grader = build_grading(config, pool_dir)
    check_tasks(config, tasks)
    renderer = renderer_for(base_dir)
    if config.midtrain.enabled and not isinstance(renderer, CompactRenderer):
        raise ConfigError(
            f"mid-training writes the compact chat format, and the base {str(base_dir)!r} has another; set midtrain.enabled = false"
        )
    tokenizer = content_tokenizer(Tokenizer.from_file(str(base_dir / "tokenizer.json")))
    return Parts(
        config=config,
        tasks=tasks,
        sandbox_provider=agent_boxes(config, provider),
        grading_provider=provider,
        grader=grader,
        renderer=renderer,
        tokenizer=tokenizer,
        base_dir=base_dir,
        decoder=decoder,
        base_weights=weights,
        threads=config.model.threads or len(os.sched_getaffinity(0)),
    )


def agent_boxes(config: RunConfig, grading_provider: BubblewrapProvider) -> SandboxProvider:
    """Return what starts the boxes of a run's agents: where that is bubblewrap too, over the provider of verdicts."""
    sandbox, is_ours = config.sandbox, config.sandbox.backend == "bubblewrap"
    boxes: SandboxProvider = grading_provider if is_ours else SANDBOXES.load(sandbox.backend)(sandbox)
    if sandbox.domain:  # boxes that look different may answer differently
        return VariedProvider(boxes, sandbox.domain, seed=config.seed)
    return ReusingProvider(boxes) if is_ours and sandbox.reuse_runs else boxes


def build_grading(config: RunConfig, pool_dir: Path, *, grader: str = "") -> tuple[RunTasks, BubblewrapProvider, Grader]:
    """Return what verdicts need, which is all that grading a run again needs: tasks, boxes, a grader.

    Args:
        config: The run.
        pool_dir: Its pool.
        grader: Name of a registered grader; by default the one that the pool names.

    Raises:
        ConfigError: A pool or grader of an unknown kind, or a grader that can't decide tasks of this pool.
        TaskError: The pool is missing or damaged, or nothing here can decide its tasks.
    """
    tasks = open_tasks(config, pool_dir)
    needed = tasks.pool.capabilities.grader
    make_grader = GRADERS.load(grader or needed)
    if grader in GRADERS.builtins and grader != needed:  # ours decide one kind of task each; what others decide is for them to say
        raise ConfigError(f"grader {grader!r} can't decide the tasks of tasks.pool = {config.tasks.pool!r}; their grader is {needed!r}")
    provider = BubblewrapProvider(config.sandbox)
    return tasks, provider, make_grader(tasks.played, provider, seed=config.seed)


def make_engine(config: RunConfig, decoder: DecoderConfig, weights: Mapping[str, Any], *, threads: int, version: int = 0) -> EmbeddedEngine:
    """Return the engine that a configuration asks for.

    Raises:
        ConfigError: Low precision in exact mode, or a device that isn't there.
    """
    if device(config) == "cpu" and Precision.of_config(config.numerics).is_plain:
        model: Any = InferenceModel(decoder, weights, threads=threads)
        is_exact = config.numerics.mode == "exact"  # otherwise the trainer's code is another one
        return EmbeddedEngine(config.engine, model, seed=config.seed, version=version, is_exact=is_exact)
    return torch_engine(config, decoder, weights, version)


def torch_engine(config: RunConfig, decoder: DecoderConfig, weights: Mapping[str, Any], version: int) -> EmbeddedEngine:
    """Return the embedded engine over the torch decoder, for cuda (not run here: this machine has no such device) and for low precision.

    Raises:
        ConfigError: Low precision in exact mode.
    """
    import torch

    from strop.engine.low_precision import LowPrecisionModel
    from strop.engine.torch_model import TorchCache, TorchModel

    precision = Precision.of_config(config.numerics)
    if not precision.is_plain and config.numerics.mode == "exact":
        raise ConfigError(
            f"numerics.rollout_precision = {config.numerics.rollout_precision!r} with numerics.precision = {config.numerics.precision} "
            "can't be exact: set numerics.mode to 'tolerant' or 'off'"
        )
    if precision.is_plain:
        model = TorchModel(decoder, weights, device=device(config))
    else:
        model = LowPrecisionModel(decoder, weights, precision, device=device(config))
    return EmbeddedEngine(
        config.engine,
        model,
        seed=config.seed,
        version=version,
        make_cache=lambda slots, tokens: TorchCache(decoder, slots, tokens, device=torch.device(device(config))),
        is_exact=False,
    )


def device(config: RunConfig) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for ``model.device``; exact mode always runs on the CPU.

    Raises:
        ConfigError: cuda is asked for and there is none, or exact mode is asked for on cuda.
    """
    import torch

    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = 'cuda': no such device here; use 'auto' or 'cpu'")
    if config.numerics.mode == "exact":
        if wanted == "cuda":
            raise ConfigError("numerics.mode = 'exact' runs on the CPU; use numerics.mode = 'tolerant' with model.device = 'cuda'")
        return "cpu"
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


class PoolView:
    """A pool with other training tasks; everything else is the pool's own."""

    def __init__(self, pool: TaskPool, train: Sequence[Task]) -> None:
        self._pool = pool
        self._train = list(train)

    @property
    def capabilities(self) -> PoolCapabilities:
        """Those of the pool."""
        return self._pool.capabilities

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split in a fixed order."""
        return self._train if split == "train" else self._pool.tasks(split)

    def base_dir(self, task: Task) -> str:
        """Directory of the starting workspace."""
        return self._pool.base_dir(task)
