"""``strop routes record | report`` and ``strop model upcycle``."""

from __future__ import annotations

from pathlib import Path


def record(path: Path, limit: int) -> int:
    """Record a run's routes and print what was written."""
    from strop.runtime.routes import record_run
    from strop.store import RunDir

    with RunDir.open(path) as run:
        written = record_run(run, limit=limit)
    print(f"{written['folder']}: {written['streams']} streams, {written['rows']} rows, {written['bytes']} bytes")
    return 0


def report(path: Path, out: Path | None) -> int:
    """Write the page of a run's routers and print its path."""
    from strop.store import RunDir
    from strop.store.files import write_atomic
    from strop.ui.routes_page import build_routes_page

    with RunDir.open(path) as run:
        text = build_routes_page(run.store, run.config.name)
    target = out if out is not None else path / "routes.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text.encode())
    print(target)
    return 0


def upcycle(source: str, target: Path, experts: int, top_k: int, seed: int) -> int:
    """Make an MoE of a dense checkpoint and print how far its outputs lie from the dense model's."""
    from strop.model.upcycle import upcycle_checkpoint

    result = upcycle_checkpoint(source, target, experts=experts, top_k=top_k, seed=seed)
    print(f"{target}: {result.layers} layers of {experts} experts, top {top_k}; largest logit difference {result.max_abs_diff:.3g}")
    return 0
