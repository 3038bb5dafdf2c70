"""``strop fidelity``: kinds of box from the command line or a recipe, the audit, and the gate that a recipe can require."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.registry import SANDBOXES
from strop.core.config import RunConfig, SandboxConfig
from strop.core.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from strop.fidelity.collect import Observation
    from strop.fidelity.report import FidelityReport

_LIMITS = {"memory_mb": 32, "processes": 1, "disk_mb": 1}
"""Limits that a kind may set, with their least value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of box.

    Attributes:
        backend: Registered back end.
        limits: Limits that aren't the default ones.
        domain: Settings as ``sandboxes.domain`` takes them.
    """

    backend: str
    limits: dict[str, int]
    domain: tuple[str, ...]

    def __str__(self) -> str:
        settings = sorted([*self.domain, *(f"{name}={value}" for name, value in self.limits.items())])
        return self.backend + (f":{','.join(settings)}" if settings else "")


def parse_kind(text: str) -> Kind:
    """Read ``BACKEND[:KEY[=VALUE],...]``.

    Example: ``bubblewrap:hostname=ci-7,disk_mb=128,uptime`` has a fixed host name, another limit, and a drawn uptime.

    Raises:
        ConfigError: Unknown back end or key, or a value that can't be.
    """
    from strop.sandboxes.domain import check_settings

    backend, colon, rest = text.partition(":")
    SANDBOXES.load(backend)
    settings = rest.split(",") if colon else []
    limits: dict[str, int] = {}
    for setting in [found for found in settings if found.partition("=")[0] in _LIMITS]:
        name, _, value = setting.partition("=")
        settings.remove(setting)
        if name in limits or not (value.isascii() and value.isdigit() and len(value) < 8) or int(value) < _LIMITS[name]:
            raise ConfigError(f"kind {text!r}: {setting!r} must be given once, a whole number of at least {_LIMITS[name]}")
        if int(value) != getattr(SandboxConfig(), name):
            limits[name] = int(value)
    check_settings(settings)
    return Kind(backend=backend, limits=limits, domain=tuple(settings))


def kind_of(config: SandboxConfig) -> Kind:
    """Return the kind of box that a recipe trains in."""
    default = SandboxConfig()
    limits = {name: getattr(config, name) for name in _LIMITS if getattr(config, name) != getattr(default, name)}
    return Kind(backend=config.backend, limits=limits, domain=tuple(config.domain))


def require_fidelity(config: RunConfig) -> None:
    """Check the report that a recipe requires, if it requires one.

    Raises:
        CheckpointError: No report where ``fidelity.report`` says.
        FidelityError: It is about other boxes, or its upper bound lies above ``fidelity.max_auc``.
    """
    if config.fidelity.report:
        from strop.fidelity.report import require

        require(Path(config.fidelity.report), train=str(kind_of(config.sandbox)), max_auc=config.fidelity.max_auc)


def audit(
    train: str,
    production: str,
    *,
    boxes: int,
    tasks: int,
    permutations: int,
    seed: int,
    max_auc: float,
    out: Path | None,
    page: Path | None,
) -> int:
    """Run an audit, print it, and write it where asked.

    Returns:
        1 if the upper bound of the AUC is larger than ``max_auc``, else 0.

    Raises:
        ConfigError: A kind that can't be, or fewer boxes than two for each task.
        SandboxError: A back end can't start here, or a box failed.
    """
    report, _ = measure(train, production, boxes=boxes, tasks=tasks, permutations=permutations, seed=seed, max_auc=max_auc)
    for line in report.lines():
        print(line)
    if out is not None:
        report.write(out)
    if page is not None:
        report.write_page(page)
    return 0 if report.passes else 1


def measure(
    train: str, production: str, *, boxes: int, tasks: int, permutations: int = 200, seed: int = 0, max_auc: float = 0.6
) -> tuple[FidelityReport, list[Observation]]:
    """Ask boxes of two kinds and return the report, with the answers that it rests on.

    Raises:
        ConfigError: A kind that can't be, or fewer boxes than two for each task.
        SandboxError: A back end can't start here, or a box failed.
    """
    from strop.fidelity.report import make_report
    from strop.fidelity.twosample import two_sample

    if boxes < 2 * tasks:
        raise ConfigError(f"{boxes} boxes over {tasks} tasks: a task needs at least two boxes of each kind; take more boxes or fewer tasks")
    kinds = parse_kind(train), parse_kind(production)
    observations = asyncio.run(_ask(kinds, boxes, tasks, seed))
    test = two_sample(observations, permutations=permutations, seed=seed)
    return make_report(test, observations, train=str(kinds[0]), production=str(kinds[1]), max_auc=max_auc, seed=seed), observations


async def _ask(kinds: Sequence[Kind], boxes: int, tasks: int, seed: int) -> list[Observation]:
    from strop.fidelity.collect import collect, make_tasks
    from strop.sandboxes.domain import VariedProvider

    providers: list[VariedProvider] = []
    try:
        for side, kind in enumerate(kinds):
            made = SANDBOXES.load(kind.backend)(SandboxConfig.model_validate({"workers": 1, **kind.limits}))
            providers.append(VariedProvider(made, kind.domain, seed=2 * seed + side, per_box=True))
        with tempfile.TemporaryDirectory(prefix="strop-fidelity-") as directory:
            return await collect(providers[0], providers[1], make_tasks(Path(directory), tasks), boxes, seed=seed, progress=_show)
    except ImportError as error:
        raise SandboxError(f"a back end of {', '.join(map(str, kinds))} can't be used: {error}") from error
    finally:
        for provider in providers:
            await provider.close()


def _show(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} boxes asked", end="\n" if done == total else "", file=sys.stderr, flush=True)
