"""Every metric strop writes: one table of keys with unit, reducer and meaning.

A key is ``area/name[_unit]``. A part in braces stands for any one word: ``conservation/dropped/{reason}`` covers
``conservation/dropped/stale``. To add a metric, add one row to the table of its area; nothing else has to change.
The reference page of the documentation is generated from this table. No torch here.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from strop.core.errors import ConfigError


class Reducer(StrEnum):
    """How several values of a key become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        key: ``area/name[_unit]``, possibly with a ``{placeholder}`` part.
        unit: ``"1"`` for a plain number, ``"frac"`` for a share in [0, 1], ``"nats"``, ``"s"``, ``"tokens"``, ``"bytes"``, ...
        reducer: How values of several episodes, processes or steps combine.
        meaning: One line.
    """

    key: str
    unit: str
    reducer: Reducer
    meaning: str

    @property
    def area(self) -> str:
        """The part before the first slash."""
        return self.key.partition("/")[0]


_ROWS = """
# ---- rl: the update
rl/reward                       | 1       | mean | Mean reward of the graded episodes of the step.
rl/reward_std                   | 1       | mean | Standard deviation of the reward over the step's graded episodes.
rl/training_reward              | 1       | mean | Mean reward as trained on: after quarantine and permutation.
rl/success_frac                 | frac    | mean | Share of graded episodes with full reward.
rl/loss                         | 1       | mean | Policy loss after the constant normaliser.
rl/aux_loss                     | 1       | mean | Load-balancing loss of the router, before its coefficient.
rl/grad_norm                    | 1       | mean | Global gradient norm before clipping.
rl/learning_rate                | 1       | last | Learning rate of the step.
rl/entropy_nats                 | nats    | mean | Mean entropy of the policy on sampled tokens.
rl/k1_nats                      | nats    | mean | Mean log(policy/reference): k1 estimate of the divergence from the start of RL.
rl/k3_nats                      | nats    | mean | k3 estimate of the same divergence.
rl/clip_frac                    | frac    | mean | Share of sampled tokens whose policy ratio was clipped.
rl/ratio_max                    | 1       | max  | Largest policy ratio.
rl/importance_mean              | 1       | mean | Mean importance weight trainer/generator before truncation.
rl/importance_max               | 1       | max  | Largest importance weight before truncation.
rl/importance_truncated_frac    | frac    | mean | Share of sampled tokens whose importance weight was truncated.
rl/guard_dropped_tokens         | tokens  | sum  | Sampled tokens that the importance guard left out of the loss.
rl/ess_frac                     | frac    | mean | Effective sample size of the importance weights, as a share of the tokens.
rl/advantage_abs                | 1       | mean | Mean absolute advantage of the episodes.
rl/groups_signal_frac           | frac    | mean | Share of groups whose rewards differ (only these teach).
rl/groups_no_signal             | groups  | sum  | Groups whose rewards are all equal.
rl/trained_tokens               | tokens  | sum  | Sampled tokens that entered the loss.
rl/staleness_mean               | updates | mean | Mean versions between sampling and training, over trained tokens.
rl/staleness_max                | updates | max  | Largest number of versions between sampling and training.
rl/policy_version               | 1       | last | Version of the weights after the step.
rl/skipped_steps                | steps   | sum  | Optimizer steps skipped for want of signal.
rl/updates                      | steps   | sum  | Optimizer updates made on the batch.
# ---- numerics: rollout against trainer
numerics/tokens                 | tokens  | sum  | Sampled tokens compared between rollout and trainer.
numerics/logprob_diff_mean_nats | nats    | mean | Mean absolute log-probability difference, rollout against trainer.
numerics/logprob_diff_p99_nats  | nats    | mean | 99th percentile of the absolute log-probability difference.
numerics/logprob_diff_p999_nats | nats    | max  | 99.9th percentile of the absolute log-probability difference.
numerics/logprob_diff_max_nats  | nats    | max  | Largest absolute log-probability difference; 0 in exact mode.
numerics/prob_error_mean        | 1       | mean | Mean absolute difference of token probabilities, rollout against trainer.
numerics/prob_error_max         | 1       | max  | Largest absolute difference of token probabilities.
numerics/k1_nats                | nats    | mean | k1 estimate of KL(rollout || trainer) on sampled tokens: the gap of log perplexities.
numerics/k3_nats                | nats    | mean | k3 estimate of KL(rollout || trainer) on sampled tokens.
numerics/ratio_above_2_frac     | frac    | mean | Share of tokens whose probability ratio lies outside [1/2, 2].
numerics/ess_frac               | frac    | mean | Effective sample size of the weights trainer/rollout, as a share of the tokens.
numerics/clip_frac              | frac    | mean | Share of tokens that rollout-trainer difference alone would clip.
numerics/route_mismatch_frac    | frac    | mean | Share of token-layer pairs with other experts in the trainer, fresh tokens only.
numerics/is_exact               | bool    | min  | 1 while every compared log-probability was bit-identical.
numerics/nonfinite              | tokens  | sum  | Log-probabilities that were not finite (stops the step).
numerics/token_mult_error       | 1       | mean | Mean exp|difference|: multiplicative error of token probabilities, 1 is perfect.
numerics/advantage_skew         | 1       | mean | Mean advantage times (ratio - 1): a bias that k3 can't see.
numerics/advantage_skew_positive | 1      | mean | Part of the skew from tokens with positive advantage.
numerics/advantage_skew_negative | 1      | mean | Part of the skew from tokens with negative advantage.
numerics/correlation            | 1       | mean | Correlation of the log-probabilities of rollout and trainer.
numerics/advantage_skew_window  | 1       | last | Advantage-signed skew over the last ten steps, as a share of the mean absolute advantage.
numerics/advantage_skew_z       | 1       | last | Its self-normalised statistic; beyond 6 is no chance.
numerics/warnings               | 1       | sum  | Warn limits that the step crossed.
# ---- routes: what the routers do
routes/entropy_nats             | nats    | mean | Entropy of the expert load, averaged over layers; log(experts) is perfectly even.
routes/load_max                 | 1       | max  | Load of the busiest expert relative to an even split.
routes/load_min                 | 1       | min  | Load of the idlest expert relative to an even split.
routes/load_layer{layer}_expert{expert} | frac | mean | Share of a layer's routed tokens that one expert received.
routes/entropy_layer{layer}_nats | nats   | mean | Entropy of one layer's expert load.
routes/mismatch_frac            | frac    | mean | Share of token-layer pairs whose recorded experts differ from the trainer's own choice.
routes/mismatch_layer{layer}_frac | frac  | mean | The same for one layer.
routes/suppressed_frac          | frac    | mean | Share of trainer routing choices that replay overrode.
routes/suppressed_layer{layer}_frac | frac | mean | The same for one layer.
routes/suppressed_age{age}_frac | frac    | mean | The same for tokens sampled so many weight versions ago.
routes/tax_nats                 | nats    | mean | KL(live || replayed routes) per token, on a sample: the price of replay.
routes/starved_experts          | experts | max  | Experts that live routers want more than twice as often as replay uses them.
routes/router_entropy_nats      | nats    | mean | Entropy of a token's routing distribution, averaged over tokens and layers.
routes/fallback_rows            | rows    | sum  | Rows without a record that took the live router's choice.
routes/replaced_frac            | frac    | mean | Share of recorded experts that mode plausible gave up.
routes/kept_live_frac           | frac    | mean | Share of token-layer pairs that mode fragile-only left to the live router.
routes/dropout_frac             | frac    | mean | Share of episodes trained on live routes because of routes.dropout.
routes/regret_max               | 1       | max  | Largest gap between the live K-th expert and the worst recorded one, in logits.
routes/regret_p99               | 1       | mean | Its 99th percentile over token-layer pairs.
routes/churn_frac               | frac    | mean | Share of the probe's token-layer pairs whose experts the step changed.
routes/locked_frac              | frac    | last | Share of them whose experts didn't change in the last eight steps.
routes/moved_frac               | frac    | last | Share of them whose experts differ from those at the first step.
routes/anchor_agree_frac        | frac    | mean | Share of live expert choices that the anchor's record makes too.
routes/anchor_nats              | nats    | mean | KL(record || live router) per token and layer, before its weight.
routes/anchor_weight            | 1       | last | Weight of the pull towards the anchor at this step.
routes/anchor_replayed_frac     | frac    | mean | Share of rows that replayed the anchor's routes.
routes/warnings                 | 1       | sum  | Findings about the record of routes that did not stop the step.
routes/origin_frac              | frac    | mean | Share of token rows whose engine says which model and tokens their routes belong to.
routes/valid_frac               | frac    | mean | Share of token rows with recorded routes.
routes/dead_experts             | experts | max  | Experts over all layers that received no token.
# ---- rollout: generation
rollout/episodes                | episodes| sum  | Episodes finished.
rollout/turns                   | turns   | mean | Agent turns of an episode.
rollout/tokens                  | tokens  | mean | Tokens of an episode's streams.
rollout/sampled_tokens          | tokens  | mean | Sampled tokens of an episode.
rollout/s                       | s       | sum  | Wall seconds of the rollout phase.
rollout/generate_s              | s       | sum  | Seconds the engine was busy.
rollout/decode_tokens_per_s     | tokens/s| mean | Sampled tokens per second of engine time.
rollout/prefill_tokens_per_s    | tokens/s| mean | Prompt tokens computed per second of engine time.
rollout/session_wait_s          | s       | sum  | Seconds that sessions waited for their tokens, over all that ran at once.
rollout/batch_rows              | rows    | mean | Decode rows of an engine step.
rollout/reused_tokens           | tokens  | sum  | Prompt tokens served from the shared cache instead of being computed.
rollout/truncated_frac          | frac    | mean | Share of episodes ended by a limit instead of the agent.
rollout/truncated/{limit}       | episodes| sum  | Episodes ended by one limit (max_turns, max_tokens, wall).
rollout/swaps                   | swaps   | sum  | Weight swaps taken while streams were running.
rollout/wait_s                  | s       | sum  | Seconds the trainer waited for episodes.
# ---- env: tools, sandboxes, grading
env/s                           | s       | sum  | Wall seconds in tools and grading.
env/tool_calls                  | calls   | sum  | Tool calls.
env/tool/{tool}_calls           | calls   | sum  | Calls of one tool.
env/tool/{tool}_p50_s           | s       | mean | Median seconds of one tool.
env/tool_p50_s                  | s       | mean | Median seconds of a tool call other than test.
env/test_p50_s                  | s       | mean | Median seconds of a test call.
env/grade_p50_s                 | s       | mean | Median seconds of grading one episode.
env/malformed_frac              | frac    | mean | Share of actions that didn't parse.
env/tool_error_frac             | frac    | mean | Share of calls answered with an error.
env/edits                       | edits   | mean | Successful edits of an episode.
env/tests_run                   | calls   | mean | Test calls of an episode.
env/submit_on_red_frac          | frac    | mean | Share of submissions whose last visible test run failed or never ran.
env/first_edit_right_frac       | frac    | mean | Share of episodes whose first edit repairs the bug.
env/killed/{cause}              | runs    | sum  | Test calls that the kernel ended for one cause (timeout, memory, processes).
env/flags/{rule}                | episodes| sum  | Episodes on which one hack rule fired.
# ---- hacks: what graded episodes were flagged for
hacks/rate_frac                 | frac    | mean | Share of the step's graded episodes with a flag of severity hack.
hacks/window_frac               | frac    | last | The same over the last grading.hack_window episodes; above its limit the run stops.
hacks/quarantined               | episodes| sum  | Episodes that left training because of a flag.
hacks/{action}/{rule}           | episodes| sum  | Episodes that one rule dropped, zeroed or penalised.
# ---- eval: held-out figures
eval/success_frac               | frac    | mean | Held-out success, mean over tasks and samples.
eval/success_low_frac           | frac    | last | Lower end of its 95 % interval, clustered by function.
eval/success_high_frac          | frac    | last | Upper end of that interval.
eval/best_of_{n}_frac           | frac    | mean | Share of tasks that at least one of n samples solves.
eval/first_edit_right_frac      | frac    | mean | Share of held-out episodes whose first edit repairs the bug.
eval/tasks                      | tasks   | last | Held-out tasks evaluated.
eval/samples                    | episodes| last | Episodes of each task.
eval/failed                     | episodes| sum  | Held-out episodes lost to machinery after a second try; in no figure.
eval/s                          | s       | sum  | Wall seconds of evaluation.
# ---- cost: the cost book
cost/prompt_tokens              | tokens  | sum  | Tokens fed to the model that it did not sample.
cost/cached_tokens              | tokens  | sum  | Fed tokens whose keys and values were reused.
cost/sampled_tokens             | tokens  | sum  | Tokens the model sampled.
cost/trained_tokens             | tokens  | sum  | Tokens that the trainer computed forward and backward.
cost/generate_cpu_s             | CPU s   | sum  | Processor seconds of generation.
cost/cpu_s                      | CPU s   | sum  | Processor seconds of this process and its children.
cost/sandbox_s                  | s       | sum  | Wall seconds of commands in boxes.
cost/grading_s                  | s       | sum  | Wall seconds of grading.
cost/moved_bytes                | bytes   | sum  | Bytes of weights sent to engines.
cost/wall_s                     | s       | sum  | Wall seconds.
cost/peak_memory_bytes          | bytes   | max  | Largest resident memory of the run, helpers included.
# ---- train: optimizer steps of any phase
train/loss                      | nats    | mean | Mean loss per trained token (supervised phases).
train/grad_norm                 | 1       | mean | Global gradient norm before clipping.
train/learning_rate             | 1       | last | Learning rate of the step.
train/tokens                    | tokens  | sum  | Tokens of the step, padding excluded.
train/tokens_per_s              | tokens/s| mean | Trained tokens per second of training time.
train/s                         | s       | sum  | Wall seconds of training.
train/step_s                    | s       | mean | Wall seconds of a whole step.
train/aux_loss                  | 1       | mean | Load-balancing loss of the router, before its coefficient.
# ---- conservation: every episode leaves exactly once
conservation/dispatched         | episodes| last | Episodes dispatched since the start of RL.
conservation/trained            | episodes| last | Episodes that entered an update.
conservation/dropped            | episodes| last | Episodes left out on purpose, all reasons.
conservation/dropped/{reason}   | episodes| last | Episodes left out for one reason (stale, no_signal, ungraded, ...).
conservation/failed             | episodes| last | Episodes lost to machinery failures, all reasons.
conservation/failed/{reason}    | episodes| last | Episodes lost to one machinery failure.
conservation/in_flight          | episodes| last | Episodes dispatched and not yet accounted for.
"""


def _parse_rows(text: str) -> dict[str, Metric]:
    table: dict[str, Metric] = {}
    for line in text.strip().splitlines():
        if line.startswith("#"):
            continue
        key, unit, reducer, meaning = (cell.strip() for cell in line.split("|", 3))
        if key in table:
            raise ValueError(f"metric {key!r} is in the table twice")
        table[key] = Metric(key, unit, Reducer(reducer), meaning)
    return table


METRICS: dict[str, Metric] = _parse_rows(_ROWS)
"""Every metric by key; keys with a ``{placeholder}`` stand for a family."""

_FAMILIES = [(re.compile(re.sub(r"\\{\w+\\}", "[^/{}]+", re.escape(key))), metric) for key, metric in METRICS.items() if "{" in key]


@functools.lru_cache(maxsize=4096)
def lookup(key: str) -> Metric:
    """Return the table row of a concrete key such as ``"rl/reward"`` or ``"conservation/dropped/stale"``.

    Raises:
        ConfigError: If no row covers ``key``; the message names the nearest key.
    """
    metric = METRICS.get(key)
    if metric is not None and "{" not in key:
        return metric
    for pattern, family in _FAMILIES:
        if pattern.fullmatch(key):
            return family
    close = difflib.get_close_matches(key, METRICS, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else f" Areas: {', '.join(sorted({m.area for m in METRICS.values()}))}."
    raise ConfigError(f"metric {key!r} is not in the table of strop.core.metrics.{hint}")


def validate(metrics: Mapping[str, float]) -> dict[str, float]:
    """Check keys and values and return a plain copy, sorted by key.

    Args:
        metrics: Values by key. Numpy scalars and one-element arrays are accepted, booleans become 0 and 1.

    Returns:
        ``{key: float}``. NaN and infinities pass: they are findings, not faults of the caller.

    Raises:
        ConfigError: Unknown key, or a value that isn't a number.
    """
    checked: dict[str, float] = {}
    for key in sorted(metrics):
        lookup(key)
        try:
            checked[key] = float(metrics[key])
        except (TypeError, ValueError):
            raise ConfigError(f"metric {key!r} has the value {metrics[key]!r}; expected a number") from None
    return checked


def aggregate(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine several metric dicts with each key's own reducer.

    Example: ``[{"rl/reward": 0.2, "rl/trained_tokens": 10}, {"rl/reward": 0.4, "rl/trained_tokens": 5}]`` gives
    ``{"rl/reward": 0.3, "rl/trained_tokens": 15.0}``: a mean and a sum. A key counts only where it is present.

    Raises:
        ConfigError: Unknown key, or a value that isn't a number.
    """
    values: dict[str, list[float]] = {}
    for record in records:
        for key, value in validate(record).items():
            values.setdefault(key, []).append(value)
    return {key: _reduce(lookup(key).reducer, values[key]) for key in sorted(values)}


