"""Figures with their evidence: one JSON file per bar, and the page generated from them.

Every benchmark and experiment calls ``write_result``; ``python -m strop.ui.results`` writes ``docs/results/README.md`` anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.core.errors import ConfigError
from strop.store.facts import git_revision, machine_facts, package_versions

RESULTS_DIR = Path("docs/results")
_NONE = "-"

KEYS = ("bar", "goal", "figure", "interval", "met", "command", "revision", "date", "machine", "versions", "seeds")
"""Keys that every result has, in the order in which they are written."""


def write_result(
    name: str,
    *,
    bar: str,
    goal: str,
    figure: float | str,
    met: bool | None,
    command: str,
    interval: Sequence[float] | None = None,
    seeds: Sequence[int] = (),
    unit: str = "",
    notes: str = "",
    details: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
) -> Path:
    """Write one measured bar to ``<directory>/<name>.json`` and return the path.

    Example::

        write_result("main-decode", bar="decode against transformers", goal=">= 5x", figure=6.1, unit="x", met=True,
                     command="python benchmarks/decode.py", interval=(5.8, 6.4), seeds=(0, 1, 2), details={"batch": 32})

    Args:
        name: File name without suffix: lower case letters, digits and dashes.
        bar: What is measured, as the list of bars names it.
        goal: The figure asked for, with its unit.
        figure: The measured figure.
        met: Whether the goal is met; ``None`` where nothing was asked for.
        command: The command that measures it again, run from the repository's root.
        interval: Lower and upper end of the 95 % interval.
        seeds: Seeds used.
        unit: Unit of ``figure`` and ``interval``.
        notes: What a reader must know: how it falls short, what differs from the bar's wording.
        details: Further figures, JSON values only.
        directory: Where results lie; by default ``docs/results`` of the working directory.

    Raises:
        ConfigError: A name or value that can't be written.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(f"result name {name!r} must be lower case letters, digits and single dashes, for example 'main-decode'")
    if interval is not None and (len(interval) != 2 or not interval[0] <= interval[1]):
        raise ConfigError(f"result {name!r}: interval {tuple(interval)!r} must be (low, high)")
    record: dict[str, Any] = {
        "bar": bar,
        "goal": goal,
        "figure": figure,
        "unit": unit,
        "interval": list(interval) if interval is not None else None,
        "met": met,
        "command": command,
        **_circumstances(),
        "seeds": list(seeds),
        "notes": notes,
        "details": dict(details or {}),
    }
    return _write_record(Path(directory) if directory is not None else RESULTS_DIR, name, record)


def _circumstances() -> dict[str, Any]:
    """Code, time, machine and versions that a figure is measured under."""
    return {
        "revision": git_revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": package_versions(),
    }


def _write_record(directory: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Write a result whole or not at all."""
    try:
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError as error:
        raise ConfigError(f"result {name!r} can't be written as JSON: {error}") from None
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _plain(value: Any) -> Any:
    """Turn numpy scalars and arrays, and paths, into JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(f"{value!r} of type {type(value).__name__} is not a JSON value")


def read_results(directory: str | Path = RESULTS_DIR) -> dict[str, dict[str, Any]]:
    """Read every result, sorted by name.

    Raises:
        ConfigError: A file that isn't a result; the message names it and the missing key.
    """
    results = {}
    for path in sorted(Path(directory).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        missing = [key for key in KEYS if not isinstance(record, dict) or key not in record]
        if missing:
            raise ConfigError(f"{path} is not a result: missing {', '.join(missing)}")
        results[path.stem] = record
    return results


def results_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown page: a table of all bars, then each with its evidence."""
    lines = [
        "# Results",
        "",
        "Generated from the JSON files beside it by `python -m strop.ui.results`; don't edit.",
        "Every figure names the command that measures it again, run from the repository's root.",
        "A `+` after a revision: tracked files differed from that commit when the figure was measured.",
        "",
    ]
    if not results:
        return "\n".join([*lines, "No results yet.", ""])
    judged = [record["met"] for record in results.values() if record["met"] is not None]
    lines += [
        f"{sum(judged)} of {len(judged)} bars met.",
        "",
        "| bar | goal | figure | 95 % interval | met | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for name, record in results.items():
        met = {True: "yes", False: "**no**", None: _NONE}[record["met"]]
        cells = (record["bar"], record["goal"], _with_unit(record["figure"], record), _interval(record), met, f"[{name}](#{name})")
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    for name, record in results.items():
        lines += ["", f"## {name}", "", f"{record['bar']}: **{_with_unit(record['figure'], record)}** (goal {record['goal']})", ""]
        if record.get("notes"):
            lines += [record["notes"], ""]
        lines += ["```", record["command"], "```", ""]
        machine, versions = record["machine"], record["versions"]
        facts = [f"{machine.get('cores', '?')} cores {machine.get('cpu', '')}".strip(), f"{machine.get('memory_gib', '?')} GiB"]
        if machine.get("accelerator", "none") != "none":
            facts.append(str(machine["accelerator"]))
        lines.append(f"- date {record['date']}, revision `{_revision(record)}`, seeds {record['seeds'] or _NONE}")
        lines.append(f"- machine: {', '.join(facts)}")
        lines.append(f"- versions: {', '.join(f'{key} {value}' for key, value in versions.items())}")
        lines += [f"- {key}: {_number(value)}" for key, value in (record.get("details") or {}).items()]
    return "\n".join(lines) + "\n"


def _with_unit(value: Any, record: Mapping[str, Any]) -> str:
    unit = record.get("unit") or ""
    return f"{_number(value)} {unit}".strip()


def _revision(record: Mapping[str, Any]) -> str:
    """The commit, short, with a ``+`` where the checkout was not the commit."""
    commit, plus, _ = str(record["revision"]).partition("+")
    return commit[:12] + plus


def _interval(record: Mapping[str, Any]) -> str:
    interval = record["interval"]
    return f"{_number(interval[0])} to {_number(interval[1])}" if interval else _NONE


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Write the results page anew; with ``--check``, fail if it isn't up to date."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--directory", type=Path, default=RESULTS_DIR)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page, path = results_page(read_results(arguments.directory)), arguments.directory / "README.md"
    if arguments.check:
        if not path.exists() or path.read_text(encoding="utf-8") != page:
            print(f"{path} is out of date; run python -m strop.ui.results", file=sys.stderr)
            return 1
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
