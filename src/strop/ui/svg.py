"""Small charts as inline SVG. Colours come from CSS variables of the page, so that they follow its light or dark theme."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.ui.view import format_number

_FILE_STYLE = (
    ".label{fill:#646b74;font-size:11.5px}.title{fill:#1d2126;font-size:15px}.grid{stroke:#dfe2e6}.axis{stroke:#646b74}"
    ".reference{stroke:#646b74;stroke-dasharray:2 4}.leader{stroke:#646b74;stroke-width:.8}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        label: Its name.
        points: ``(x, y)`` in order; NaN breaks the line.
        color: CSS colour.
        dashed: Draw it dashed.
        bars: ``(x, low, high)`` intervals.
        dots: Mark every point.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str = "var(--c1)"
    dashed: bool = False
    bars: Sequence[tuple[float, float, float]] = field(default_factory=tuple)
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Plot area and scales of a chart: data ranges and pixels."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: int = 54
    right: int = 20
    top: int = 28
    bottom: int = 40

    def x(self, value: float) -> float:
        """Pixels from the left edge to a data value."""
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixels from the top edge to a data value."""
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    width: int = 860,
    height: int = 320,
    percent: bool = False,
    lines: Sequence[tuple[str, float]] = (),
    zero: bool = True,
) -> str:
    """Return a line chart.

    Args:
        series: The lines.
        x_label: Name and unit of x.
        y_label: Name and unit of y.
        width, height: Size in CSS pixels; it scales down to the page.
        percent: Write y as a percentage.
        lines: Horizontal reference lines with their labels, drawn dashed and labelled at the right.
        zero: Let y begin at 0.
    """
    xs = [x for item in series for x, _ in item.points]
    ys = [y for item in series for _, y in item.points if math.isfinite(y)]
    ys += [value for _, value in lines] + [edge for item in series for _, low, high in item.bars for edge in (low, high)]
    if not xs or not ys:
        return ""
    low, high = (min(0.0, min(ys)) if zero else min(ys)), max(ys)
    ticks = nice_ticks(low, high if high > low else low + 1, 5 if height > 250 else 3)
    frame = Frame(width, height, (min(xs), max(xs)), (min(ticks[0], low), max(ticks[-1], high)), right=190 if lines else 20)
    parts = _axes(frame, ticks, x_label, y_label, percent)
    parts += _reference_lines(frame, lines, percent)
    for item in series:
        parts += _series(frame, item)
    return _svg(width, height, parts, f"{y_label} by {x_label}")


def _axes(frame: Frame, y_ticks: Sequence[float], x_label: str, y_label: str, percent: bool) -> list[str]:
    right, base = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(frame.left - 8, y + 4, f"{100 * tick:.3g} %" if percent else format_number(tick), "end"))
    for tick in nice_ticks(*frame.x_range, 8 if frame.width > 500 else 4, whole=True):
        if frame.x_range[0] <= tick <= frame.x_range[1]:
            parts.append(_text(frame.x(tick), base + 17, format_number(tick), "middle"))
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{base}" y2="{base}"/>')
    parts.append(_text((frame.left + right) / 2, frame.height - 4, x_label, "middle"))
    parts.append(_text(0, 12, y_label, "start"))
    return parts


