"""Helpers of the mid-training tests."""

from __future__ import annotations

from pathlib import Path

import strop.agent
from strop.midtrain.base.corpus import Module, read_module


def own_modules() -> list[Module]:
    root = Path(strop.agent.__file__).parent.parent
    found = [read_module("strop", p.name, p.read_text(encoding="utf-8")) for p in sorted(root.rglob("*.py"))]
    return [module for module in found if module is not None]
