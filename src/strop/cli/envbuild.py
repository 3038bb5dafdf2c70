"""``strop env build``: run a build with real boxes and print what came out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from strop.core.config import SandboxConfig
from strop.core.errors import ConfigError
from strop.grading.scratch import Scratch
from strop.sandboxes import BubblewrapProvider
from strop.tasks.admission.build import BuildOptions, SuiteBuild
from strop.tasks.admission.leaks import interpreter_places
from strop.tasks.admission.pool import BOX_MEMORY_MB, KINDS
from strop.tasks.admission.tally import SourceTally
from strop.ui.live import rich_table


def suite_boxes(workers: int) -> BubblewrapProvider:
    """Return a provider of boxes that are large enough for a repository's tests."""
    return BubblewrapProvider(SandboxConfig(workers=workers, memory_mb=BOX_MEMORY_MB))


def num_workers(workers: int) -> int:
    """Return the number asked for, or one for each core for 0."""
    return workers or len(os.sched_getaffinity(0))


def box_places() -> tuple[str, ...]:
    """Folders of installed packages that a box shows besides the workspace's."""
    return tuple(interpreter_places(("/usr", sys.base_prefix)))


def build_pool(
    sources: Sequence[str], out: Path, *, limits: Mapping[str, int], releases: Sequence[str], seed: int, workers: int, as_json: bool
) -> int:
    """Build, print, and return 0 if every source gave at least one task."""
    if releases and len(sources) > 1:
        raise ConfigError(f"--release belongs to one source, got {len(sources)}: build them one by one into the same --out")
    tallies = asyncio.run(_build(sources, out, limits=limits, releases=releases, seed=seed, workers=num_workers(workers)))
    if as_json:
        print(json.dumps([{"source": tally.source, **tally.to_json()} for tally in tallies], indent=1))
    else:
        print_tallies(tallies, out)
    return 0 if all(any(tally.number(kind, "admitted") for kind in KINDS) for tally in tallies) else 1


async def _build(
    sources: Sequence[str], out: Path, *, limits: Mapping[str, int], releases: Sequence[str], seed: int, workers: int
) -> list[SourceTally]:
    options = BuildOptions(
        out=out.absolute(), limits=dict(limits), seed=seed, workers=workers, places=box_places(), releases=tuple(releases)
    )
    provider = suite_boxes(workers)
    scratch = Scratch(_scratch_parent(out))
    try:
        build = SuiteBuild(options, provider, scratch.path, say=lambda text: print(text, file=sys.stderr, flush=True))
        for source in sources:
            await build.add(source)
        build.remove_unused()
        return build.tallies
    finally:
        scratch.close()
        await provider.close()


def _scratch_parent(out: Path) -> str:
    """Beside the pool, so that workspaces are made by hard links."""
    parent = out.absolute().with_name(f"{out.name}.work")
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return tempfile.gettempdir()
    return str(parent)


def print_tallies(tallies: Sequence[SourceTally], out: Path) -> None:
    """Print the table of a build, then the reasons, then what went wrong with whole sources."""
    console = Console() if sys.stdout.isatty() else Console(width=160)
    rows = [_row(tally, kind) for tally in tallies for kind in KINDS if tally.made(kind)]
    if rows:
        console.print(rich_table([*rows, _total(tallies)]))
    reasons: Counter[tuple[str, str, str]] = Counter()
    for tally in tallies:
        reasons.update(tally.reasons)
    if reasons:
        console.print(rich_table([{"kind": k, "status": s, "reason": r, "drafts": n} for (k, s, r), n in reasons.most_common()]))
    for tally in tallies:
        if tally.problem:
            console.print(f"refused source {tally.source}: {tally.problem}", highlight=False, soft_wrap=True)
    admitted = sum(tally.number(kind, "admitted") for tally in tallies for kind in KINDS)
    console.print(f"{admitted} tasks in {out}. Look at one: strop env show TASK --pool {out}", highlight=False, soft_wrap=True)


def _row(tally: SourceTally, kind: str) -> dict[str, Any]:
    made = tally.made(kind)
    return {
        "source": tally.source,
        "kind": kind,
        "made": made,
        "admitted": tally.number(kind, "admitted"),
        "refused": tally.number(kind, "refused"),
        "quarantined": tally.number(kind, "quarantined"),
        "gate s/draft": round(tally.gate_s(kind) / made, 2),
        "tests": tally.tests,
        "suite s": round(tally.suite_s, 2),
    }


def _total(tallies: Sequence[SourceTally]) -> dict[str, Any]:
    def number(status: str) -> int:
        return sum(tally.number(kind, status) for tally in tallies for kind in KINDS)

    made = number("admitted") + number("refused") + number("quarantined")
    spent = sum(tally.gate_s(kind) for tally in tallies for kind in KINDS)
    return {
        "source": "all",
        "kind": "",
        "made": made,
        "admitted": number("admitted"),
        "refused": number("refused"),
        "quarantined": number("quarantined"),
        "gate s/draft": round(spent / made, 2) if made else 0.0,
        "tests": sum(tally.tests for tally in tallies),
        "suite s": round(sum(tally.suite_s for tally in tallies), 2),
    }
