"""One suite over every family of routers. ``python benchmarks/routes_families.py``

Runs ``tests/model/test_routing.py`` and writes ``docs/results/routes-families.json`` and ``routes-gradients.json``.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from strop.ui.results import write_result

SUITE = Path("tests/model/test_routing.py")


class Verdicts:
    """Collects passed and failed tests by name and family."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's verdict; pytest calls this."""
        if report.when == "call" or report.failed:
            name = report.nodeid.partition("::")[2]
            match = re.fullmatch(r"(\w+)\[(.+)\]", name)
            place = (match[1], match[2]) if match else (name, "")
            self.passed[place] = report.passed and self.passed.get(place, True)


def main() -> int:
    """Run the suite and write both results; 1 if a test failed."""
    verdicts = Verdicts()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(SUITE)], plugins=[verdicts])
    families: dict[str, list[bool]] = defaultdict(list)
    for (_, family), passed in verdicts.passed.items():
        if family:
            families[family].append(passed)
    good = sum(all(found) for found in families.values())
    write_result(
        "routes-families",
        bar="families of routers that pass the same suite",
        goal="all of Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V3/Kimi-K2, GLM-4-MoE, gpt-oss",
        figure=f"{good} of {len(families)}",
        met=bool(families) and good == len(families),
        command="python benchmarks/routes_families.py",
        notes="Tiny random instances of the real transformers classes; Kimi-K2 runs DeepSeek-V3's. Qwen3-MoE also with a dense layer.",
        details={family: f"{sum(found)} of {len(found)} tests" for family, found in sorted(families.items())},
    )
    gradients = {f"{name} {family}": ok for (name, family), ok in verdicts.passed.items() if "gradient" in name or "recomputed" in name}
    write_result(
        "routes-gradients",
        bar="router gradients under replay",
        goal="non-zero at drifted routes and equal to finite differences; zero through the selection",
        figure=f"{sum(gradients.values())} of {len(gradients)} tests",
        met=bool(gradients) and all(gradients.values()),
        command="python benchmarks/routes_families.py",
        notes="Central differences along a random direction of the last router's weight, relative error below 2 %, float64 models "
        "whose routers score in float32; gradients with checkpointing equal those without.",
        details={"families": sorted(families)},
    )
    return 0 if verdicts.passed and all(verdicts.passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
