"""What a box costs: start, file operations, commands, and the warm runner beside the real interpreter.

The workload of ``run_python`` is the bar's: eight small unittest tests that import a module of 300 lines. Wall times depend on what
else the machine does (its load is printed), so the CPU time of a run is printed beside them.

    python benchmarks/sandbox.py [--runs 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from strop.core.config import SandboxConfig
from strop.sandboxes import BubblewrapProvider
from strop.sandboxes.bytecode import compile_tree

BARS = {"start": 1.0, "run_python": 12.0, "read": 0.1, "write": 0.1, "list_files": 0.1, "changes": 0.1}


def make_base(root: Path) -> Path:
    """A package with a module of 300 lines, eight tests of it, and enough other files to make a typical tree."""
    base = root / "base"
    (base / "pkg").mkdir(parents=True)
    (base / "tests").mkdir()
    function = (
        'def f{0}(a, b=1):\n    """Sum of even minus odd numbers below a."""\n    total = 0\n    for x in range(a):\n'
        "        if x % 2 == 0:\n            total += x * b\n        else:\n            total -= x\n    return total\n\n"
    )
    (base / "pkg/__init__.py").write_text("")
    (base / "pkg/module.py").write_text("".join(function.format(number) for number in range(30)))
    for number in range(60):
        (base / f"pkg/other{number}.py").write_text(function.format(number))
    (base / "tests/__init__.py").write_text("")
    tests = "".join(f"    def test_{n}(self):\n        self.assertEqual(module.f{n}(4), -2)\n\n" for n in range(8))
    (base / "tests/test_module.py").write_text(
        f"import unittest\n\nfrom pkg import module\n\n\nclass ModuleTest(unittest.TestCase):\n{tests}"
    )
    return base


def summary(samples_ms: list[float]) -> dict[str, float]:
    """Percentiles of a list of times."""
    ordered = sorted(samples_ms)
    at = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)  # noqa: E731
    return {"min": round(ordered[0], 3), "p50": at(0.5), "p99": at(0.99)}


async def measure(action: Callable[[], Awaitable[object]], runs: int) -> dict[str, float]:
    """Wall milliseconds of ``action``."""
    samples = []
    for _ in range(runs):
        started = time.perf_counter()
        await action()
        samples.append((time.perf_counter() - started) * 1e3)
    return summary(samples)


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its reaped children, and its living descendants likewise."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        total += sum(tree_cpu_s(int(child)) for child in children.read_text().split())
    return total


def immediate(function: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    """Make a plain function awaitable."""

    async def call() -> object:
        return function()

    return call


async def run(runs: int) -> dict[str, dict[str, float]]:
    """Measure everything; milliseconds."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="strop-benchmark-") as directory:
        base = make_base(Path(directory))
        compile_tree(str(base))
        provider = BubblewrapProvider(SandboxConfig(workers=1))
        try:
            await provider.warm()
            results["start"] = await measure(lambda: provider.start(str(base)), runs)
            box = await provider.start(str(base))
            source = box.read("pkg/module.py")
            for name, action in {
                "read": lambda: box.read("pkg/module.py"),
                "write": lambda: box.write("pkg/module.py", source + b"# edited\n"),
                "list_files": box.list_files,
                "changes": box.changes,
            }.items():
                results[name] = await measure(immediate(action), runs)
            tests = ["-m", "unittest", "-q", "tests.test_module"]
            isolated = [str(base)]
            cases: dict[str, tuple[Callable[[], Awaitable[object]], int]] = {
                "run_python": (lambda: box.run_python(tests, timeout_s=60), runs),
                "run_python, nothing to do": (lambda: box.run_python(["-c", "pass"], timeout_s=60), runs),
                "run_isolated": (lambda: provider.run_isolated(isolated, tests, timeout_s=60), runs),
                "exec true": (lambda: box.exec(["true"], timeout_s=60), runs),
                "exec real python": (lambda: box.exec(["python3", *tests], timeout_s=60), max(5, runs // 10)),
            }
            worker = provider._pool._workers[0].pid
            for name, (case, count) in cases.items():
                before, own = tree_cpu_s(worker), time.process_time()
                results[name] = await measure(case, count)
                results[name]["cpu"] = round((tree_cpu_s(worker) - before) * 1e3 / count, 2)
                results[name]["host_cpu"] = round((time.process_time() - own) * 1e3 / count, 2)
        finally:
            await provider.close()
    return results


def main() -> None:
    """Print the table and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    results = asyncio.run(run(arguments.runs))
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    print(f"{'milliseconds':28}{'min':>9}{'p50':>9}{'p99':>9}{'cpu':>8}{'host':>8}   bar (p50)")
    for name, row in results.items():
        bar = f"<= {BARS[name]:g}" if name in BARS else ""
        extra = f"{row['cpu']:8.2f}{row['host_cpu']:8.2f}" if "cpu" in row else " " * 16
        print(f"{name:28}{row['min']:9.3f}{row['p50']:9.3f}{row['p99']:9.3f}{extra}   {bar}")
    print(f"{os.cpu_count()} cores, load average {load[0]} before and {load[1]} after, Linux {platform.release()}")
    if arguments.json:
        report = {"milliseconds": results, "bars_p50": BARS, "load_average": load, "cores": os.cpu_count(), "runs": arguments.runs}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
