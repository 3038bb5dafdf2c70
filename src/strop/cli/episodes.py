"""``strop episodes`` and ``strop report``: look at what a run left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from strop.core.errors import ConfigError
from strop.store import EpisodeRow, RunDir
from strop.store.files import write_atomic


def list_episodes(path: Path, *, phase: str | None, step: int | None, task: str | None, reward: float | None, limit: int) -> int:
    """Print matching episodes as a table, and what they add up to."""
    from strop.ui.live import rich_table

    with RunDir.open(path) as run:
        rows = run.store.rows(phase=phase, step=step, task=task, reward=reward)
    console = Console()
    shown = rows[:limit] if limit else rows
    if shown:
        if not console.is_terminal:
            console = Console(width=max(len(str(row.key)) for row in shown) + 100)
        console.print(rich_table([_columns(row) for row in shown]))
    scored = [row.reward for row in rows if row.reward is not None]
    mean = f", mean reward {sum(scored) / len(scored):.3f}" if scored else ""
    more = f" ({len(shown)} shown; --limit 0 shows all)" if len(shown) < len(rows) else ""
    console.print(f"{len(rows)} episodes{more}, {len(scored)} scored{mean}. Read one with --show KEY.", highlight=False, soft_wrap=True)
    return 0


def _columns(row: EpisodeRow) -> dict[str, Any]:
    versions = str(row.version_min) if row.version_min == row.version_max else f"{row.version_min}-{row.version_max}"
    return {
        "key": str(row.key),
        "outcome": row.outcome,
        "reward": row.reward,
        "reason": row.reason[:40],
        "ended by": row.stop_reason,
        "turns": row.turns,
        "tokens": row.tokens,
        "seconds": round(row.seconds, 2),
        "versions": versions,
        "flags": row.flags,
    }


def show_episode(path: Path, key: str) -> int:
    """Print one episode, turn by turn."""
    from strop.agent.render import renderer_for
    from strop.agent.transcript import rich_transcript
    from strop.cli.models import model_dir

    with RunDir.open(path) as run:
        episode = run.store.get(key)
        renderer = renderer_for(model_dir(run.config.model.base))
    Console().print(rich_transcript(episode, renderer), soft_wrap=True)
    return 0


def write_report(path: Path, out: Path | None) -> int:
    """Write the HTML report and print its path."""
    from strop.ui.report import build_report

    with RunDir.open(path) as run:
        text = build_report(run.store)
        target = out if out is not None else run.report_path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(f"--out {target} can't be written: {error.strerror or error}") from None
    print(target)
    return 0
