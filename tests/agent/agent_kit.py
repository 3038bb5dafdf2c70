"""A small tokenizer, a small package with a bug, a sandbox that is a plain directory, and a stage that plays episodes on them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from strop.agent import compact
from strop.agent.episode import run_episode
from strop.agent.render import ActionRenderer
from strop.agent.scripted import Policy, ScriptedEngine
from strop.agent.tools import Toolbox
from strop.agent.toolspec import name_arguments
from strop.agent.workspace import TreeCache
from strop.core.episode import Episode, EpisodeKey
from strop.core.task import Limits, Task
from strop.ports import Engine, ExecResult, SandboxCapabilities

BUGGY = "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x < high:\n        return high\n    return x\n"
TESTS = """import unittest

from pkg.numbers import clamp


class TestClamp(unittest.TestCase):
    def test_above(self):
        self.assertEqual(clamp(9, 0, 5), 5)

    def test_inside(self):
        self.assertEqual(clamp(3, 0, 5), 3)


if __name__ == "__main__":
    unittest.main()
"""
TOOLS = ("list", "search", "read", "edit", "test", "undo", "submit")


def train_tokenizer(vocab_size: int = 700, special_tokens: Sequence[str] = compact.SPECIAL_TOKENS) -> Tokenizer:
    """Byte-level BPE, digits in groups of up to three."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    corpus = [BUGGY, TESTS, compact.SYSTEM_PROMPT] * 3 + [" ".join(map(str, range(300)))]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


class DirSandbox:
    """Implements ``ports.Sandbox`` over a copy of the base; for trusted code only."""

    def __init__(self, base: Path, root: Path) -> None:
        self.base, self.root = base, root
        self.is_stopped = False
        self.reads = 0
        shutil.copytree(base, root)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> ExecResult:
        started = time.perf_counter()
        env = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = await asyncio.to_thread(
                subprocess.run, argv, cwd=self.root, env=env, input=stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return ExecResult(exit_code=None, output="", duration_s=time.perf_counter() - started, killed_by="timeout")
        # Every box is at the same place for the code inside it, as in a real sandbox.
        output = (done.stdout + done.stderr).decode("utf-8", "replace").replace(str(self.root), "/workspace")
        return ExecResult(exit_code=done.returncode, output=output, duration_s=time.perf_counter() - started)

    async def run_python(self, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        return await self.exec([sys.executable, *argv], timeout_s=timeout_s)

    def read(self, path: str) -> bytes:
        self.reads += 1
        return (self.root / path).read_bytes()

    def write(self, path: str, content: bytes | None) -> None:
        if content is None:
            (self.root / path).unlink()
        else:
            (self.root / path).write_bytes(content)

    def list_files(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def changes(self) -> dict[str, bytes | None]:
        new = {path: (self.root / path).read_bytes() for path in self.list_files()}
        old = {str(p.relative_to(self.base)): p.read_bytes() for p in self.base.rglob("*") if p.is_file()}
        changed: dict[str, bytes | None] = {path: content for path, content in new.items() if old.get(path) != content}
        return changed | {path: None for path in old if path not in new}

    async def stop(self) -> None:
        self.is_stopped = True
        shutil.rmtree(self.root, ignore_errors=True)


class DirProvider:
    """Implements ``ports.SandboxProvider``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.boxes: list[DirSandbox] = []

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(
            network_isolation=False,
            memory_limit=False,
            process_limit=False,
            kernel_evidence=False,
            warm_runner=False,
            snapshots=False,
            missing={},
        )

    async def start(self, base: str) -> DirSandbox:
        box = DirSandbox(Path(base), self._root / f"box{len(self.boxes)}")
        self.boxes.append(box)
        return box

    async def close(self) -> None:
        for box in self.boxes:
            await box.stop()


class OneTaskPool:
    """Implements ``ports.TaskPool`` with one base directory."""

    def __init__(self, task: Task, base: Path) -> None:
        self._task, self._base = task, base

    def tasks(self, split: str) -> Sequence[Task]:
        return [self._task] if split == self._task.split else []

    def base_dir(self, task: Task) -> str:
        return str(self._base)


def make_task(**changes: object) -> Task:
    fields: dict[str, object] = {
        "task_id": "demo:clamp#1",
        "instruction": "The tests fail. Find the bug and repair it.\n\nAssertionError: 9 != 5",
        "workspace": "demo#1",
        "tools": TOOLS,
        "verifier": "demo#1",
        "split": "train",
        "limits": Limits(max_tokens=4000, exec_s=20.0),
    }
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


KEY = EpisodeKey(phase="eval.test", step=0, task_id="demo:clamp#1", sample=0)


class Plays:
    """A policy that plays given actions and keeps what it saw."""

    def __init__(self, *actions: tuple[str, ...]) -> None:
        self.actions = list(actions)
        self.seen: list[str | None] = []

    def act(self, observation: str | None) -> tuple[str, list[str]]:
        self.seen.append(observation)
        name, *values = self.actions.pop(0) if self.actions else ("list",)
        return name, values


@dataclass
class Stage:
    """Everything that an episode needs."""

    base: Path
    provider: DirProvider
    renderer: ActionRenderer

    def engine(self, policy: Policy) -> ScriptedEngine:
        return ScriptedEngine(self.renderer, lambda key: policy)

    def play(self, policy: Policy, task: Task | None = None, engine: Engine | None = None, **options: object) -> Episode:
        task = task or make_task()
        run = run_episode(
            task,
            KEY,
            engine=engine or self.engine(policy),
            sandbox_provider=self.provider,
            pool=OneTaskPool(task, self.base),
            renderer=self.renderer,
            temperature=1.0,
            **options,  # type: ignore[arg-type]
        )
        return asyncio.run(run)


class Hands:
    """Calls tools with positional arguments and returns the observation."""

    def __init__(self, sandbox: DirSandbox, task: Task, cache: TreeCache | None = None) -> None:
        self.box = Toolbox(task, sandbox, base="base", cache=cache or TreeCache())

    def __call__(self, name: str, *values: str) -> str:
        self.result = asyncio.run(self.box.call(name, name_arguments(name, values)))
        assert self.result.observation.startswith("error: ") == (self.result.status == "tool_error")
        return self.result.observation
