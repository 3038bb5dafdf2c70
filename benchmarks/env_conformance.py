"""The sandbox conformance suite over the back ends of this machine. ``python benchmarks/env_conformance.py [bubblewrap docker]``

To have a docker daemon: ``scripts/with_docker.sh .venv/bin/python benchmarks/env_conformance.py``. A back end that can't start here is left
out, and then the bar isn't met.
"""

from __future__ import annotations

import argparse
import asyncio

from strop.cli.registry import SANDBOXES
from strop.core.errors import SandboxError
from strop.sandboxes.conformance import CheckResult, run_conformance
from strop.ui.results import write_result


def main() -> None:
    """Run, print, write ``docs/results/env-conformance.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["bubblewrap", "docker"])
    arguments = parser.parse_args()
    found: dict[str, list[CheckResult]] = {}
    absent: dict[str, str] = {}
    for name in arguments.backends:
        SANDBOXES.load(name)
        try:
            found[name] = asyncio.run(run_conformance(SANDBOXES.targets()[name]))
        except SandboxError as error:
            absent[name] = str(error)
            print(f"{name}: {error}")
    counts = {
        name: {status: sum(row.status == status for row in rows) for status in ("pass", "missing", "fail")} for name, rows in found.items()
    }
    for name, rows in found.items():
        for row in rows:
            if row.status != "pass":
                print(f"{name}: {row.status} {row.name}: {row.detail}")
    figure = "; ".join(f"{name} {count['pass']} of {sum(count.values())}" for name, count in counts.items())
    print(figure)
    write_result(
        "env-conformance",
        bar="sandbox conformance",
        goal="100 % on bubblewrap and docker",
        figure=figure or "nothing could be started",
        met={"bubblewrap", "docker"} <= set(found) and all(count["pass"] == sum(count.values()) for count in counts.values()),
        command="scripts/with_docker.sh .venv/bin/python benchmarks/env_conformance.py",
        details={
            "counts": counts,
            "not_passed": {
                name: {row.name: f"{row.status}: {row.detail}" for row in rows if row.status != "pass"} for name, rows in found.items()
            },
            "checks": {name: [row.name for row in rows] for name, rows in found.items()},
            "could_not_start": absent,
        },
    )


if __name__ == "__main__":
    main()
