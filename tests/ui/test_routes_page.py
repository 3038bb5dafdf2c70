"""The page of routers is drawn from what a run logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.core.config import RunConfig
from strop.core.errors import CheckpointError
from strop.store import RunDir
from strop.ui.routes_page import build_routes_page


def test_page_shows_load_churn_and_price(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", RunConfig()) as run:
        with pytest.raises(CheckpointError, match="no figures about routes"):
            build_routes_page(run.store, "toy")
        for step in range(3):
            loads = {f"routes/load_layer{layer}_expert{expert}": 0.5 for layer in range(2) for expert in range(2)}
            layers = {f"routes/suppressed_layer{layer}_frac": 0.1 * step for layer in range(2)}
            figures = {"routes/churn_frac": 0.1, "routes/tax_nats": 0.01 * step, "routes/anchor_agree_frac": 0.9}
            run.store.log(step, loads | layers | figures)
        page = build_routes_page(run.store, "toy <script>")
    assert "<script>" not in page
    for text in (
        "Expert load",
        "layer 1",
        "choices overridden by replay",
        "Churn and lock-in",
        "What replay costs",
        "Agreement with the anchor",
    ):
        assert text in page
    assert page.count("<svg") >= 6
