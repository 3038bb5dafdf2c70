"""The equivalence class of a machine and its software: inside it results are compared bit for bit, across classes within calibrated limits.

A class is everything that may change a rounding: processor, libraries, number types, thread count, kernels. The exact kernels are written
to give the same bits on every processor and thread count, so in exact mode these don't count.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.model.native import build
from strop.numerics.manifest import signature
from strop.store.facts import machine_facts


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A class.

    Attributes:
        facts: What it consists of, all text.
        digest: Its name.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Fingerprint:
        """Name a set of facts."""
        plain = {key: str(value) for key, value in sorted(facts.items())}
        return cls(plain, signature(plain))

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, each as ``key: here / there``."""
        keys = sorted(set(self.facts) | set(other.facts))
        return [f"{k}: {self.facts.get(k, '-')} / {other.facts.get(k, '-')}" for k in keys if self.facts.get(k) != other.facts.get(k)]


def fingerprint(mode: str, *, threads: int = 0, precision: str = "fp32") -> Fingerprint:
    """Return the class of this process.

    Args:
        mode: ``numerics.mode``.
        threads: CPU threads of the model; irrelevant in exact mode.
        precision: Number types of the rollout.
    """
    facts: dict[str, Any] = {"mode": mode, "precision": precision, "numpy": np.__version__.rpartition(".")[0]}
    if mode == "exact":
        folder = Path(build.__file__).parent
        sources = {name: (folder / name).read_text(encoding="utf-8") for name in (*build.SOURCES, *build.HEADERS)}
        return Fingerprint.of(facts | {"kernels": signature(sources), "flags": " ".join(build.FLAGS)})
    machine = machine_facts()
    return Fingerprint.of(
        facts
        | {
            "torch": torch.__version__,
            "cpu": machine["cpu"],
            "accelerator": machine["accelerator"],
            "capability": torch.backends.cpu.get_cpu_capability(),
            "blas": f"mkl {os.environ.get('MKL_CBWR', '')}".strip() if torch.backends.mkl.is_available() else "other",
            "threads": threads or torch.get_num_threads(),
            "architecture": platform.machine(),
        }
    )
