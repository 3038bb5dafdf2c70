"""``strop regrade``, ``strop sandbox check`` and ``strop numerics verify``: hold what is there against itself once more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli import models
from strop.cli.registry import GRADERS, SANDBOXES
from strop.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from strop.grading.regrade import Regrade
    from strop.store import RunDir


def regrade_run(path: Path, *, reward: str | None, phase: str | None) -> int:
    """Grade the stored episodes of a run again and print what changed and why.

    Args:
        path: A run, finished or not.
        reward: A registered grader to grade with instead of the run's own.
        phase: Only this phase, for example ``"rl"`` or ``"eval.*"``.

    Returns:
        1 if the run's own grader came to another outcome somewhere, else 0: with another grader, changes are what was asked for.

    Raises:
        CheckpointError: No run there.
        ConfigError: Unknown grader or sandbox.
        SandboxError: The host can't isolate agent code.
    """
    from strop.cli.doctor import check_sandbox
    from strop.store import RunDir

    with RunDir.open(path) as run:
        if reward is not None:
            GRADERS.load(reward)
        if run.config.sandbox.backend == "bubblewrap":
            check_sandbox()
        found = asyncio.run(_regrade(run, reward, phase))
    for line in found.lines():
        print(line)
    return 1 if found.changes and reward is None else 0


async def _regrade(run: RunDir, reward: str | None, phase: str | None) -> Regrade:
    from strop.grading.regrade import regrade
    from strop.runtime.build import build_grading

    config = run.config
    tasks, provider, grader = build_grading(config, models.pool_dir(config.tasks.pool), grader=reward or "")
    try:
        found = [tasks.find(task_id) for task_id in {row.key.task_id for row in run.store.rows(phase=phase)}]
        known = [task for task in found if task is not None]
        return await regrade(run.store.episodes(phase=phase), known, grader, at_once=config.sandbox.workers)
    finally:
        await grader.close()
        await provider.close()


def check_sandbox_backend(name: str, only: Sequence[str]) -> int:
    """Run the conformance suite over a sandbox back end and print one line a check.

    Args:
        name: A registered name, or ``"module:Class"``.
        only: Names of checks; all when empty.

    Returns:
        1 if a check failed. What the back end declares missing on this machine is no failure.

    Raises:
        ConfigError: Unknown back end or check, or a back end that can't be imported.
        SandboxError: The back end can't start here at all.
    """
    from strop.sandboxes.conformance import run_conformance

    target = name
    if ":" not in name:
        SANDBOXES.load(name)
        target = SANDBOXES.targets()[name]
    results = asyncio.run(run_conformance(target, only=only))
    for result in results:
        mark = "FAIL" if result.status == "fail" else result.status
        print(f"{mark:8}{result.name}" + (f": {result.detail}" if result.detail else ""))
    counts = {status: sum(result.status == status for result in results) for status in ("pass", "missing", "fail")}
    print(f"{name}: {counts['pass']} passed, {counts['missing']} missing here, {counts['fail']} failed")
    return 1 if counts["fail"] else 0


def verify_numerics(path: Path, run_dir: Path | None) -> int:
    """Check a certificate against the state, the chain of digests and the metrics of its run.

    Args:
        path: A run directory, or a certificate file.
        run_dir: The run that a certificate file belongs to; by default the one it lies in.

    Raises:
        CheckpointError: No certificate, or no run, there; or damaged files.
        NumericsError: Something differs; names the first.
    """
    from strop.numerics.certificate import FOLDER, NAME, verify_certificate

    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no {NAME}: RL has not ended, or is off" if models.is_run(path) else f"{path} is neither a run nor a certificate"
        raise CheckpointError(what)
    if run_dir is None:
        run_dir = file.parent.parent if file.parent.name == FOLDER else file.parent
    if not models.is_run(run_dir):
        raise ConfigError(f"{run_dir} is not a run directory; name the run of {file} with --run")
    body = verify_certificate(file, run_dir)
    exact = body["exactness"]
    print(f"{file}: verified against {run_dir}")
    print(f"  {len(body['tensors'])} tensors of the state, {len(body['chain'])} weight digests in the chain, mode {body['mode']}")
    compared = f"{exact['tokens']:,.0f} tokens of {exact['steps_compared']:g} steps compared between rollout and trainer"
    print(f"  {compared}, largest difference {exact['logprob_diff_max_nats']:g} nats")
    return 0
