"""The promotion gate: a candidate replaces the incumbent only on evidence from the same pinned tasks.

The comparison is paired by task and its interval resamples whole clusters of tasks (``provenance["cluster"]``). The gate refuses a worse
model, a different task set or setting, and a gain that the evidence can't tell from noise. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strop.core.config import PromotionConfig
from strop.core.errors import CheckpointError, StropError
from strop.numerics.stats import Interval, mean_interval, paired_interval

MIN_CLUSTERS = 10
MAX_MISSING_FRAC = 0.05
_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """What one model did on one task.

    Attributes:
        task_id: The task.
        cluster: Tasks of one cluster are not independent.
        successes: One value in ``[0, 1]`` for each sample that was scored.
        missing: Samples without a verdict (``Ungraded`` or ``Failed``); they are evidence of nothing.
    """

    task_id: str
    cluster: str
    successes: tuple[float, ...]
    missing: int = 0

    def __post_init__(self) -> None:
        wrong = [value for value in self.successes if not 0 <= value <= 1]
        if wrong:
            raise ValueError(f"TaskResult.successes of {self.task_id!r} must lie in [0, 1], got {wrong[0]}")
        if self.missing < 0 or not self.task_id:
            raise ValueError(f"TaskResult needs a task_id and missing >= 0, got {self.task_id!r}, {self.missing}")

    @property
    def mean(self) -> float:
        """Success averaged over the scored samples."""
        return math.fsum(self.successes) / len(self.successes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One model on a pinned task set.

    Example: ``Evaluation(name="step-24", tasks=(TaskResult(task_id="a", cluster="f", successes=(1.0, 0.0)),),
    settings={"temperature": "1.0", "split": "heldout"})``

    Attributes:
        name: Which model, for messages.
        tasks: In any order; ids are unique.
        settings: Whatever must be equal for a fair comparison (temperature, split, system prompt, limits), as text.
    """

    name: str
    tasks: tuple[TaskResult, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for task in self.tasks:
            if task.task_id in seen:
                raise ValueError(f"Evaluation {self.name!r} holds the task {task.task_id!r} twice")
            seen.add(task.task_id)

    def interval(self, *, confidence: float = 0.95, seed: int = 0) -> Interval:
        """Mean success over the tasks that were scored, with its interval.

        Raises:
            ValueError: No task was scored.
        """
        scored = [task for task in self.tasks if task.successes]
        return mean_interval([task.mean for task in scored], [task.cluster for task in scored], confidence=confidence, seed=seed)

    def to_json(self) -> str:
        """Inverse of ``from_json``."""
        return (
            json.dumps({"name": self.name, "settings": dict(self.settings), "tasks": [asdict(task) for task in self.tasks]}, indent=1)
            + "\n"
        )

    @classmethod
    def from_json(cls, path: str | Path) -> Evaluation:
        """Read a file that ``to_json`` wrote.

        Raises:
            CheckpointError: Missing or damaged file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            tasks = tuple(TaskResult(**{**task, "successes": tuple(task["successes"])}) for task in data["tasks"])
            return cls(name=data["name"], tasks=tasks, settings=data["settings"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"evaluation {str(path)!r} can't be read: {type(error).__name__}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Verdict of the gate.

    Attributes:
        promote: Whether the candidate may replace the incumbent.
        gain: Mean success of the candidate minus the incumbent's on the same tasks; NaN if they can't be compared.
        interval: The gain with its interval, or ``None`` if they can't be compared.
        reason: One sentence with the figures.
    """

    promote: bool
    gain: float
    interval: Interval | None
    reason: str


def decide(incumbent: Evaluation, candidate: Evaluation, config: PromotionConfig, *, seed: int = 0) -> Decision:
    """Compare two evaluations of the same tasks.

    Promotes only if the lower bound of the paired gain is above ``config.min_gain``. A negative ``min_gain`` is a non-inferiority margin.

    Args:
        incumbent: The model that serves now.
        candidate: The model that wants to.
        config: Smallest gain and confidence.
        seed: Fixes the bootstrap.

    Returns:
        The decision; ``promote`` is false for every kind of doubt, and ``reason`` says which.
    """
    problem = _difference(incumbent, candidate) or _too_little(incumbent) or _too_little(candidate)
    if problem:
        return Decision(promote=False, gain=math.nan, interval=None, reason=problem)
    before = {task.task_id: task for task in incumbent.tasks}
    after = sorted(candidate.tasks, key=lambda task: task.task_id)
    clusters = [task.cluster for task in after]
    gain = paired_interval(
        [before[task.task_id].mean for task in after], [task.mean for task in after], clusters, confidence=config.confidence, seed=seed
    )
    figures = f"gain {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] on {len(after)} tasks in {gain.clusters} clusters"
    if gain.low > config.min_gain:
        return Decision(promote=True, gain=gain.mean, interval=gain, reason=f"{candidate.name} is better than {incumbent.name}: {figures}")
    if gain.high < 0:
        reason = f"{candidate.name} is worse than {incumbent.name}: {figures}"
    elif gain.mean <= config.min_gain:
        reason = f"{candidate.name} does not gain more than {config.min_gain:g} over {incumbent.name}: {figures}"
    else:
        factor = ((gain.mean - gain.low) / (gain.mean - config.min_gain)) ** 2
        needed = math.ceil(factor * gain.clusters)
        reason = f"not enough evidence: {figures}; a gain of this size needs about {needed} clusters to stand above {config.min_gain:g}"
    return Decision(promote=False, gain=gain.mean, interval=gain, reason=reason)


def _difference(incumbent: Evaluation, candidate: Evaluation) -> str:
    """Say what makes the two incomparable, or return an empty text."""
    for key in sorted({*incumbent.settings, *candidate.settings}):
        one, two = incumbent.settings.get(key), candidate.settings.get(key)
        if one != two:
            return f"the evaluations differ in the setting {key!r}: {incumbent.name} has {one!r}, {candidate.name} has {two!r}"
    first = {task.task_id: task for task in incumbent.tasks}
    second = {task.task_id: task for task in candidate.tasks}
    parts = []
    for name, ids in ((incumbent.name, first.keys() - second.keys()), (candidate.name, second.keys() - first.keys())):
        if ids:
            parts.append(f"only {name} has {_some(ids)}")
    if parts:
        return f"the task sets differ: {'; '.join(parts)}"
    moved = [task_id for task_id in first if first[task_id].cluster != second[task_id].cluster]
    if moved:
        return f"the task sets differ: the cluster of {_some(moved)} is not the same on both sides"
    return ""


def _too_little(evaluation: Evaluation) -> str:
    """Say why an evaluation alone is too thin to decide on, or return an empty text."""
    if not evaluation.tasks:
        return f"not enough evidence: {evaluation.name} was evaluated on no task"
    unscored = [task.task_id for task in evaluation.tasks if not task.successes]
    if unscored:
        return f"not enough evidence: {evaluation.name} has no scored sample of {_some(unscored)}"
    missing = sum(task.missing for task in evaluation.tasks)
    total = missing + sum(len(task.successes) for task in evaluation.tasks)
    if missing > MAX_MISSING_FRAC * total:
        return f"not enough evidence: {missing} of {total} samples of {evaluation.name} have no verdict, at most {MAX_MISSING_FRAC:.0%} may"
    clusters = len({task.cluster for task in evaluation.tasks})
    if clusters < MIN_CLUSTERS:
        return f"not enough evidence: {clusters} independent clusters of tasks, at least {MIN_CLUSTERS} are needed"
    return ""


def _some(ids: Iterable[str]) -> str:
    names = sorted(ids)
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(name) for name in names[:_NAMED]) + rest


def results_by_task(rows: Sequence[tuple[str, str, float | None]]) -> tuple[TaskResult, ...]:
    """Collect episode rows ``(task_id, cluster, success or None)`` into one result per task, sorted by id.

    Raises:
        StropError: A task appears with two clusters.
    """
    clusters: dict[str, str] = {}
    values: dict[str, list[float]] = {}
    missing: dict[str, int] = {}
    for task_id, cluster, success in rows:
        if clusters.setdefault(task_id, cluster) != cluster:
            raise StropError(f"task {task_id!r} appears with the clusters {clusters[task_id]!r} and {cluster!r}")
        values.setdefault(task_id, [])
        missing.setdefault(task_id, 0)
        if success is None:
            missing[task_id] += 1
        else:
            values[task_id].append(float(success))
    return tuple(TaskResult(task_id=t, cluster=clusters[t], successes=tuple(values[t]), missing=missing[t]) for t in sorted(clusters))
