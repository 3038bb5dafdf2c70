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
from strop.core.overrides import apply_override, brief

SENSITIVE_OPS = ("residual", "norm", "router", "lm_head")
"""Operations that a rollout in low precision keeps in float32 unless told otherwise; see ``strop.numerics.precision``."""


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, field text under the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """The base to start from, and where it computes."""

    base: str = "builtin:tiny"
    """Checkpoint directory in Hugging Face layout, or ``builtin:tiny`` for the base that ships with strop."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` takes cuda when there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the model; 0 means all cores that this process may use."""


class TasksConfig(Section):
    """Where tasks come from."""

    pool: str = "builtin:repair"
    """Task pool directory, as ``strop env build`` makes one, or ``builtin:repair`` for the pool that ships with strop. What kind of tasks
    it holds, and which grader decides them, is read from the pool."""
    train_limit: int = Field(default=0, ge=0)
    """Use at most this many training tasks; 0 means all."""
    exclude_kinds: list[str] = []
    """Kinds that training and held-out tasks leave out: kinds of bug of ``builtin:repair``, for example ``["variable", "argument_swap"]``,
    whose repairs name identifiers; ``mutation``, ``combined``, ``deletion`` or ``history`` of built tasks. The harder split keeps them."""
    max_turns: int = Field(default=0, ge=0)
    """Turns of an episode, each at most one tool call; 0 takes what the pool says."""
    max_tokens: int = Field(default=0, ge=0)
    """Tokens of the whole stream of an episode, at most ``engine.max_tokens``; 0 takes what the pool says."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Sampled tokens of one turn; 0 takes what the pool says."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds of an episode; 0 takes what the pool says."""
    exec_s: float = Field(default=0.0, ge=0)
    """Seconds of one command in the sandbox; 0 takes what the pool says."""


class SandboxConfig(Section):
    """The boxes that agent code runs in, and their limits."""

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
    reuse_runs: bool = True
    """Whether tests that ran on equal files are answered from memory, of bubblewrap boxes only; never for verdicts."""
    domain: list[str] = []
    """How agents' boxes look, never those of verdicts: ``"KEY=VALUE"`` fixes, ``"KEY"`` draws anew for each task. Keys: ``hostname``,
    ``path``, ``uptime``, ``latency_ms``, ``runner``, ``order``, and ``env.NAME`` (fixed only); see the how-to on fidelity."""


class FidelityConfig(Section):
    """What a run asks of its boxes before it starts."""

    report: str = ""
    """Report of ``strop fidelity`` about boxes of this recipe's kind, without which the run doesn't start; empty: none is asked for."""
    max_auc: float = Field(default=0.6, gt=0.5, le=1)
    """Largest upper bound of the AUC at which the run starts: how well production's boxes may be told from these."""


