"""The terminal panel: stage, progress, figures of the last step, a curve of the reward, conservation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from strop.ui.view import HEADLINES, Clock, cell_text, conservation_line, format_value

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVES = (("success", "rl/success_frac"), ("reward", "rl/reward"), ("train loss", "train/loss"))


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Return the last ``width`` values as a row of block characters, scaled to their own range."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(int((value - low) / span * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in shown)


class LiveView:
    """A ``View`` that redraws one panel twice a second; messages and tables scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._clock = Clock("starting", 0)
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._figures: dict[str, float | str] = {}
        self._history: dict[str, list[float]] = {}
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=2, transient=True)
        self._live.start()

    def stage(self, name: str, total: int = 0) -> None:
        """Begin a stage: a line for the one that ends, an empty panel."""
        if self._clock.done:
            self.console.print(f"[green]done[/green] {self._clock.name}: {self._clock.line()}", highlight=False)
        self._clock = Clock(name, total)
        self._step, self._values, self._figures, self._history = None, {}, {}, {}

    def progress(self, done: int, **figures: float | str) -> None:
        """Move the bar; figures stay until they are given again."""
        self._clock.done = done
        self._figures.update(figures)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step's headlines and lengthen the curves."""
        self._step = step
        self._values.update(values)
        for _, key in _CURVES:
            if key in values:
                self._history.setdefault(key, []).append(float(values[key]))

    def table(self, rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
        """Print a table above the panel; nothing for no rows."""
        if rows:
            self.console.print(rich_table(rows, title))

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Take the panel away. Idempotent."""
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the panel as it is now."""
        parts: list[RenderableType] = []
        progress = Table.grid(padding=(0, 2))
        bar = [ProgressBar(total=self._clock.total, completed=self._clock.done, width=40)] if self._clock.total else []
        progress.add_row(*bar, Text(self._clock.line()))
        parts.append(progress)
        shown = [(label, format_value(key, self._values[key])) for label, key in HEADLINES if key in self._values]
        shown += [(key.replace("_", " "), format_value(key, value)) for key, value in self._figures.items()]
        if shown:
            parts.append(_grid(shown))
        for label, key in _CURVES:
            if len(curve := self._history.get(key, [])) > 1:
                parts.append(Text(f"{label:<10} {sparkline(curve)} {format_value(key, curve[0])} to {format_value(key, curve[-1])}"))
        if line := conservation_line(self._values):
            parts.append(Text(f"episodes   {line}", style="red bold" if "!=" in line else "dim"))
        title = self._clock.name if self._step is None else f"{self._clock.name} - step {self._step}"
        return Panel(Group(*parts), title=f"strop: {title}", title_align="left", border_style="cyan")


def _grid(pairs: Sequence[tuple[str, str]], columns: int = 3) -> Table:
    grid = Table.grid(padding=(0, 3))
    for index in range(0, len(pairs), columns):
        cells = [f"[dim]{label}[/dim] {value}" for label, value in pairs[index : index + columns]]
        grid.add_row(*cells)
    return grid


def rich_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> Table:
    """Return rows as a terminal table; columns are the keys of the first row, numbers stand to the right."""
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column, value in rows[0].items():
        table.add_column(column, justify="left" if isinstance(value, str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell_text(column, row.get(column))) for column in rows[0]))
    return table
