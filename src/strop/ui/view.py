"""The live view of a run: a panel in a terminal, plain lines anywhere else.

The pipeline talks to a ``View`` and never prints. Figures are metric keys or short names; the view knows how to write them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from strop.core import metrics as metric_table
from strop.core.errors import ConfigError


class View(Protocol):
    """What a pipeline may tell the person who is watching."""

    def stage(self, name: str, total: int = 0) -> None:
        """A stage begins; ``total`` units of progress will follow (0: unknown)."""
        ...

    def progress(self, done: int, **figures: float | str) -> None:
        """``done`` units of the stage are finished; ``figures`` are small facts such as ``reward=0.31``."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A step's metrics."""
        ...

    def table(self, rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
        """A table; columns are the keys of the first row."""
        ...

    def message(self, text: str) -> None:
        """One line worth reading."""
        ...

    def close(self) -> None:
        """The run is over or stopped. Idempotent."""
        ...


HEADLINES: tuple[tuple[str, str], ...] = (
    ("reward", "rl/reward"),
    ("success", "rl/success_frac"),
    ("first edit right", "env/first_edit_right_frac"),
    ("groups with signal", "rl/groups_signal_frac"),
    ("max |dlogp|", "numerics/logprob_diff_max_nats"),
    ("route mismatch", "numerics/route_mismatch_frac"),
    ("loss", "rl/loss"),
    ("train loss", "train/loss"),
    ("grad norm", "rl/grad_norm"),
    ("entropy", "rl/entropy_nats"),
    ("decode", "rollout/decode_tokens_per_s"),
    ("train", "train/tokens_per_s"),
    ("refused calls", "env/tool_error_frac"),
    ("step", "train/step_s"),
)
"""What the live view shows of a step's metrics, in this order, where present."""

_CONSERVATION = ("dispatched", "trained", "dropped", "failed", "in_flight")


def format_value(key: str, value: float | str) -> str:
    """Return a value with its unit: ``("rl/success_frac", 0.314)`` gives ``"31.4 %"``, ``("cost/cpu_s", 75)`` gives ``"75 CPU s"``.

    Args:
        key: A metric key; anything else is written as a plain number.
        value: The value.
    """
    if isinstance(value, str):
        return value
    try:
        unit = metric_table.lookup(key).unit
    except ConfigError:
        unit = "frac" if key.endswith("_frac") else "1"
    if unit == "frac":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        return format_bytes(value)
    number = format_number(value)
    return number if unit in ("1", "bool") else f"{number} {unit}"


def format_number(value: float) -> str:
    """Return three to four significant digits, thousands grouped: ``12,345``, ``0.0313``, ``1.2e-07``, ``0``."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Return bytes with a binary unit: ``"4.2 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Return ``"7.3 s"``, ``"4:05 min"`` or ``"2:04 h"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def conservation_line(values: Mapping[str, float]) -> str:
    """Return ``"384 dispatched = 352 trained + 16 dropped + 0 failed + 16 in flight"``, or ``""`` without those metrics.

    A sum that doesn't hold is written with ``!=``.
    """
    counts = [values.get(f"conservation/{name}") for name in _CONSERVATION]
    if counts[0] is None:
        return ""
    numbers = [int(count or 0) for count in counts]
    sign = "=" if numbers[0] == sum(numbers[1:]) else "!="
    parts = [f"{number:,} {name.replace('_', ' ')}" for number, name in zip(numbers[1:], _CONSERVATION[1:], strict=True)]
    return f"{numbers[0]:,} dispatched {sign} {' + '.join(parts)}"


class Clock:
    """Progress of one stage: rate and time left, from the pace so far."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until its end, or ``None`` while unknown."""
        if not self.done or not self.total:
            return None
        return self.elapsed_s / self.done * max(self.total - self.done, 0)

    def line(self) -> str:
        """Return ``"12/24, 1:10 min, about 1:12 min left"``."""
        parts = [f"{self.done}/{self.total}" if self.total else str(self.done), format_seconds(self.elapsed_s)]
        if self.left_s:
            parts.append(f"about {format_seconds(self.left_s)} left")
        return ", ".join(parts)


class PlainView:
    """Plain lines for logs and pipes; progress at most every ``every_s`` seconds."""

    def __init__(self, stream: TextIO | None = None, every_s: float = 10.0) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._every_s = every_s
        self._clock = Clock("", 0)
        self._last = 0.0

    def stage(self, name: str, total: int = 0) -> None:
        """Print the stage's name and begin its clock."""
        self._clock = Clock(name, total)
        self._last = time.monotonic()
        self._print(f"== {name}" + (f" ({total})" if total else ""))

    def progress(self, done: int, **figures: float | str) -> None:
        """Print a line if the last one is old enough, or the stage is done."""
        self._clock.done = done
        now = time.monotonic()
        is_last = bool(self._clock.total) and done >= self._clock.total
        if not is_last and now - self._last < self._every_s:
            return
        self._last = now
        facts = [f"{key.replace('_', ' ')} {format_value(key, value)}" for key, value in figures.items()]
        self._print(f"{self._clock.name}: " + ", ".join([self._clock.line(), *facts]))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step's headlines, and the conservation of episodes."""
        shown = [f"{label} {format_value(key, values[key])}" for label, key in HEADLINES if key in values]
        self._print(f"{self._clock.name} step {step}: " + ", ".join(shown))
        if line := conservation_line(values):
            self._print(f"  {line}")

    def table(self, rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
        """Print an aligned table."""
        if title:
            self._print(title)
        for line in plain_table(rows):
            self._print(line)

    def message(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def close(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def plain_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return aligned lines: a header, a rule, one line a row. Numbers stand to the right."""
    if not rows:
        return []
    columns = list(rows[0])
    cells = [[cell_text(column, row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[index]) for row in cells)) for index, column in enumerate(columns)]
    is_text = [isinstance(rows[0].get(column), str) for column in columns]

    def line(values: Sequence[str]) -> str:
        parts = [v.ljust(w) if text else v.rjust(w) for v, w, text in zip(values, widths, is_text, strict=True)]
        return "  ".join(parts).rstrip()

    return [line(columns), "  ".join("-" * width for width in widths), *(line(row) for row in cells)]


def cell_text(column: str, value: Any) -> str:
    """Return a table cell: ``None`` is empty, numbers follow the column's unit."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_value(column, value) if isinstance(value, (int, float)) else str(value)


def make_view(*, plain: bool = False) -> View:
    """Return the live view in a terminal, plain lines otherwise."""
    if plain or not sys.stdout.isatty():
        return PlainView()
    from strop.ui.live import LiveView

    return LiveView()
