"""What a box costs from nothing to nothing: start + first exec + stop. ``python benchmarks/env_sandbox.py``

bubblewrap by itself; docker, where a daemon answers, beside a bare ``docker run --rm`` of the same image, in turn. To have a daemon:
``scripts/with_docker.sh .venv/bin/python benchmarks/env_sandbox.py``. Wall times: on a busy machine they say little; its load is recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from pathlib import Path

from sandbox import make_base, measure, summary

from strop.core.config import SandboxConfig
from strop.core.errors import SandboxError
from strop.ports import SandboxProvider
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.docker import DockerProvider
from strop.sandboxes.docker.provider import DEFAULT_IMAGE, IMAGE_VARIABLE
from strop.ui.results import write_result

BUBBLEWRAP_P50_MS, BUBBLEWRAP_P99_MS, DOCKER_RATIO = 12.0, 40.0, 1.2


async def one_box(provider: SandboxProvider, base: str) -> None:
    """Start a box, run one command in it, stop it."""
    box = await provider.start(base)
    result = await box.exec(["true"], timeout_s=600)
    await box.stop()
    if result.exit_code != 0:
        raise SandboxError(f"true ended with {result}")


async def bubblewrap(base: str, runs: int) -> dict[str, float]:
    """Milliseconds with a running worker."""
    provider = BubblewrapProvider(SandboxConfig(workers=1))
    try:
        await provider.warm()
        await one_box(provider, base)
        return await measure(lambda: one_box(provider, base), runs)
    finally:
        await provider.close()


async def docker_and_bare(base: str, runs: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a box and of a bare ``docker run``, in turn."""
    image = os.environ.get(IMAGE_VARIABLE, DEFAULT_IMAGE)
    bare = ["docker", "run", "--rm", "--network", "none", image, "true"]
    provider = DockerProvider(SandboxConfig(workers=1))
    ours, theirs = [], []
    try:
        await one_box(provider, base)
        for _ in range(runs):
            began = time.perf_counter()
            await one_box(provider, base)
            ours.append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            subprocess.run(bare, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            theirs.append((time.perf_counter() - began) * 1e3)
    finally:
        await provider.close()
    return summary(ours), summary(theirs)


def main() -> None:
    """Measure, print, write ``docs/results/env-sandbox-*.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="bubblewrap boxes")
    parser.add_argument("--docker-runs", type=int, default=30, help="docker boxes and bare runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strop-benchmark-") as directory:
        base = str(make_base(Path(directory)))
        load = os.getloadavg()[0]
        row = asyncio.run(bubblewrap(base, arguments.runs))
        print(f"bubblewrap: {row} ms, load average {load:.1f}")
        write_result(
            "env-sandbox-bubblewrap",
            bar="start + first exec + stop, bubblewrap",
            goal=f"p50 <= {BUBBLEWRAP_P50_MS:g} ms, p99 <= {BUBBLEWRAP_P99_MS:g} ms",
            figure=row["p50"],
            unit="ms",
            met=row["p50"] <= BUBBLEWRAP_P50_MS and row["p99"] <= BUBBLEWRAP_P99_MS,
            command="python benchmarks/env_sandbox.py",
            notes="Median of wall times with a running worker; the load average of the machine before is among the details.",
            details={"milliseconds": row, "runs": arguments.runs, "load_average": load},
        )
        load = os.getloadavg()[0]
        try:
            ours, theirs = asyncio.run(docker_and_bare(base, arguments.docker_runs))
        except SandboxError as error:
            print(f"docker: not measured: {error}")
            return
        ratio = ours["p50"] / theirs["p50"]
        print(f"docker: {ours} ms, bare docker run: {theirs} ms, ratio {ratio:.2f}, load average {load:.1f}")
        write_result(
            "env-sandbox-docker",
            bar="start + first exec + stop, docker, against a bare docker run of the same image",
            goal=f"p50 <= {DOCKER_RATIO:g}x",
            figure=round(ratio, 3),
            unit="x",
            met=ratio <= DOCKER_RATIO,
            command="scripts/with_docker.sh .venv/bin/python benchmarks/env_sandbox.py",
            notes="Ratio of medians of wall times, measured in turn; the load average of the machine before is among the details.",
            details={"box_ms": ours, "bare_ms": theirs, "runs": arguments.docker_runs, "load_average": load},
        )


if __name__ == "__main__":
    main()
