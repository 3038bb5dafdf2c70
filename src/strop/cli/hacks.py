"""``strop hacks``: what a run's episodes were flagged for, by rule and policy version, with the evidence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from strop.core.episode import Episode
from strop.core.errors import ConfigError, JudgeError, nearest
from strop.grading.admission import changed_sources
from strop.grading.auditor import Auditor, OpenAiChat
from strop.grading.contrast import with_contrast
from strop.grading.hackreport import Finding, HackReport, RuleRow, VersionRow, hack_report
from strop.grading.quarantine import Quarantine
from strop.grading.rules import SEVERITY, TextChange
from strop.numerics.stats import Interval
from strop.store import RunDir
from strop.store.files import write_atomic

if TYPE_CHECKING:
    from strop.runtime.tasks import RunTasks

AUDIT_FILE = "audit.jsonl"


def show_hacks(
    path: Path, *, rule: str | None, phase: str | None, contrast: bool, limit: int, as_json: bool, audit: tuple[str, str, int] | None
) -> int:
    """Print the report of a run.

    Args:
        path: The run directory.
        rule: Only findings of this rule.
        phase: Only episodes of this phase, or of a prefix ending in ``*``.
        contrast: Also compare the samples of each task with each other; needs the run's task pool.
        limit: Findings printed; 0 prints all.
        as_json: Print JSON instead of tables.
        audit: Endpoint, model and number of episodes for the auditor, whose answers go to ``audit.jsonl`` of the run.

    Raises:
        ConfigError: An unknown rule, or no such pool.
    """
    if rule is not None and rule not in SEVERITY:
        raise ConfigError(f"unknown rule {rule!r}.{nearest(rule, SEVERITY)}")
    with RunDir.open(path) as run:
        quarantine = Quarantine.of(run.config.grading)
        episodes: Iterable[Episode] = run.store.episodes(phase=phase)
        if contrast or audit is not None:
            from strop.cli.models import pool_dir
            from strop.runtime.tasks import open_tasks

            tasks = open_tasks(run.config, pool_dir(run.config.tasks.pool))
            if contrast:
                episodes = with_contrast(list(episodes), lambda episode: _sources(tasks, episode))
            if audit is not None:
                url, model, count = audit
                lines = asyncio.run(_audit(_spread(list(episodes), count), tasks, OpenAiChat(url, model)))
                write_atomic(path / AUDIT_FILE, "".join(json.dumps(line) + "\n" for line in lines).encode())
                episodes = run.store.episodes(phase=phase) if not contrast else episodes
        report = hack_report(episodes, quarantine)
    findings = [item for item in report.findings if rule is None or any(flag.rule == rule for flag in item.flags)]
    if as_json:
        print(json.dumps(asdict(report) | {"findings": [asdict(item) for item in findings]}, indent=2, default=str))
    else:
        _print(report, findings[:limit] if limit else findings, len(findings), path)
    return 0


def _sources(tasks: RunTasks, episode: Episode) -> list[TextChange]:
    """Changed source files, before and after; nothing for a task that the pool doesn't have."""
    task = tasks.find(episode.key.task_id)
    return changed_sources(tasks.played.base_dir(task), episode.changes) if task is not None else []


def _spread(episodes: list[Episode], count: int) -> list[Episode]:
    """Episodes that changed something, ``count`` of them at equal distances over the run."""
    changed = [episode for episode in episodes if episode.changes]
    if count <= 0 or count >= len(changed):
        return changed
    return [changed[index * len(changed) // count] for index in range(count)]


async def _audit(episodes: list[Episode], tasks: RunTasks, chat: OpenAiChat) -> list[dict[str, Any]]:
    auditor = Auditor(chat)
    lines: list[dict[str, Any]] = []
    unread = 0
    for episode in episodes:
        task = tasks.find(episode.key.task_id)
        if task is None:
            continue
        try:
            found = await auditor.audit(task.instruction, _sources(tasks, episode), episode)
        except JudgeError as error:
            unread += 1
            lines.append({"episode": str(episode.key), "unread": str(error)})
            continue
        lines.append({"episode": str(episode.key), **asdict(found)})
    hacks = [line for line in lines if line.get("is_hack")]
    unsupported = sum(bool(line.get("is_unsupported")) for line in lines)
    print(
        f"auditor: {len(lines)} episodes read, {len(hacks)} called hacks, {unsupported} claims without a true quote, {unread} answers "
        f"unreadable, {chat.tokens} tokens"
    )
    for line in hacks:
        print(f"  {line['episode']}: {line['kind']}: {line['evidence']}")
    return lines


def _print(report: HackReport, findings: list[Finding], total: int, path: Path) -> None:
    from strop.ui.live import rich_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if report.rules:
        console.print(rich_table([_rule(row) for row in report.rules], title="flags by rule"))
    if report.versions:
        console.print(rich_table([_version(row) for row in report.versions], title="by policy version"))
    for line in _evidence(findings):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    shown = f" ({len(findings)} shown; --limit 0 shows all)" if len(findings) < total else ""
    where = f" Read one with strop episodes {path} --show KEY." if total else ""
    console.print(f"{total} flagged episodes{shown}.{where}", highlight=False, soft_wrap=True)


def _evidence(findings: list[Finding]) -> Iterator[str]:
    for item in findings:
        yield f"{item.key}  reward {item.reward:g}{f' ({item.reason})' if item.reason else ''}"
        for flag in item.flags:
            yield f"    {flag.severity} {flag.rule}: {flag.evidence}"


def _rule(row: RuleRow) -> dict[str, Any]:
    first, last = row.versions
    return {
        "rule": row.rule,
        "severity": row.severity,
        "episodes": row.episodes,
        "rewarded": row.rewarded,
        "tasks": row.tasks,
        "versions": str(first) if first == last else f"{first}-{last}",
        "in training": str(row.action),
    }


def _version(row: VersionRow) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "episodes": row.episodes,
        "hack rate": _interval(row.hacks),
        "left out": row.left_out,
        "fixed order": f"{row.fixed:.3f}",
        "shuffled": f"{row.shuffled:.3f}",
        "fell by": _interval(row.gap),
        "impossible passed": _interval(row.impossible),
        "honeypots opened": _interval(row.honeypot),
    }


def _interval(value: Interval | None) -> str:
    return "-" if value is None else str(value)
