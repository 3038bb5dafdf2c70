"""The report of a run: one HTML file without scripts or outside resources."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from strop import __version__
from strop.store.store import Store
from strop.ui.report_data import EVALUATION_COLUMNS, ReportData, collect, curve
from strop.ui.report_style import STYLE
from strop.ui.svg import Series, heat_map, legend, line_chart
from strop.ui.view import cell_text, conservation_line, format_number, format_seconds, format_value


def build_report(store: Store) -> str:
    """Return the report of a run as a self-contained HTML page; sections without data are left out."""
    data = collect(store)
    sections = (
        ("Result", _result(data)),
        ("Learning", _learning(data)),
        ("Routers", _routers(data)),
        ("Numerics and certificate", _certificate(data)),
        ("Cost", _cost(data)),
        ("Episodes and flags", _episodes(data)),
        ("Use it", _use(store, data)),
        ("Configuration and provenance", _provenance(data)),
    )
    shown = [(title, body) for title, body in sections if body]
    links = " ".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title, _ in shown)
    name = html.escape(str(data.config.get("name", "run")))
    body = "".join(f'<section id="{_anchor(title)}"><h2>{html.escape(title)}</h2>{content}</section>' for title, content in shown)
    stage = "finished" if data.stage in ("rl_eval", "report") else f"not finished, last stage done: {data.stage or 'none'}"
    created = html.escape(str(data.facts.get("created", ""))[:16].replace("T", " "))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>strop: {name}</title><style>{STYLE}</style></head><body><header><h1>{name}</h1>"
        f'<p class="quiet">strop {__version__} - begun {created} UTC - seed {data.config.get("seed", "?")} - {html.escape(stage)}</p>'
        f"<nav>{links}</nav></header><main>{_cards(data)}{body}</main></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# ---------------------------------------------------------------------------------------------------------- head


def _cards(data: ReportData) -> str:
    cards = []
    rows = [row for row in data.evaluations if row.get("success_frac") is not None]
    if rows:
        steps = " → ".join(f"{100 * row['success_frac']:.1f}" for row in rows)
        names = " → ".join(str(row["policy"]) for row in rows)
        cards.append((f"{steps} %", f"held-out success: {names}"))
    interval = data.promotion.get("interval")
    if interval:
        span = f"({_points(interval['low'])} to {_points(interval['high'])})"
        cards.append((f"{_points(data.promotion['gain'])} points", f"paired gain over the incumbent {span}"))
    diffs = [record["numerics/logprob_diff_max_nats"] for record in data.rl if "numerics/logprob_diff_max_nats" in record]
    if diffs:
        worst = math.nan if any(math.isnan(value) for value in diffs) else max(diffs)
        cards.append((format_number(worst), "largest |Δlogp| rollout against trainer, nats"))
    totals = {row["key"]: row["total"] for row in data.costs}
    if "cost/wall_s" in totals:
        cards.append((format_seconds(totals["cost/wall_s"]), "wall time"))
    if "cost/peak_memory_bytes" in totals:
        cards.append((format_value("cost/peak_memory_bytes", totals["cost/peak_memory_bytes"]), "peak memory"))
    items = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>" for value, text in cards)
    return f'<div class="cards">{items}</div>' if items else ""


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


# ---------------------------------------------------------------------------------------------------------- sections


def _result(data: ReportData) -> str:
    rows = [*data.evaluations, *data.baselines]
    if not rows:
        return ""
    shown = []
    for row in rows:
        low, high = row.get("low_frac"), row.get("high_frac")
        interval = f"{100 * low:.1f} to {100 * high:.1f} %" if low is not None and high is not None else None
        shown.append({**row, "interval": interval})
    columns = [(key, title) for key, title in EVALUATION_COLUMNS if any(row.get(key) is not None for row in shown)]
    table = _table(shown, columns, rule_before=len(data.evaluations))
    note = (
        "Intervals resample whole functions, since mutants of one function are not independent. Baselines stand below the rule; they get "
        "the same turns as the policy."
    )
    gate = ""
    if data.promotion:
        verdict = "promoted" if data.promotion["promote"] else "not promoted"
        gate = f"<h3>Promotion gate: {verdict}</h3><p>{html.escape(str(data.promotion['reason']))}</p>"
    return f"{table}<p class='quiet'>{note}</p>{gate}"


def _learning(data: ReportData) -> str:
    success = curve(data.rl, "rl/success_frac")
    if not success:
        return ""
    series = [Series(label="training tasks, success of the step's episodes", points=success)]
    held_out = curve(data.rl, "eval/success_frac")
    if held_out:
        bars = [
            (float(record["step"]), record["eval/success_low_frac"], record["eval/success_high_frac"])
            for record in data.rl
            if "eval/success_low_frac" in record and "eval/success_high_frac" in record
        ]
        series.append(Series(label="held-out tasks, 95 % interval", points=held_out, color="var(--c2)", bars=bars, dots=True))
    references = [(str(row["policy"]), float(row["success_frac"])) for row in data.baselines if row.get("success_frac") is not None]
    chart = line_chart(series, x_label="RL step", y_label="success", percent=True, lines=references)
    small = []
    for title, key, percent in (
        ("first edit right", "env/first_edit_right_frac", True),
        ("submitted on red", "env/submit_on_red_frac", True),
        ("groups with signal", "rl/groups_signal_frac", True),
        ("entropy, nats", "rl/entropy_nats", False),
        ("edits per episode", "env/edits", False),
        ("seconds per step", "train/step_s", False),
    ):
        points = curve(data.rl, key)
        if len(points) > 1:
            drawn = line_chart(
                [Series(label=title, points=points)], x_label="RL step", y_label=title, width=270, height=160, percent=percent
            )
            small.append(f"<figure>{drawn}</figure>")
    return f"{legend(series)}{chart}<div class='grid3'>{''.join(small)}</div>"


def _routers(data: ReportData) -> str:
    parts = []
    if data.loads:
        experts = len(next(iter(data.loads.values())))
        top = 2.0 / experts
        maps = "".join(
            heat_map(rows, title=f"layer {layer}", x_label="RL step", y_label="expert", top=top) for layer, rows in data.loads.items()
        )
        scale = f"<span class='scale'></span> 0 to {100 * top:.3g} % of the layer's tokens; an even split is {100 / experts:.3g} %"
        parts.append(f"<p class='legend'>Expert load by layer and step: {scale}</p><div class='maps'>{maps}</div>")
    mismatch = [
        Series(label=label, points=points, color=color)
        for label, key, color in (
            ("routing differs between rollout and trainer", "numerics/route_mismatch_frac", "var(--c1)"),
            ("recorded routes differ from the trainer's own choice", "routes/mismatch_frac", "var(--c2)"),
            ("choices overridden by replay", "routes/suppressed_frac", "var(--c3)"),
        )
        if (points := curve(data.rl, key))
    ]
    if mismatch:
        chart = line_chart(mismatch, x_label="RL step", y_label="share of token-layer pairs", percent=True, height=210)
        parts.append(f"{legend(mismatch)}{chart}")
    return "".join(parts)


def _certificate(data: ReportData) -> str:
    rows = []
    for key, label in (
        ("numerics/tokens", "tokens compared, all steps"),
        ("numerics/logprob_diff_max_nats", "largest |Δlogp|"),
        ("numerics/logprob_diff_mean_nats", "largest step mean of |Δlogp|"),
        ("numerics/k3_nats", "largest k3"),
        ("numerics/ratio_above_2_frac", "largest share of ratios beyond 2"),
        ("numerics/route_mismatch_frac", "largest route mismatch"),
    ):
        values = [record[key] for record in data.rl if key in record]
        if values:
            value = sum(values) if key.endswith("/tokens") else max(values)
            rows.append({"figure": label, "value": format_value(key, value)})
    table = _table(rows, (("figure", "figure over the whole run"), ("value", "value"))) if rows else ""
    return table + _pairs(data.certificate, "Certificate")


def _cost(data: ReportData) -> str:
    if not data.costs:
        return ""
    columns = [("meaning", "what"), ("total", "total"), *((phase, phase) for phase in data.phases)]
    rows = []
    for row in data.costs:
        values = {name: format_value(row["key"], row[name]) for name in ("total", *data.phases) if name in row}
        rows.append({"meaning": str(row["meaning"]).rstrip("."), **values})
    return _table(rows, columns)


def _episodes(data: ReportData) -> str:
    parts = []
    if data.outcomes:
        parts.append(_table(data.outcomes, [(key, key) for key in data.outcomes[0]]))
    law = next((line for record in reversed(data.rl) if (line := conservation_line(record))), "")
    if law:
        parts.append(f"<p>Conservation at the last step: {html.escape(law)}.</p>")
    if data.flags:
        columns = (("rule", "rule"), ("episodes", "episodes"), ("share_frac", "share of episodes"), ("mean reward", "mean reward"))
        parts.append(f"<h3>Rules that fired</h3>{_table(data.flags, columns)}")
    elif data.outcomes:
        parts.append("<p>No hack rule fired.</p>")
    return "".join(parts)


def _use(store: Store, data: ReportData) -> str:
    where = html.escape(str(store.path))
    commands = [f"strop serve {where}", f"strop episodes {where}", f"strop replay {where}"]
    if data.stage not in ("rl_eval", "report"):
        return ""
    return f"<pre>{chr(10).join(commands)}</pre><p class='quiet'>The server speaks the OpenAI protocol, tools and streaming included.</p>"


def _provenance(data: ReportData) -> str:
    machine, versions = data.facts.get("machine", {}), data.facts.get("versions", {})
    facts = {
        "revision": data.facts.get("revision", ""),
        "machine": ", ".join(f"{key} {value}" for key, value in machine.items() if value != ""),
        "versions": ", ".join(f"{key} {value}" for key, value in versions.items()),
    }
    config = html.escape(json.dumps(data.config, indent=2, ensure_ascii=False))
    return f"{_pairs(facts, '')}<details><summary>Resolved configuration</summary><pre>{config}</pre></details>"


# ---------------------------------------------------------------------------------------------------------- pieces


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]], rule_before: int = 0) -> str:
    """Return a table; the first column is text, others stand to the right."""
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title in columns)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(cell_text(key, row.get(key)))}</td>" for key, _ in columns)
        lines.append(f"<tr{' class=rule' if index and index == rule_before else ''}>{cells}</tr>")
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _pairs(values: Mapping[str, Any], title: str) -> str:
    if not values:
        return ""
    items = []
    for key, value in values.items():
        text = value if isinstance(value, str) else cell_text(key, value) if isinstance(value, (int, float)) else json.dumps(value)
        items.append(f"<dt>{html.escape(key.removesuffix('_frac').replace('_', ' '))}</dt><dd>{html.escape(text)}</dd>")
    heading = f"<h3>{html.escape(title)}</h3>" if title else ""
    return f"{heading}<dl>{''.join(items)}</dl>"
