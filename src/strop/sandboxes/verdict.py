"""Exit code and cause of death of a finished run, from wait status and control group counters alone."""

from __future__ import annotations

import os

from strop.core.errors import SandboxError
from strop.sandboxes.cgroups import Evidence
from strop.sandboxes.worker import RunReport


def judge(report: RunReport) -> tuple[int | None, str]:
    """Exit code and cause of death, from the kernel's evidence only.

    Raises:
        SandboxError: The machine ran out of memory, or the run's first process vanished without a cause. Neither is the agent's doing.
    """
    if report.is_host_out_of_memory:
        raise SandboxError(
            "this machine ran out of memory and killed a process of a run that was within its own limit; lower sandbox.workers or "
            "engine.max_sessions, or free memory",
            retryable=True,
        )
    cause = cause_of_death(report.before, report.after)
    if report.timed_out:
        return None, "timeout"
    if report.status is None:
        if cause == "memory":
            return None, "memory"
        raise SandboxError("a run's first process vanished and the kernel counted no cause", retryable=True)
    code = os.waitstatus_to_exitcode(report.status)
    # A run that ends well although a child of its own was killed or refused has coped with it.
    return (None if code < 0 else code), "" if code == 0 else cause


def cause_of_death(before: Evidence, after: Evidence) -> str:
    """``"memory"``, ``"processes"`` or ``""``: the limit of its own that something has reached between two readings of the counters."""
    if after.oom_kills > before.oom_kills and after.limit_hits > before.limit_hits:
        return "memory"
    return "processes" if after.refused_forks > before.refused_forks else ""