def _reduce(reducer: Reducer, values: list[float]) -> float:
    if reducer is Reducer.LAST:
        return values[-1]
    if any(math.isnan(value) for value in values):
        return math.nan  # max and min would otherwise depend on the order
    if reducer is Reducer.MAX:
        return max(values)
    if reducer is Reducer.MIN:
        return min(values)
    try:
        total = math.fsum(values)  # independent of the order
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the range
        total = sum(values)
    return total / len(values) if reducer is Reducer.MEAN else total


def reference_markdown() -> str:
    """Return the metrics reference of the documentation, one table per area."""
    lines = ["# Metrics", "", "Generated from `strop.core.metrics` by `strop config reference --metrics`; don't edit.", ""]
    lines += ["`mean`, `sum`, `max`, `min`, `last` say how values of several episodes, processes or steps combine.", ""]
    area = ""
    for metric in METRICS.values():
        if metric.area != area:
            area = metric.area
            lines += [f"## {area}", "", "| key | unit | reducer | meaning |", "|---|---|---|---|"]
        meaning = metric.meaning.replace("|", "\\|")
        lines.append(f"| `{metric.key}` | {metric.unit} | {metric.reducer} | {meaning} |")
    return "\n".join(lines).replace("|\n## ", "|\n\n## ") + "\n"
