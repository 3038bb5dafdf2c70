"""How many boxes live at once, and what is left of thousands. ``python benchmarks/env_density.py [--boxes 200] [--cycles 5000]``

Boxes at once: every one has files of its own and an open shell with a process in it, and answers when asked again. Cycles: start, write,
command, stop. Before and after, everything is counted that could be left: mounts, control groups, processes, directories, descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
from pathlib import Path

from strop.core.config import SandboxConfig
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.cgroups import find_hierarchies
from strop.sandboxes.conformance import make_base
from strop.ui.results import write_result


def descendants(pid: int) -> list[int]:
    """Living processes below a process."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def count_all() -> dict[str, int]:
    """What this process and its children hold of the machine."""
    home = Path(tempfile.gettempdir()) / f"strop-sandboxes-{os.getuid()}"
    owner = f"strop-{os.getpid()}-"
    gc.collect()
    return {
        "mounts": sum(str(home) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "control_groups": sum(
            1
            for parent in {found.parent for found in find_hierarchies().values()}
            for path in parent.rglob("*")
            if owner in str(path) and path.is_dir()
        ),
        "processes": len(descendants(os.getpid())),
        "directories": sum(1 for own in home.glob(f"{owner}*") for path in own.rglob("*") if path.is_dir()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


async def many_at_once(provider: BubblewrapProvider, base: str, boxes: int, at_a_time: int) -> dict[str, float]:
    """Open ``boxes`` boxes with a shell each, ask all of them again, close them."""
    slots = asyncio.Semaphore(at_a_time)

    async def begin(number: int):
        async with slots:
            box = await provider.start(base)
            box.write("number", f"{number}\n".encode())
            shell = await box.open_shell()
            await shell.run(f"n={number}; sleep 100000 & true", timeout_s=600)
            return box, shell

    began = time.perf_counter()
    alive = await asyncio.gather(*(begin(number) for number in range(boxes)))
    started = time.perf_counter()
    during = count_all()

    async def ask(number: int) -> bool:
        box, shell = alive[number]
        async with slots:
            first = await shell.run("echo $n; cat number; jobs | grep -c Running", timeout_s=600)
            second = await box.exec(["cat", "number"], timeout_s=600)
            return first.output.split() == [str(number), str(number), "1"] and second.output == f"{number}\n"

    right = await asyncio.gather(*(ask(number) for number in range(boxes)))
    for box, _ in alive:
        await box.stop()
    return {
        "boxes": boxes,
        "answered_right": sum(right),
        "start_s": round(started - began, 2),
        "processes_alive": during["processes"],
        "control_groups_alive": during["control_groups"],
    }


async def cycle(provider: BubblewrapProvider, base: str) -> None:
    """One box from start to stop."""
    box = await provider.start(base)
    box.write("file", b"x")
    await box.exec(["sh", "-c", "echo y > made; sleep 1000 & true"], timeout_s=600)
    await box.stop()


async def run(base: str, boxes: int, cycles: int, workers: int) -> tuple[dict[str, float], dict[str, int], dict[str, int], float]:
    """Everything; returns the boxes' figures, the counts before and after, and the seconds of the cycles."""
    warm_up = BubblewrapProvider(SandboxConfig(workers=1))
    await cycle(warm_up, base)
    await warm_up.close()
    before = count_all()
    provider = BubblewrapProvider(SandboxConfig(workers=workers, memory_mb=64, processes=16, disk_mb=8))
    alive = await many_at_once(provider, base, boxes, workers)
    began = time.perf_counter()
    for start in range(0, cycles, workers):
        await asyncio.gather(*(cycle(provider, base) for _ in range(min(workers, cycles - start))))
    spent = time.perf_counter() - began
    await provider.close()
    return alive, before, count_all(), spent


def main() -> None:
    """Measure, print, write ``docs/results/env-density.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=5_000)
    parser.add_argument("--workers", type=int, default=2, help="boxes that run something at the same time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strop-benchmark-") as directory:
        base = str(make_base(Path(directory)))
        alive, before, after, spent = asyncio.run(run(base, arguments.boxes, arguments.cycles, arguments.workers))
    leaked = {name: after[name] - before[name] for name in before}
    print(f"{alive}\nbefore {before}\nafter  {after}\n{arguments.cycles} cycles in {spent:.1f} s")
    kept = sum(map(abs, leaked.values()))
    is_full = arguments.boxes >= 200 and arguments.cycles >= 5_000
    write_result(
        "env-density",
        bar="boxes alive at once, and what start/stop cycles leave",
        goal="200 bubblewrap boxes alive at once on two cores, none leaked after 5,000 cycles",
        figure=f"{alive['answered_right']:.0f} of {arguments.boxes} alive, {kept} leaked after {arguments.cycles:,}",
        met=is_full and alive["answered_right"] == arguments.boxes and not kept,
        command="python benchmarks/env_density.py",
        notes="Every box alive holds an open shell with a background process in it."
        + ("" if is_full else " A small run; the bar asks for 200 boxes and 5,000 cycles."),
        details={
            "alive": alive,
            "before": before,
            "after": after,
            "leaked": leaked,
            "cycles": arguments.cycles,
            "cycles_s": round(spent, 1),
        },
    )


if __name__ == "__main__":
    main()
