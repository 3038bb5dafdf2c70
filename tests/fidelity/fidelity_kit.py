"""Boxes that are made up: answers by a script instead of by a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strop.fidelity.collect import Observation
from strop.fidelity.inside import PROBES as INSIDE
from strop.fidelity.probes import PROBES, Value
from strop.ports import ExecResult

Plant = Callable[[bool, np.random.Generator], dict[str, Value]]


def nothing(is_production: bool, rng: np.random.Generator) -> dict[str, Value]:
    """Plant no difference."""
    return {}


def world(boxes: int, tasks: int, seed: int, plant: Plant = nothing) -> list[Observation]:
    """Boxes that differ by chance and by task, and by what ``plant`` says."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(boxes):
        group = f"task{index % tasks}"
        for is_production in (False, True):
            values: dict[str, Value] = dict.fromkeys(PROBES, "same")
            values |= {"latency_exec_ms": float(rng.gamma(4, 2)), "load": float(rng.gamma(1, 1)), "uptime_s": 1e4 + index}
            values |= {"processes": tuple(word for word in ("sh", "python", "sleep") if rng.random() < 0.5)}
            values |= {"transcript_tests": ("0 failures", group), "path": f"/workspace/{group}"}
            rows.append(Observation(is_production=is_production, group=group, values=values | plant(is_production, rng)))
    return rows


class ScriptedBox:
    """A box whose every command prints what it is told to."""

    def __init__(self, output: str | Callable[[Sequence[str]], str], hostname: str = "box") -> None:
        self._output = output
        self._hostname = hostname
        self.stopped = False

    def _answer(self, argv: Sequence[str]) -> ExecResult:
        text = self._output(argv) if callable(self._output) else self._output
        return ExecResult(exit_code=0, output=text, duration_s=0.001)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        return self._answer(argv)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        return self._answer(argv)

    def list_files(self) -> list[str]:
        return ["pkg/boom.py"]

    async def stop(self) -> None:
        self.stopped = True


class ScriptedProvider:
    """Starts ``ScriptedBox``es."""

    def __init__(self, output: str | Callable[[Sequence[str]], str]) -> None:
        self._output = output
        self.boxes: list[ScriptedBox] = []

    async def start(self, base: str, **_: Any) -> ScriptedBox:
        self.boxes.append(ScriptedBox(self._output))
        return self.boxes[-1]

    async def close(self) -> None: ...


def honest(hostname: str) -> Callable[[Sequence[str]], str]:
    """Answers like ``inside`` with every probe the same but the host name."""

    def answer(argv: Sequence[str]) -> str:
        names = [name for name in argv if name in INSIDE]
        text = json.dumps({name: hostname if name == "hostname" else "same" for name in names})
        return f"{len(text)}\n{text}\n"

    return answer
