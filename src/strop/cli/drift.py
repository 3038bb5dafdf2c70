"""``strop numerics certify | localise | calibrate | price``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def certify(path: Path) -> int:
    """Compute a run's evidence again and print what was found."""
    from strop.runtime.guard import certify_run
    from strop.store import RunDir

    with RunDir.open(path) as run:
        for line in certify_run(run):
            print(line)
    return 0


def localise(path: Path, rank: int) -> int:
    """Print the first odd layer and operation of a rank."""
    from strop.runtime.guard import localise_run
    from strop.store import RunDir

    with RunDir.open(path) as run:
        for line in localise_run(run, rank):
            print(line)
    return 0


def calibrate(path: Path) -> int:
    """Measure and keep the floors of a run on this machine."""
    from strop.runtime.certify import FLOORS
    from strop.runtime.guard import calibrate_run
    from strop.store import RunDir

    with RunDir.open(path) as run:
        floors = calibrate_run(run)
    print(f"{path / FLOORS}: class {floors['fingerprint']['digest'][:12]}, weights {floors['weights_digest'][:12]}")
    for title, key in (("own kernels", "own_class"), ("torch path", "engine")):
        print(f"{title}: largest benign log-probability difference {floors[key]['logprob_max_nats']:g} nats")
        for name, value in floors[key]["variations"].items():
            print(f"  {name}: {value:g}")
    return 0


def price(path: Path, kind: str, overrides: Sequence[str]) -> int:
    """Print what each line of the precision policy is worth."""
    from strop.runtime.guard import price_model

    print(f"{'override':28}{'k3':>11}{'max diff':>11}{'ratio>2':>10}{'routes':>10}{'update':>10}{'time':>8}")
    for entry in price_model(path, kind, overrides):
        time = "-" if entry.time_ratio is None else f"{entry.time_ratio:.2f}x"
        figures = f"{entry.k3_nats:11.2e}{entry.logprob_max_nats:11.2e}{entry.ratio_above_2_frac:10.4f}{entry.routes_frac:10.4f}"
        print(f"{entry.override:28}{figures}{entry.update_error:10.2e}{time:>8}")
    return 0
