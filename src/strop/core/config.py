"""The configuration of a run: written by hand as TOML, checked on load, frozen afterwards.

Unknown keys and wrong values are errors that name the key, the value and the nearest valid choice. No torch here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strop.core.errors import ConfigError, nearest


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, field text under the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    base: str = "builtin:tiny"
    """Checkpoint directory in Hugging Face layout, or ``builtin:tiny`` for the base that ships with strop."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` takes cuda when there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the model; 0 means all cores that this process may use."""


class TasksConfig(Section):
    pool: str = "builtin:repair"
    """Task pool directory, or ``builtin:repair`` for the pool that ships with strop."""
    train_limit: int = Field(default=0, ge=0)
    """Use at most this many training tasks; 0 means all."""


class SandboxConfig(Section):
    backend: str = "bubblewrap"
    """Name of a sandbox back end."""
    workers: int = Field(default=2, ge=1)
    """Warm runners, and boxes that run something at the same time."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory limit of everything in one box, in MiB."""
    processes: int = Field(default=32, ge=1)
    """Process limit of one box."""
    disk_mb: int = Field(default=64, ge=1)
    """Size limit of one box's own layer, in MiB."""


class EngineConfig(Section):
    backend: str = "embedded"
    """Name of an engine back end."""
    max_sessions: int = Field(default=128, ge=1)
    """Token streams with a live cache at the same time."""
    max_batch: int = Field(default=128, ge=1)
    """Rows of one decode step."""
    max_tokens: int = Field(default=1536, ge=64)
    """Context length of a stream, in tokens."""
    prefill_rows: int = Field(default=2048, ge=32)
    """Prompt tokens computed in one step, together with the decode rows."""


class NumericsConfig(Section):
    mode: Literal["exact", "tolerant", "off"] = "exact"
    """``exact``: log-probabilities of rollout and trainer must be bit-identical, or the run stops; ``tolerant``: within the limits."""
    max_abs_diff: float = Field(default=0.05, ge=0)
    """Tolerant mode stops above this largest absolute log-probability difference, in nats."""
    replay_routes: Literal["off", "verify", "r3"] = "verify"
    """What the trainer does with the engine's routes: ignore, compare with its own, or replay them."""


class MidtrainConfig(Section):
    enabled: bool = True
    """Whether to run mid-training before RL."""
    episodes: int = Field(default=2000, ge=1)
    """Trajectories of the scripted expert."""
    epochs: int = Field(default=1, ge=1)
    """Passes over them."""
    batch_tokens: int = Field(default=8192, ge=256)
    """Tokens of one optimizer step, padding excluded."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak AdamW learning rate."""
    warmup_frac: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with a rising learning rate; it then falls linearly to a tenth."""
    code_frac: float = Field(default=0.2, ge=0, lt=1)
    """Share of the tokens that is plain code instead of trajectories."""
    drop_system_prompt: float = Field(default=0.3, ge=0, le=1)
    """Share of the trajectories without the system prompt."""


class RlConfig(Section):
    enabled: bool = True
    """Whether to run RL."""
    steps: int = Field(default=24, ge=0)
    """Optimizer steps."""
    groups: int = Field(default=16, ge=1)
    """Tasks of one step."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of one task."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """AdamW learning rate, constant after the warm-up."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps with a linearly rising learning rate."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch of episodes (mini-batches over episodes)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    max_staleness: int = Field(default=0, ge=0)
    """Weight versions that a token may lag behind the update that trains on it.

    0 alternates generation and training; more runs them at once and swaps weights in flight.
    """
    ratio_low: float = Field(default=0.8, gt=0, le=1)
    """Lower clip of the policy ratio."""
    ratio_high: float = Field(default=1.28, ge=1)
    """Upper clip of the policy ratio."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Truncation of the token-level importance weight trainer/generator."""
    guard_low: float = Field(default=0.1, gt=0, le=1)
    """A token whose importance weight lies below is left out of the loss and counted."""
    guard_high: float = Field(default=10.0, ge=1)
    """A token whose importance weight lies above is left out of the loss and counted."""
    length_constant: int = Field(default=256, ge=1)
    """Constant that divides the loss, times the episodes of a step: never the length of an episode.

    It scales the loss against ``aux_coefficient`` and ``grad_clip``.
    """
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k1 penalty against the weights at the start of RL."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aux_coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the router's load-balancing loss."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    drop_system_prompt: float = Field(default=0.25, ge=0, le=1)
    """Share of the tasks of a step that are rolled out without the system prompt."""
    permute_rewards: bool = False
    """Control experiment: permute rewards within the batch. Learning must then vanish."""
    max_infra_failures: int = Field(default=8, ge=1)
    """Machinery failures in a row that stop the run."""


class EvalConfig(Section):
    tasks: int = Field(default=128, ge=1)
    """Held-out tasks, pinned by their order in the pool."""
    samples: int = Field(default=4, ge=1)
    """Episodes of each task."""
    hard_tasks: int = Field(default=64, ge=0)
    """Tasks of the harder split; 0 skips it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    baselines: bool = True
    """Also run no change, random valid edits and the scripted expert."""


class PromotionConfig(Section):
    min_gain: float = 0.0
    """Smallest lower bound of the paired gain over the incumbent, as a success rate, that is promoted."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of that bound."""


class RunConfig(Section):
    """Everything that defines a run."""

    name: str = "run"
    """Used in titles."""
    seed: int = 0
    """Fixes every random choice."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineConfig = EngineConfig()
    numerics: NumericsConfig = NumericsConfig()
    midtrain: MidtrainConfig = MidtrainConfig()
    rl: RlConfig = RlConfig()
    eval: EvalConfig = EvalConfig()
    promotion: PromotionConfig = PromotionConfig()


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply dotted overrides.

    Args:
        path: TOML file, or ``None`` for the defaults.
        overrides: ``"rl.steps=10"``; the value is read as TOML, and as plain text when it isn't TOML.

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: Missing or unreadable file, unknown key, wrong value.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            siblings = [str(p) for p in Path(path).parent.glob("*.toml")] if Path(path).parent.is_dir() else []
            raise ConfigError(f"recipe {str(path)!r} does not exist.{nearest(str(path), siblings)}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"recipe {str(path)!r} can't be read: {error}") from None
    for override in overrides:
        _apply_override(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, str(path) if path else "defaults")) from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} must look like section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    node[leaf] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        dotted = ".".join(location)
        if item["type"] == "extra_forbidden":
            section: Any = RunConfig
            for part in location[:-1]:
                section = section.model_fields[part].annotation
            lines.append(f"{source}: unknown key {dotted!r}.{nearest(location[-1], section.model_fields)}")
        else:
            lines.append(f"{source}: {dotted} = {item['input']!r}: {item['msg']}")
    return "\n".join(lines)
