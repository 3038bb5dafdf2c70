"""Imports point one way, and light things stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "sqlalchemy", "fastapi")


def loaded_after(statement: str) -> list[str]:
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        *(f"strop.core.{path.stem}" for path in sorted((ROOT / "src/strop/core").glob("[a-z]*.py"))),
        "strop.ports",
        "strop.cli.main",
        "strop.ui.results",
        "strop.ui.view",
        "strop.store.facts",
    ],
)
def test_it_imports_without_anything_heavy(module: str):
    assert loaded_after(f"import {module}") == []


def test_the_check_itself_sees_heavy_imports():
    assert loaded_after("import sqlalchemy") == ["sqlalchemy"]


def test_layers():
    done = subprocess.run([str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
