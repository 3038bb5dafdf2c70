"""Fixtures of the agent room."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_kit import BUGGY, TESTS, DirProvider, DirSandbox, Hands, Stage, make_task, train_tokenizer
from tokenizers import Tokenizer

from strop.agent.render import CompactRenderer
from strop.core.task import Task


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> CompactRenderer:
    return CompactRenderer(tokenizer)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """``[1] README.md  [2] pkg/__init__.py  [3] pkg/numbers.py  [4] tests/__init__.py  [5] tests/test_numbers.py``."""
    root = tmp_path / "base"
    (root / "pkg").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "README.md").write_text("clamp keeps a number within bounds\n")
    (root / "pkg" / "__init__.py").write_text("")
    (root / "pkg" / "numbers.py").write_text(BUGGY)
    (root / "tests" / "__init__.py").write_text("")
    (root / "tests" / "test_numbers.py").write_text(TESTS)
    return root


@pytest.fixture
def sandbox(base: Path, tmp_path: Path) -> DirSandbox:
    return DirSandbox(base, tmp_path / "box")


@pytest.fixture
def task() -> Task:
    return make_task()


@pytest.fixture
def stage(base: Path, tmp_path: Path, renderer: CompactRenderer) -> Stage:
    return Stage(base, DirProvider(tmp_path), renderer)


@pytest.fixture
def hands(sandbox: DirSandbox, task: Task) -> Hands:
    return Hands(sandbox, task)
