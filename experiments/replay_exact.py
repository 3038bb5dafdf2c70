"""Two bars of a finished run: it can be replayed to the bit, and rollout and trainer agreed to the bit.

    python experiments/replay_exact.py RUN                (as long as the run itself)
    python experiments/replay_exact.py RUN --exact-only   (seconds: reads the metrics and the certificate)

Writes docs/results/main-exact.json and docs/results/main-replay.json; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from strop.numerics.certificate import NAME, exactness, verify_certificate
from strop.runtime.pipeline import replay_report
from strop.runtime.replay import ReplayReport
from strop.store import RunDir
from strop.ui.results import write_result
from strop.ui.view import make_view

SCRIPT = "python experiments/replay_exact.py"


def report_exact(run: RunDir, *, directory: Path | None = None) -> bool:
    """Write the largest difference between rollout and trainer over all RL steps; returns whether it is 0.

    A step that trained without a comparison counts against the bar: nothing may be exact for want of a look at it.
    """
    records = run.store.metrics(phase="rl")
    figures = exactness(records)
    idle = sum(record.get("rl/skipped_steps", 0.0) > 0 for record in records)
    steps = sum(not commit.stage for commit in run.store.commits(phase="rl"))
    body = verify_certificate(run.path / NAME, run.path)
    largest, compared = figures["logprob_diff_max_nats"], figures["tokens"]
    is_looked_at = compared > 0 and figures["steps_compared"] + idle == len(records) == steps
    met = is_looked_at and largest == 0.0 and figures["is_exact"] == 1.0 and figures["nonfinite"] == 0.0
    sampled = sum(int(trace.loss_mask.sum()) for episode in run.store.episodes(phase="rl") for trace in episode.traces)
    write_result(
        "main-exact",
        bar="exact mode: largest difference of log-probabilities over a whole run",
        goal="0",
        figure=largest,
        unit="nats",
        met=met,
        command=f"{SCRIPT} {run.path} --exact-only",
        seeds=(run.config.seed,),
        notes="Every token that RL trained on: as the engine drew it, against the trainer's forward pass on the same weights. Groups "
        "without signal are sampled but never trained on, so that the trainer has nothing to compare for them.",
        details={
            "run": run.config.name,
            "tokens compared": int(compared),
            "tokens sampled in RL": sampled,
            "steps": steps,
            "steps compared": int(figures["steps_compared"]),
            "steps without signal": idle,
            "largest share of routes that differ": figures["route_mismatch_max_frac"],
            "tensors certified": len(body["tensors"]),
        },
        directory=directory,
    )
    print(f"exact: {largest:g} nats over {compared:,.0f} tokens of {figures['steps_compared']:g}/{steps} steps: {_word(met)}")
    return met


def report_replay(run: RunDir, found: ReplayReport, seconds: float, *, directory: Path | None = None) -> bool:
    """Write how much of a run its replay reproduced; returns whether that is everything."""
    episodes = sum(run.store.counts().values())
    met = not found.differences and found.episodes + found.unplayed == episodes and found.tokens > 0 and found.digests > 0
    write_result(
        "main-replay",
        bar="strop replay reproduces every token, reward and digest of a finished run",
        goal="no difference",
        figure=found.differences[0] if found.differences else "no difference",
        met=met,
        command=f"{SCRIPT} {run.path}",
        seeds=(run.config.seed,),
        details={
            "run": run.config.name,
            "episodes in the record": episodes,
            "episodes compared": found.episodes,
            "episodes lost to machinery in the record": found.unplayed,
            "tokens compared": found.tokens,
            "commit points compared": found.commits,
            "digests compared": found.digests,
            "seconds": round(seconds, 1),
        },
        directory=directory,
    )
    counted = f"{found.episodes:,} of {episodes:,} episodes, {found.tokens:,} tokens, {found.digests} digests"
    print(f"replay: {counted}: {_word(met)}")
    for difference in found.differences:
        print(f"differs: {difference}")
    return met


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--exact-only", action="store_true", help="don't replay")
    options = parser.parse_args()
    with RunDir.open(options.run) as run:
        if not run.store.is_done("report"):
            raise SystemExit(f"{options.run} is not finished (stage {run.store.stage() or 'none'}); continue it with strop run --resume")
        is_met = report_exact(run)
        if not options.exact_only:
            view, began = make_view(plain=True), time.perf_counter()
            try:
                found = replay_report(run, view)
            finally:
                view.close()
            is_met &= report_replay(run, found, time.perf_counter() - began)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
