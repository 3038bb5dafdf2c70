"""The figure of ``routes_tradeoff.py``: small panels of one figure each, by depth and precision, as one SVG that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from strop.numerics.stats import Interval
from strop.ui.svg import Frame, nice_ticks
from strop.ui.view import format_number

COLUMNS = (
    ("k3", "mismatch k3, nats", True),
    ("p99", "mismatch p99, nats", True),
    ("suppressed", "suppressed routes, %", False),
    ("tax", "exploration tax, nats", True),
    ("reward", "final reward", False),
)
"""Key, title, and whether the axis is logarithmic."""

COLORS = {
    "off": "#4d4d4d",
    "r2": "#0072b2",
    "r3": "#d55e00",
    "fragile-only": "#009e73",
    "plausible": "#cc79a7",
    "dropout": "#e69f00",
}
"""By mode; the palette of Okabe and Ito, which colour-blind readers can tell apart."""

WIDTH, HEIGHT, LEFT, TOP = 250, 150, 76, 62
FLOOR = 1e-9
"""Smaller values are drawn at the foot of a logarithmic axis."""

Table = Mapping[tuple[int, str, int, str], Mapping[str, Interval]]


def figure(table: Table) -> str:
    """Return the SVG: a row of panels for every depth and precision, a column for every figure."""
    rows = sorted({place[:2] for place in table}, key=lambda row: (row[0], ("fp32", "bf16", "int8").index(row[1])))
    modes = [mode for mode in COLORS if any(place[3] == mode for place in table)]
    updates = sorted({place[2] for place in table})
    width, height = LEFT + WIDTH * len(COLUMNS) + 10, TOP + HEIGHT * len(rows) + 30
    parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *_legend(modes)]
    for column, (_, title, _) in enumerate(COLUMNS):
        parts.append(_text(LEFT + WIDTH * column + WIDTH / 2 + 18, TOP - 8, title, "middle", bold=True))
    for index, (layers, precision) in enumerate(rows):
        y = TOP + HEIGHT * index
        parts.append(_text(8, y + HEIGHT / 2 - 8, f"{layers} layers", "start", bold=True))
        parts.append(_text(8, y + HEIGHT / 2 + 8, precision, "start"))
        for column, (key, _, is_log) in enumerate(COLUMNS):
            chosen = {
                (place[3], place[2]): values[key] for place, values in table.items() if place[:2] == (layers, precision) and key in values
            }
            panel = _panel(chosen, modes, updates, is_log=is_log, scale=100.0 if key == "suppressed" else 1.0)
            parts.append(f'<g transform="translate({LEFT + WIDTH * column} {y})">{panel}</g>')
    parts.append(_text(LEFT + WIDTH * len(COLUMNS) / 2, height - 8, "optimizer steps on one rollout", "middle"))
    label = "What router replay buys and costs, by mode, updates per rollout and precision"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>\n'


def _panel(values: Mapping[tuple[str, int], Interval], modes: Sequence[str], updates: Sequence[int], *, is_log: bool, scale: float) -> str:
    """One set of axes; modes stand side by side at each number of updates, so that their intervals can be told apart."""

    def place(value: float) -> float:
        return math.log10(max(value, FLOOR)) if is_log else scale * value

    edges = [edge for interval in values.values() for edge in _edges(interval) if not is_log or edge > FLOOR]
    if not edges:
        frame = Frame(WIDTH, HEIGHT, (-0.5, len(updates) - 0.5), (0.0, 1.0), left=46, right=10, top=8, bottom=24)
        middle = (frame.left + WIDTH - frame.right) / 2
        return "".join([*_axes(frame, [], updates, is_log=is_log), _text(middle, HEIGHT / 2, "0 everywhere" if values else "", "middle")])
    low, high = place(min(edges)), place(max(edges))
    if is_log:
        low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
        ticks = [float(tick) for tick in range(low, high + 1, max(1, (high - low) // 4))]
    else:
        ticks = nice_ticks(min(low, 0.0) if low < 0.2 * high else low, high if high > low else low + 1, 4)
        low, high = ticks[0], ticks[-1]
    frame = Frame(WIDTH, HEIGHT, (-0.5, len(updates) - 0.5), (low, high), left=46, right=10, top=8, bottom=24)
    parts = _axes(frame, ticks, updates, is_log=is_log)
    for number, mode in enumerate(modes):
        shift = 0.11 * (number - (len(modes) - 1) / 2)
        dots = []
        for index, count in enumerate(updates):
            if (interval := values.get((mode, count))) is None:
                continue
            x, y = frame.x(index + shift), frame.y(min(max(place(interval.mean), low), high))
            bottom, top = (frame.y(min(max(place(edge), low), high)) for edge in _edges(interval))
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{top:.1f}" stroke="{COLORS[mode]}" stroke-opacity=".5"/>')
            dots.append((x, y))
        if len(dots) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[mode]}" stroke-opacity=".45"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLORS[mode]}"/>' for x, y in dots]
    return "".join(parts)


def _edges(interval: Interval) -> tuple[float, float]:
    """Ends of an interval; one seed has none but its value."""
    return (interval.low, interval.high) if math.isfinite(interval.low) else (interval.mean, interval.mean)


def _axes(frame: Frame, ticks: Sequence[float], updates: Sequence[int], *, is_log: bool) -> list[str]:
    right, base = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(_text(frame.left - 5, y + 3.5, f"1e{int(tick)}" if is_log else format_number(tick), "end"))
    parts.append(f'<line x1="{frame.left}" x2="{right}" y1="{base}" y2="{base}" stroke="#808080"/>')
    return parts + [_text(frame.x(index), base + 14, str(count), "middle") for index, count in enumerate(updates)]


def _legend(modes: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT + 46)
    for mode in modes:
        parts.append(f'<circle cx="{x:.1f}" cy="20" r="4" fill="{COLORS[mode]}"/>')
        parts.append(_text(x + 9, 24, mode, "start"))
        x += 30 + 7.5 * len(mode)
    return parts


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-family="sans-serif" font-size="11" fill="#333333"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{html.escape(text)}</text>'
