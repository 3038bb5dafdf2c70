"""What is rolled out when: the task order of a run, the staleness window, and the conservation law. Pure; no clock, no waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strop.core.errors import ConfigError
from strop.core.random import generator
from strop.core.sample import Sample
from strop.core.task import Task
from strop.rl.pack import trace_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGroup:
    """One task of a step.

    Attributes:
        task: The task.
        system_prompt: Whether its episodes begin with the system turn.
    """

    task: Task
    system_prompt: bool


def plan_groups(tasks: Sequence[Task], *, seed: int, steps: int, groups: int, drop_system_prompt: float) -> list[tuple[PlannedGroup, ...]]:
    """Choose the tasks of every step, without repetition over the whole run: a prompt is trained on once.

    Args:
        tasks: The training split in a fixed order.
        seed: The run's seed.
        steps: Steps of the run.
        groups: Tasks of a step.
        drop_system_prompt: Share of a step's tasks without the system turn, rounded to whole tasks.

    Returns:
        ``groups`` planned groups for each step; a longer run begins with the same steps as a shorter one.

    Raises:
        ConfigError: There are fewer tasks than the run needs.
    """
    if steps * groups > len(tasks):
        raise ConfigError(
            f"rl.steps = {steps} times rl.groups = {groups} needs {steps * groups} training tasks, each used once; there are "
            f"{len(tasks)}. Lower rl.steps to at most {len(tasks) // groups}."
        )
    order = generator("task-order", seed).permutation(len(tasks))
    plan = []
    for step in range(steps):
        chosen = order[step * groups : (step + 1) * groups]
        without = set(generator("system-prompt", seed, step).permutation(groups)[: round(drop_system_prompt * groups)].tolist())
        plan.append(tuple(PlannedGroup(task=tasks[index], system_prompt=at not in without) for at, index in enumerate(chosen)))
    return plan


@dataclass(slots=True)
class Window:
    """Slot-based admission: which steps' episodes may be dispatched.

    A run has one slot per step, filled in order. Slot ``d`` may be dispatched once ``d - version <= max_staleness``, where ``version``
    is the number of finished updates, and slot ``d`` is trained on by update ``d``, that is, by weights of version ``d``.

    Proof of the bound: a token of slot ``d`` is sampled after its dispatch, the engine's version never falls, and at dispatch it was at
    least ``d - max_staleness``; so the token's version is at least that. It is trained on at version ``d``. Its staleness, trained
    version minus sampled version, is therefore at most ``max_staleness``, whatever finishes when. With ``max_staleness = 0`` slot ``d``
    starts when update ``d - 1`` is done: generation and training alternate. With 1, slot ``d + 1`` runs while update ``d`` is computed.

    Attributes:
        steps: Slots of the run.
        max_staleness: The bound.
        next_slot: First slot that wasn't dispatched.
    """

    steps: int
    max_staleness: int
    next_slot: int

    def admit(self, version: int) -> list[int]:
        """Return the slots that may be dispatched now, in order; each is returned once."""
        end = min(self.steps, version + self.max_staleness + 1)
        admitted = list(range(self.next_slot, end))
        self.next_slot = max(self.next_slot, end)
        return admitted


def check_staleness(samples: Iterable[Sample], *, version: int, max_staleness: int) -> None:
    """Assert what ``Window`` guarantees, for every sampled token.

    Raises:
        AssertionError: A token is older than the bound, or from the future; names the episode. This is a bug of strop.
    """
    for sample in samples:
        versions = trace_versions(sample.trace)[sample.trace.loss_mask]
        if not len(versions):
            continue
        age = version - np.array([versions.max(), versions.min()])
        assert age[0] >= 0, f"episode {sample.key} has a token of version {versions.max()}, newer than the trainer's {version}"
        assert age[1] <= max_staleness, f"episode {sample.key} has a token {age[1]} versions old; rl.max_staleness is {max_staleness}"


@dataclass(slots=True)
class Conservation:
    """The law that every episode leaves exactly once: dispatched = trained + dropped[reason] + failed[reason] + in flight.

    Attributes:
        dispatched: Episodes started since the beginning of RL.
        trained: Episodes that entered an update.
        dropped: Left out on purpose, by reason.
        failed: Lost to machinery, by the class of the error.
        in_flight: Dispatched and not yet accounted for, counted on their own.
    """

    dispatched: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0

    def dispatch(self, count: int) -> None:
        """Count episodes as started."""
        self.dispatched += count
        self.in_flight += count

    def settle(self, count: int, *, trained: int, dropped: Mapping[str, int], failed: Mapping[str, int]) -> None:
        """Account for ``count`` finished episodes; the parts are counted by whoever made them, so that the law can be violated."""
        self.in_flight -= count
        self.trained += trained
        self.dropped.update(dropped)
        self.failed.update(failed)

    def check(self, *, finished: bool = False) -> None:
        """Assert the law, and at the end of a run that nothing is in flight.

        Raises:
            AssertionError: An episode was lost or counted twice. This is a bug of strop.
        """
        total = self.trained + self.dropped.total() + self.failed.total() + self.in_flight
        assert self.dispatched == total, f"conservation violated: {self.dispatched} dispatched, {total} accounted for: {self.facts()}"
        assert not finished or self.in_flight == 0, f"the run ended with {self.in_flight} episodes in flight: {self.facts()}"

    def metrics(self) -> dict[str, float]:
        """Return the ``conservation/*`` metrics."""
        values = {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "dropped": self.dropped.total(),
            "failed": self.failed.total(),
            "in_flight": self.in_flight,
        }
        values |= {f"dropped/{reason}": count for reason, count in self.dropped.items()}
        values |= {f"failed/{reason}": count for reason, count in self.failed.items()}
        return {f"conservation/{name}": float(value) for name, value in values.items()}

    def facts(self) -> dict[str, object]:
        """Return what a commit keeps: only settled episodes, since whatever is in flight is dispatched again after a crash."""
        settled = self.dispatched - self.in_flight
        return {"dispatched": settled, "trained": self.trained, "dropped": dict(self.dropped), "failed": dict(self.failed)}

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Conservation:
        """Inverse of ``facts``."""
        f: dict[str, object] = dict(facts)
        return cls(
            dispatched=int(str(f["dispatched"])),
            trained=int(str(f["trained"])),
            dropped=Counter(f["dropped"]),  # type: ignore[arg-type]
            failed=Counter(f["failed"]),  # type: ignore[arg-type]
        )