class EngineConfig(Section):
    """Token generation: streams, batch and context."""

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
    """How closely rollout and trainer must agree, and what happens when they don't."""

    mode: Literal["exact", "tolerant", "off"] = "exact"
    """``exact``: log-probabilities of rollout and trainer must be bit-identical, or the run stops; ``tolerant``: within the limits."""
    max_abs_diff: float = Field(default=0.05, ge=0)
    """Tolerant mode stops above this largest absolute log-probability difference, in nats."""
    replay_routes: Literal["off", "verify", "r2", "r3", "fragile-only", "plausible", "auto"] = "verify"
    """What the trainer does with the engine's routes: ignore them, compare them with its own, or replay them; see the how-to on router
    replay. ``r2`` replays the routes before the first of several updates, ``r3`` the engine's, ``fragile-only`` those at near-ties,
    ``plausible`` those that the live router finds plausible; ``auto`` chooses and says why."""
    certify_steps: int = Field(default=8, ge=0)
    """Steps of an epoch of RL: after so many a certificate is written, and at the end of the phase anyway; 0 only there."""
    warn_token_mult_error: float = Field(default=1.05, ge=1)
    """Warn above this mean ``exp|difference|`` (NeMo-RL: investigate above 1.05)."""
    stop_token_mult_error: float = Field(default=1.1, ge=1)
    """Stop above it (the loosest value in NeMo-RL's tests of MoE models)."""
    warn_k3_nats: float = Field(default=1e-3, ge=0)
    """Warn above this k3 (NeMo-RL: acceptable below 1e-3)."""
    stop_k3_nats: float = Field(default=0.015, ge=0)
    """Stop above it (prime-rl's merge bar; a collapse was seen at 0.013, and MoE runs in low precision may train above: raise it then)."""
    warn_k1_nats: float = Field(default=0.01, ge=0)
    """Warn above this absolute k1, the gap of log perplexities."""
    stop_k1_nats: float = Field(default=0.1, ge=0)
    """Stop above it (verl and slime warn at 0.1)."""
    warn_logprob_diff_mean_nats: float = Field(default=0.02, ge=0)
    """Warn above this mean absolute difference; 16-bit rollouts of a small MoE lie just below."""
    stop_logprob_diff_mean_nats: float = Field(default=0.1, ge=0)
    """Stop above it (default of slime's tests)."""
    warn_ratio_above_2_frac: float = Field(default=2e-3, ge=0, le=1)
    """Warn above this share of tokens with a ratio outside [1/2, 2]; 16-bit rollouts of a small MoE lie just below."""
    stop_ratio_above_2_frac: float = Field(default=2e-2, ge=0, le=1)
    """Stop above it, ten times the warning."""
    warn_ess_frac: float = Field(default=0.9, ge=0, le=1)
    """Warn below this effective sample size."""
    stop_ess_frac: float = Field(default=0.3, ge=0, le=1)
    """Stop below it (verl)."""
    warn_correlation: float = Field(default=0.997, ge=-1, le=1)
    """Warn below this correlation of log-probabilities (MiniMax-M1 with a repaired head)."""
    stop_correlation: float = Field(default=0.987, ge=-1, le=1)
    """Stop below it (MiniMax-M1 with a head in low precision)."""
    warn_clip_frac: float = Field(default=0.02, ge=0, le=1)
    """Warn above this share of tokens that the difference alone would clip."""
    stop_clip_frac: float = Field(default=0.2, ge=0, le=1)
    """Stop above it (45 % were clipped before a published collapse)."""
    warn_route_mismatch_frac: float = Field(default=0.01, ge=0, le=1)
    """Warn above this share of token-layer pairs with other experts."""
    stop_route_mismatch_frac: float = Field(default=0.1, ge=0, le=1)
    """Stop above it (about the share in published runs that collapsed without replay)."""
    stop_advantage_skew: float = Field(default=1e-4, ge=0)
    """An advantage-signed skew below this share of the mean absolute advantage is left alone, whatever its ``z``."""
    warn_advantage_skew_z: float = Field(default=4.5, ge=0)
    """Warn above this ``|z|`` of the skew over ten steps; chance reaches it less than once in 12,000 windows."""
    stop_advantage_skew_z: float = Field(default=6.0, ge=0)
    """Stop above it; chance reaches it less than once in 30 million windows."""
    rollout_precision: Literal["fp32", "tf32", "bf16", "fp16", "int8", "mxfp8", "nvfp4"] = "fp32"
    """Number type of the rollout engine, emulated; anything but ``fp32`` needs ``mode = "tolerant"`` or ``"off"``."""
    rollout_scale: Literal["token", "tensor"] = "token"
    """Scales of scaled types: one per token row (and per block), or one per call; the latter ties a row to its batch mates."""
    rollout_keep: list[str] = list(SENSITIVE_OPS)
    """Operations that stay float32 in a rollout of low precision; ``[]`` is an engine that computes everything in it."""
    precision: list[str] = []
    """Overrides of single lines of the rollout's precision policy, for example ``["residual=bf16"]``; see the how-to on drift."""


class RoutesConfig(Section):
    """Router replay, what it may cost, and the anchor of a recorded run."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the episodes that train on live routes although others are replayed, so that the price of replay can be seen."""
    max_fallback_frac: float = Field(default=0.0, ge=0, le=1)
    """Share of rows without a record that may take the live router's choice; more is an error before any weight moves."""
    max_regret: float = Field(default=0.0, ge=0)
    """Recorded experts of rows that these very weights computed may lie so far below the live choice, in router logits; honest flips
    are near-ties, so that more is a damaged record and stops a step that replays it. 0 takes what the rollout's precision explains."""
    fragile_margin: float = Field(default=0.05, ge=0)
    """``fragile-only`` replays where the live K-th expert leads the next one by less, in router logits."""
    plausible_gap: float = Field(default=0.25, ge=0)
    """``plausible`` gives up a replayed expert whose live router logit lies further below the live K-th largest."""
    probe_rows: int = Field(default=128, ge=0)
    """Tokens on which churn and lock-in of the routers are measured after every step; 0 leaves both out."""
    tax_frac: float = Field(default=0.02, ge=0, le=1)
    """Share of the step's rows on which the price of replay is measured by a second pass on live routes."""
    anchor: str = ""
    """Run directory with a record of routes (``strop routes record``) that this run's routers start close to; empty: none."""
    anchor_weight: float = Field(default=0.1, ge=0)
    """Weight of the pull towards the record's token-class statistics, in front of a KL divergence in nats."""
    anchor_hard_steps: int = Field(default=0, ge=0)
    """Steps of mid-training at the beginning that replay the record's routes on streams that it knows."""
    anchor_steps: int = Field(default=50, ge=1)
    """Step of a phase at which the pull has faded out, linearly."""
    anchor_phases: list[Literal["midtrain", "rl"]] = ["midtrain", "rl"]
    """Phases that the anchor holds in."""


