"""Random trees, diffs and result streams through the grader's pure parts: no crash, no reward that the evidence doesn't support.

    python benchmarks/grading_fuzz.py [--cases 100000]

A second, simpler reading of every stream says what it is worth (``tests/grading/fuzz_world.py``). The first failure is printed with the
seed that repeats it. Writes docs/results/grader-fuzz.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import grading_common  # noqa: F401 - puts the suite on the path
from fuzz_world import Fuzz

from strop.ui.results import write_result

CHUNK = 500
KINDS = ("stream", "tree", "diff")


def main() -> int:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    done, failures, rewarded, written = Counter[str](), Counter[str](), 0, 0
    began = time.process_time()
    for number in range(0, arguments.cases, CHUNK):
        kind = KINDS[number // CHUNK % len(KINDS)]
        with tempfile.TemporaryDirectory() as folder:
            fuzz = Fuzz(arguments.seed * 1_000_003 + number, Path(folder))
            for _ in range(min(CHUNK, arguments.cases - number)):
                try:
                    getattr(fuzz, kind)()
                except Exception:
                    if not failures[kind]:
                        print(f"{kind}, seed {arguments.seed}, chunk {number}:\n{traceback.format_exc()}")
                    failures[kind] += 1
                done[kind] += 1
            rewarded += fuzz.rewarded
            written += fuzz.written
    print(f"{done.total()} cases {dict(done)}, {failures.total()} failures, {rewarded} streams rewarded, {written} trees written")
    if not arguments.no_write:
        path = write_result(
            "grader-fuzz",
            bar="random trees, diffs and result streams",
            goal="100,000: no crash, no reward above what the evidence supports",
            figure=f"{failures.total()} failures in {done.total():,}",
            met=not failures.total() and done.total() >= 100_000,
            command=f"python benchmarks/grading_fuzz.py --cases {arguments.cases}",
            seeds=(arguments.seed,),
            details={**done, "rewarded_streams": rewarded, "written_trees": written, "cpu_s": round(time.process_time() - began, 1)},
        )
        print(path)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