def _reference_lines(frame: Frame, lines: Sequence[tuple[str, float]], percent: bool) -> list[str]:
    """Dashed lines; labels that would overlap move apart."""
    right = frame.width - frame.right
    parts, last = [], -math.inf
    for label, value in sorted(lines, key=lambda line: -line[1]):
        y = frame.y(value)
        at = max(y, last + 14)
        last = at
        number = f"{100 * value:.1f} %" if percent else format_number(value)
        parts.append(f'<line class="reference" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<line class="leader" x1="{right}" x2="{right + 10}" y1="{y:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(right + 14, at + 4, f"{label} {number}", "start"))
    return parts


def _series(frame: Frame, item: Series) -> list[str]:
    style = f'stroke="{item.color}"' + (' stroke-dasharray="5 4"' if item.dashed else "")
    parts = []
    for x, low, high in item.bars:
        parts.append(
            f'<line x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}" {style} opacity=".55"/>'
        )
    piece: list[str] = []
    for x, y in [*item.points, (math.nan, math.nan)]:
        if math.isfinite(y):
            piece.append(f"{frame.x(x):.1f},{frame.y(y):.1f}")
            continue
        if len(piece) > 1:
            parts.append(f'<polyline class="line" points="{" ".join(piece)}" {style}/>')
        piece = []
    if item.dots or len(item.points) == 1:
        for x, y in item.points:
            if math.isfinite(y):
                parts.append(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" fill="{item.color}"/>')
    return parts


def legend(series: Sequence[Series]) -> str:
    """Return an HTML legend of a chart."""
    items = []
    for item in series:
        kind = "dashed" if item.dashed else "solid"
        items.append(f'<span class="key"><i style="border-top:2.5px {kind} {item.color}"></i>{html.escape(item.label)}</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def standalone(chart: str, series: Sequence[Series], title: str) -> str:
    """Return a chart as a file of its own: with its title, a legend and the styles that a page would give it.

    Args:
        chart: What ``line_chart`` returned.
        series: Its lines, whose colours must be plain ones, since no page defines variables for them.
        title: Written above.

    Raises:
        ValueError: The chart is empty, or isn't one of ``line_chart``.
    """
    size = re.match(r'<svg viewBox="0 0 (\d+) (\d+)" width="100%"', chart)
    if size is None:
        raise ValueError(f"not a line chart: {chart[:60]!r}")
    width, height = map(int, size.groups())
    top = 40 + 18 * len(series)
    parts = [
        f'<rect width="{width + 32}" height="{top + height + 16}" fill="#fff"/>',
        f'<text class="title" x="16" y="24">{html.escape(title)}</text>',
    ]
    for row, item in enumerate(series):
        y = 44 + 18 * row
        dash = ' stroke-dasharray="5 4"' if item.dashed else ""
        line = f'<line x1="16" x2="42" y1="{y}" y2="{y}" stroke="{item.color}" stroke-width="2"{dash}/>'
        dot = f'<circle cx="29" cy="{y}" r="3.5" fill="{item.color}"/>'
        parts.append((dot if item.dots else line) + _text(50, y + 4, item.label, "start"))
    placed = chart.replace(size.group(), f'<svg x="16" y="{top}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"', 1)
    outer = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 32} {top + height + 16}" font-family="sans-serif"'
    return f"<svg {outer}><style>{_FILE_STYLE}</style>{''.join(parts)}{placed}</svg>\n"


def heat_map(rows: Sequence[Sequence[float]], *, title: str, x_label: str, y_label: str, top: float, cell: int = 13) -> str:
    """Return a heat map; row 0 is drawn at the top.

    Args:
        rows: Values, one sequence per row, all of one length; NaN leaves the cell empty.
        title: Written above.
        x_label: Name and unit of columns, numbered from 0.
        y_label: Name of rows, numbered from 0.
        top: The value of full colour; 0 has none.
        cell: Height of a cell in CSS pixels.
    """
    columns = len(rows[0])
    cell_width = max(3.0, min(22.0, 212 / columns))
    left, above = 38, 22
    width, height = int(left + cell_width * columns + 8), above + cell * len(rows) + 32
    parts = [f'<text class="title" x="{left}" y="14">{html.escape(title)}</text>']
    for index, row in enumerate(rows):
        y = above + index * cell
        parts.append(_text(left - 5, y + cell - 3, str(index), "end"))
        for column, value in enumerate(row):
            if not math.isfinite(value):
                continue
            x, opacity = left + column * cell_width, min(max(value / top, 0.0), 1.0)
            hint = f"<title>{html.escape(x_label)} {column}, {html.escape(y_label)} {index}: {value:.3g}</title>"
            shape = f'x="{x:.1f}" y="{y}" width="{cell_width:.2f}" height="{cell}"'
            parts.append(f'<rect class="cell" {shape} fill-opacity="{opacity:.3f}">{hint}</rect>')
    frame = f'x="{left}" y="{above}" width="{cell_width * columns:.1f}" height="{cell * len(rows)}"'
    parts.append(f'<rect class="frame" {frame}/>')
    base = above + cell * len(rows)
    parts.append(_text(left, base + 14, "0", "middle"))
    parts.append(_text(left + cell_width * columns, base + 14, str(columns - 1), "middle"))
    parts.append(_text(left + cell_width * columns / 2, base + 26, x_label, "middle"))
    upright = f'transform="translate(9 {above + cell * len(rows) // 2}) rotate(-90)"'
    parts.append(f'<text class="label" text-anchor="middle" {upright}>{html.escape(y_label)}</text>')
    return _svg(width, height, parts, title, fixed=True)


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return about ``count`` round numbers that cover ``[low, high]``; whole ones if asked for."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str], label: str, *, fixed: bool = False) -> str:
    size = f'width="{width}" height="{height}"' if fixed else 'width="100%"'
    return f'<svg viewBox="0 0 {width} {height}" {size} role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
