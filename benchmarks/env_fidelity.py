"""Does the fidelity audit find what was planted, and is it silent where nothing was? ``python benchmarks/env_fidelity.py [--boxes 130]``

Planted: another host name, another test order, a latency. Each must be found, its probe first; with the same host name on both sides the
area must fall. Equal kinds: the interval must contain 0.5. ``--docker`` also holds bubblewrap against docker, with a daemon from
``scripts/with_docker.sh``.
"""

from __future__ import annotations

import argparse
import time

from strop.cli.fidelity import measure
from strop.core.errors import SandboxError
from strop.fidelity.report import ENOUGH_BOXES, FidelityReport
from strop.ui.results import write_result

PLANTED = (
    ("bubblewrap:hostname=ci-7", ("hostname", "hostname_file")),
    ("bubblewrap:order=7f", ("transcript_test_order",)),
    ("bubblewrap:latency_ms=40", ("latency_exec_ms", "latency_exec_p90_ms", "latency_python_ms", "latency_write_ms")),
)
"""Training boxes with a difference from plain ones, and the probes one of which must come first."""


def figures(report: FidelityReport) -> dict:
    """What of a report goes into the result."""
    return {
        "auc": round(report.auc, 3),
        "interval": [round(report.low, 3), round(report.high, 3)],
        "p_value": round(report.p_value, 4),
        "gate": "pass" if report.passes else "fail",
        "named": [row.probe for row in report.findings[:5]],
        "best_alone": [f"{row['probe']} {row['auc']:.3f}" for row in report.ranking[:3]],
    }


def main() -> None:
    """Measure, print, write ``docs/results/env-fidelity.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=ENOUGH_BOXES)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", type=int, default=len(PLANTED), help="how many of the planted differences")
    parser.add_argument("--docker", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()

    def ask(train: str, production: str) -> FidelityReport:
        report, _ = measure(train, production, boxes=arguments.boxes, tasks=arguments.tasks, seed=arguments.seed)
        print("\n".join(report.lines()), flush=True)
        return report

    equal = ask("bubblewrap", "bubblewrap")
    planted = [(ask(kind, "bubblewrap"), probes) for kind, probes in PLANTED[: arguments.planted]]
    fixed = ask(PLANTED[0][0], PLANTED[0][0])
    others, absent = {}, {}
    if arguments.docker:
        try:
            others["bubblewrap against docker"] = figures(ask("bubblewrap", "docker"))
        except SandboxError as error:
            absent["docker"] = str(error)
    right = [bool(report.findings) and report.findings[0].probe in probes and report.low > 0.5 for report, probes in planted]
    silent = equal.low <= 0.5 <= equal.high and not equal.findings
    falls = fixed.auc < planted[0][0].auc and fixed.low <= 0.5
    write_result(
        "env-fidelity",
        bar="fidelity audit",
        goal="planted difference found with the right probe first; equal kinds give an AUC interval containing 0.5",
        figure=f"{sum(right)} of {len(right)} found, first {planted[0][0].findings[0].probe if planted[0][0].findings else 'none'}; "
        f"AUC {planted[0][0].auc:.2f}, fixed {fixed.auc:.2f}; equal kinds {equal.auc:.2f} [{equal.low:.2f}, {equal.high:.2f}]",
        met=all(right) and silent and falls,
        command=f"python benchmarks/env_fidelity.py --boxes {arguments.boxes} --planted {arguments.planted}",
        seeds=[arguments.seed],
        notes=equal.warning,
        details={
            "boxes_a_side": arguments.boxes,
            "tasks": arguments.tasks,
            "equal": figures(equal),
            "planted": {report.train: figures(report) for report, _ in planted},
            "fixed": figures(fixed),
            **others,
            "could_not_start": absent,
            "seconds": round(time.perf_counter() - began, 1),
        },
    )


if __name__ == "__main__":
    main()