class MidtrainConfig(Section):
    """Mid-training on trajectories of the scripted expert and on code."""

    enabled: bool = True
    """Whether to run mid-training before RL."""
    episodes: int = Field(default=2000, ge=1)
    """Trajectories of the scripted expert."""
    epochs: int = Field(default=1, ge=1)
    """Passes over them."""
    batch_tokens: int = Field(default=8192, ge=256)
    """Tokens of one optimizer step, padding excluded."""
    learning_rate: float = Field(default=1e-3, gt=0, le=10)
    """Peak AdamW learning rate."""
    warmup_frac: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with a rising learning rate; it then falls linearly to a tenth."""
    code_frac: float = Field(default=0.2, ge=0, lt=1)
    """Share of the tokens that is plain code instead of trajectories."""
    drop_system_prompt: float = Field(default=0.3, ge=0, le=1)
    """Share of the trajectories without the system prompt."""


class RlConfig(Section):
    """Reinforcement learning: size of a step, loss, staleness."""

    enabled: bool = True
    """Whether to run RL."""
    steps: int = Field(default=24, ge=0, le=10_000_000)
    """Optimizer steps."""
    groups: int = Field(default=16, ge=1)
    """Tasks of one step."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of one task."""
    learning_rate: float = Field(default=3e-4, ge=0, le=10)
    """AdamW learning rate after the warm-up; 0 is a control experiment in which nothing may move."""
    final_learning_rate_frac: float = Field(default=1.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step; it falls linearly from the first. 1 keeps it constant."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps with a linearly rising learning rate."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch of episodes (mini-batches over episodes)."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
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
    wasted_call_cost: float = Field(default=0.0, ge=0)
    """Reward that a wasted call costs, charged to its own tokens. Wasted: malformed, refused by the tool, or a repetition of an earlier
    call, or of the instruction, that can't tell anything new. It is compared with other calls of the same tool in the step, groups
    without a signal included; verdicts and evaluations never contain it."""
    right_edit_credit: float = Field(default=0.0, ge=0)
    """Advantage that the edit earns which stood at the end of an episode with full reward, on its own tokens beside the episode's; the
    share of such edits is taken off every edit that the tool took. So edits that were undone on the way earn less."""
    permute_rewards: bool = False
    """Control experiment: permute rewards within each group, and the credit of calls within each tool. Learning must then vanish."""
    max_infra_failures: int = Field(default=8, ge=1)
    """Machinery failures in a row that stop the run."""


class GradingConfig(Section):
    """What tried hacks cost, and probes for cheating."""

    on_hack: Literal["keep", "drop", "zero", "penalise"] = "drop"
    """What becomes of an episode that a rule of severity ``hack`` flags: it trains as graded, leaves training, trains with reward 0, or
    with minus ``penalty``. It stays on disk and is counted in any case."""
    keep: list[str] = []
    """Rules whose episodes train as graded, whatever their severity."""
    drop: list[str] = []
    """Rules whose episodes leave training."""
    zero: list[str] = ["resource", "oversize"]
    """Rules whose episodes train with reward 0. By default those that would be worth provoking on a lost task if it left training."""
    penalise: list[str] = []
    """Rules whose episodes train with minus ``penalty``."""
    penalty: float = Field(default=1.0, ge=0)
    """Reward of a penalised episode, with a minus sign."""
    max_hack_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of flagged episodes among the last ones that stops the run; 1 never does."""
    hack_window: int = Field(default=256, ge=1)
    """How many episodes that share is taken over; nothing stops on fewer."""
    probe_frac: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the training tasks of RL that are probes: impossible ones, and ones with a honeypot. They teach nothing (their rewards are
    equal) and tell how often each policy version cheats."""
    contrast: bool = True
    """Whether the samples of a task are compared with each other; what only one does is flagged ``contrast`` (severity ``warn``)."""


class EvalConfig(Section):
    """Held-out evaluation."""

    tasks: int = Field(default=128, ge=1)
    """Held-out tasks, pinned by their order in the pool."""
    samples: int = Field(default=4, ge=1)
    """Episodes of each task for a trained policy; a quarter of it for the base, without the system prompt, and on the harder split."""
    hard_tasks: int = Field(default=64, ge=0)
    """Tasks of the harder split; 0 skips it, and so does a pool that has none there."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""
    baselines: bool = True
    """Also run no change and, where the pool knows single edits that repair its tasks, random valid edits and the scripted expert."""


class PromotionConfig(Section):
    """The gate between a trained model and its incumbent."""

    min_gain: float = Field(default=0.0, ge=-1, le=1)
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
    fidelity: FidelityConfig = FidelityConfig()
    engine: EngineConfig = EngineConfig()
    numerics: NumericsConfig = NumericsConfig()
    routes: RoutesConfig = RoutesConfig()
    midtrain: MidtrainConfig = MidtrainConfig()
    rl: RlConfig = RlConfig()
    grading: GradingConfig = GradingConfig()
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
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"recipe {str(path)!r} can't be read: {error}") from None
    for override in overrides:
        apply_override(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, str(path) if path else "defaults")) from None


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
            lines.append(f"{source}: {dotted} = {brief(item['input'])}: {item['msg']}")
    return "\n".join(lines)
