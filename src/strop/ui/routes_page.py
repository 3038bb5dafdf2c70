"""The page of a run's routers: load, agreement, churn, and what replay cost. One HTML file, no script, nothing from elsewhere."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strop.core.errors import CheckpointError
from strop.store import Store
from strop.ui.report_data import curve
from strop.ui.report_style import STYLE
from strop.ui.svg import Series, heat_map, legend, line_chart

_LAYER = {
    "routes/mismatch_layer{}_frac": "recorded experts differ from the live router's",
    "routes/suppressed_layer{}_frac": "choices overridden by replay",
}
_CHARTS = (
    (
        "Agreement with the anchor",
        "share of live expert choices",
        True,
        (("among the record's favourites", "routes/anchor_agree_frac"), ("rows on the record's routes", "routes/anchor_replayed_frac")),
    ),
    (
        "Churn and lock-in",
        "share of the probe's token-layer pairs",
        True,
        (
            ("changed by the step", "routes/churn_frac"),
            ("unchanged for eight steps", "routes/locked_frac"),
            ("differ from the first step", "routes/moved_frac"),
        ),
    ),
    (
        "What replay costs",
        "KL(live || replayed), nats per token",
        False,
        (("price of replay", "routes/tax_nats"), ("k3 between rollout and trainer", "numerics/k3_nats")),
    ),
    (
        "Balance",
        "entropy, nats",
        False,
        (("of expert load", "routes/entropy_nats"), ("of a token's routing", "routes/router_entropy_nats")),
    ),
)
_COLORS = ("var(--c1)", "var(--c2)", "var(--c3)")


def build_routes_page(store: Store, title: str) -> str:
    """Return the page.

    Args:
        store: Of the run.
        title: Its heading.

    Raises:
        CheckpointError: The run logged nothing about routes yet.
    """
    records = [r for r in store.metrics() if any(key.startswith("routes/") for key in r)]
    if not records:
        raise CheckpointError(f"{store.path} has no figures about routes yet; they are logged by every step of RL")
    rl = [record for record in records if record["phase"] == "rl"]
    parts = [_loads(rl), _by_layer(rl)]
    for phase in sorted({str(record["phase"]) for record in records}):
        lines = [record for record in records if record["phase"] == phase]
        parts += [_chart(lines, phase, *chart) for chart in _CHARTS]
    body = "".join(f"<section>{part}</section>" for part in parts if part)
    heading = html.escape(title)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{heading}: routers</title><style>{STYLE}</style></head>"
        f"<body><header><h1>{heading}: routers</h1></header><main>{body}</main></body></html>\n"
    )


def _loads(records: Sequence[Mapping[str, Any]]) -> str:
    layers = _grid(records, re.compile(r"routes/load_layer(\d+)_expert(\d+)"))
    if not layers:
        return ""
    experts = max(expert for _, expert in layers) + 1
    maps = []
    for layer in sorted({layer for layer, _ in layers}):
        rows = [layers.get((layer, expert), [math.nan] * len(records)) for expert in range(experts)]
        maps.append(heat_map(rows, title=f"layer {layer}", x_label="RL step", y_label="expert", top=2.0 / experts))
    note = f"0 to {200 / experts:.3g} % of the layer's tokens; an even split is {100 / experts:.3g} %"
    return f"<h2>Expert load</h2><p class='legend'><span class='scale'></span> {note}</p><div class='maps'>{''.join(maps)}</div>"


def _by_layer(records: Sequence[Mapping[str, Any]]) -> str:
    maps = []
    for pattern, title in _LAYER.items():
        rows = _grid(records, re.compile(pattern.replace("{}", r"(\d+)()")))
        values = [rows[place] for place in sorted(rows)]
        top = max((value for row in values for value in row if math.isfinite(value)), default=0.0)
        if values and top > 0:
            maps.append(heat_map(values, title=f"{title} (full colour: {100 * top:.3g} %)", x_label="RL step", y_label="layer", top=top))
    return f"<h2>By layer and step</h2><div class='maps'>{''.join(maps)}</div>" if maps else ""


def _grid(records: Sequence[Mapping[str, Any]], pattern: re.Pattern[str]) -> dict[tuple[int, int], list[float]]:
    """Values by (first, second number of the key), one for each record; NaN where a record has none."""
    found: dict[tuple[int, int], list[float]] = {}
    for column, record in enumerate(records):
        for key, value in record.items():
            if match := pattern.fullmatch(key):
                place = int(match[1]), int(match[2] or 0)
                found.setdefault(place, [math.nan] * len(records))[column] = float(value)
    return found


def _chart(
    records: Sequence[Mapping[str, Any]], phase: str, title: str, y_label: str, percent: bool, lines: Sequence[tuple[str, str]]
) -> str:
    series = [
        Series(label=label, points=points, color=color)
        for (label, key), color in zip(lines, _COLORS, strict=False)
        if (points := curve(records, key))
    ]
    if not series:
        return ""
    chart = line_chart(series, x_label=f"step of {phase}", y_label=y_label, percent=percent, height=220)
    return f"<h2>{html.escape(title)}, {html.escape(phase)}</h2>{legend(series)}{chart}"
