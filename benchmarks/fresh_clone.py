"""How long a bare clone takes to a served model, and how much memory: `make quickstart` with an empty home and environment.

python benchmarks/fresh_clone.py                (clones this repository into a temporary directory; about 12 minutes on two idle cores)
python benchmarks/fresh_clone.py --log FILE     (reads what an earlier run wrote)

Downloads are included. Needs GNU time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from strop.core.errors import StropError
from strop.ui.results import write_result

GOAL_S, GOAL_BYTES = 900.0, 4e9
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb"}


def run(log: Path) -> None:
    """Clone, run, and write everything that was printed to ``log``."""
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder) / "strop", Path(folder) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "-q", str(here), str(clone)], check=True)
        with log.open("wb") as file:
            subprocess.run(
                ["/usr/bin/time", "-v", "make", "quickstart"],
                cwd=clone,
                env=ENVIRONMENT | {"HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )


def read(log: Path) -> tuple[float, float]:
    """Return seconds and bytes of a finished run.

    Raises:
        StropError: The run failed, or the log isn't of one.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    wall = re.search(r"Elapsed \(wall clock\) time \(h:mm:ss or m:ss\): (?:(\d+):)?(\d+):([\d.]+)", text)
    memory = re.search(r"Maximum resident set size \(kbytes\): (\d+)", text)
    if wall is None or memory is None or "Exit status: 0" not in text or "serve:  strop serve" not in text:
        raise StropError(f"{str(log)!r} isn't the log of a quickstart that ended well: no time, no memory, or no line that serves")
    return 3600 * int(wall[1] or 0) + 60 * int(wall[2]) + float(wall[3]), 1024.0 * int(memory[1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    log = options.log
    if log is None:
        log = Path(tempfile.gettempdir()) / "strop-fresh-clone.log"
        run(log)
    seconds, memory = read(log)
    print(f"fresh clone to served model: {seconds / 60:.1f} min, largest process {memory / 1e9:.2f} GB")
    write_result(
        "main-fresh-clone",
        bar="fresh clone to served model, set-up and downloads included, with peak memory in the details",
        goal="<= 15 min, <= 4 GB",
        figure=round(seconds / 60, 2),
        unit="min",
        met=seconds <= GOAL_S and memory <= GOAL_BYTES,
        command="python benchmarks/fresh_clone.py",
        seeds=[0],
        details={"peak_process_bytes": memory},
    )


if __name__ == "__main__":
    main()
