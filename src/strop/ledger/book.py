"""What a run used: tokens, processor and sandbox seconds, bytes, memory.

Costs of an episode travel with it (``Episode.costs``) and are written in its transaction. Everything else, such as training,
is measured by a ``Meter`` and added under a phase and step. Both obey the commit points of the store: a step that is run again
after a crash is counted once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from strop.core import metrics as metric_table
from strop.core.metrics import Reducer


class CostStore(Protocol):
    """What the cost book needs of a store.

    Attributes:
        before_commit: Called right before each commit point; what they add belongs to it.
    """

    before_commit: list[Callable[[], None]]

    def add_costs(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Add ``cost/*`` values to a phase and step."""
        ...

    def costs(self) -> list[tuple[str, int, str, float]]:
        """Return ``(phase, step, key, value)``, combined with each key's reducer."""
        ...


class Meter:
    """Wall and processor seconds since it was made, finished children included.

    Example: ``meter = Meter(); train(); book.add("rl", 3, meter.read() | {"cost/trained_tokens": 9000})``
    """

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = _cpu_seconds()

    def read(self) -> dict[str, float]:
        """Return ``cost/wall_s``, ``cost/cpu_s`` and ``cost/peak_memory_bytes``."""
        return {
            "cost/wall_s": time.perf_counter() - self._wall,
            "cost/cpu_s": _cpu_seconds() - self._cpu,
            "cost/peak_memory_bytes": peak_memory_bytes(),
        }

    def lap(self) -> dict[str, float]:
        """Return ``read()`` and go on from there, so that laps add up to the whole."""
        values = self.read()
        self._wall += values["cost/wall_s"]
        self._cpu += values["cost/cpu_s"]
        return values


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_memory_bytes() -> float:
    """Return the largest resident size of this process so far plus that of its largest finished child."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return float(own + child) * 1024


class CostBook:
    """Adds costs and totals them.

    Args:
        store: Where the entries live.
    """

    def __init__(self, store: CostStore) -> None:
        self._store = store

    def add(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Append entries.

        Args:
            phase: For example ``"rl"``.
            step: Step of the phase.
            values: ``cost/*`` keys of the metrics table.

        Raises:
            ConfigError: Unknown key.
        """
        self._store.add_costs(phase, step, values)

    @contextlib.contextmanager
    def measure(self, phase: str, step: int = 0) -> Iterator[dict[str, float]]:
        """Measure a block; the block may put further ``cost/*`` entries into the dict, which are added when it ends well.

        Seconds are added at every commit point inside the block, and the rest when it ends well: a process that is killed in the
        block loses those of its unfinished step, which is done and counted again, and no others.
        """
        meter, extra = Meter(), dict[str, float]()

        def settle() -> None:
            self.add(phase, step, meter.lap())

        self._store.before_commit.append(settle)
        try:
            yield extra
        finally:
            self._store.before_commit.remove(settle)
        self.add(phase, step, meter.lap() | extra)

    def by_phase(self) -> dict[str, dict[str, float]]:
        """Return the totals of every phase: ``{"rl": {"cost/sampled_tokens": 81920.0, ...}, ...}``, phases in order of appearance."""
        return self._combine(lambda phase, step: phase)

    def by_step(self, phase: str) -> dict[int, dict[str, float]]:
        """Return the totals of every step of a phase."""
        entries = [entry for entry in self._store.costs() if entry[0] == phase]
        return _combine(entries, lambda _, step: step)

    def totals(self) -> dict[str, float]:
        """Return the totals of the run."""
        return self._combine(lambda phase, step: "").get("", {})

    def table(self) -> list[dict[str, Any]]:
        """Return rows for people: one per key with ``key``, ``unit``, ``meaning``, ``total`` and a value per phase."""
        phases, totals = self.by_phase(), self.totals()
        rows = []
        for key in metric_table.METRICS:
            if key in totals:
                metric = metric_table.lookup(key)
                values = {phase: costs[key] for phase, costs in phases.items() if key in costs}
                rows.append({"key": key, "unit": metric.unit, "meaning": metric.meaning, "total": totals[key], **values})
        return rows

    def _combine(self, group: Any) -> dict[Any, dict[str, float]]:
        return _combine(self._store.costs(), group)


def _combine(entries: list[tuple[str, int, str, float]], group: Any) -> dict[Any, dict[str, float]]:
    combined: dict[Any, dict[str, float]] = {}
    for phase, step, key, value in entries:
        values = combined.setdefault(group(phase, step), {})
        if key not in values:
            values[key] = value
        elif metric_table.lookup(key).reducer is Reducer.MAX:
            values[key] = max(values[key], value)
        else:
            values[key] += value
    return combined
