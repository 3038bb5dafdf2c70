"""Made-up test output has the grammar of the real one; an episode's way to the function can be followed from what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from base_kit import own_modules
from tokenizers import Tokenizer

from strop.agent.compact import content_tokenizer
from strop.agent.output import HEAD_CHARS, TAIL_CHARS
from strop.midtrain.base.corpus import Module
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.failures import Suspect, failing_tests
from strop.midtrain.base.names import NameMaker
from strop.tasks.pool import INSTRUCTION, open_pool

HEAD = re.compile(
    r"={70}\n(?:FAIL|ERROR): (test_\d+) \(test_(?P<stem>\w+)\.Test\w+\.\1\)\n-{70}\nTraceback \(most recent call last\):\n"
    r'  File "/workspace/tests/test_(?P=stem)\.py", line \d+, in \1\n    \S'
)
TAIL = re.compile(r"Ran 8 tests\n\nFAILED \((?:failures|errors)=\d+(?:, errors=\d+)?\)\Z")
FRAME = re.compile(r'  File "/workspace/([\w./]+)", line (\d+), in (\w+)\n    (\S.*)\n')
SUSPECT = Suspect(name="get_cell", path="kit/table.py", frames=((40, "def get_cell(a, b):"), (41, "    return a + b")), bug=1)


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return own_modules()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from importlib import resources

    return content_tokenizer(Tokenizer.from_file(str(resources.files("strop").joinpath("assets", "models", "tiny", "tokenizer.json"))))


def _made_up(count: int = 200) -> list[str]:
    return [failing_tests(np.random.default_rng(seed), SUSPECT) for seed in range(count)]


def test_made_up_output_has_the_grammar_of_the_real_one(tmp_path: Path) -> None:
    tasks = open_pool("builtin:repair", tmp_path).tasks("train")[::20]
    real = [task.instruction.removeprefix(INSTRUCTION) for task in tasks]
    assert np.mean([bool(HEAD.match(text) and TAIL.search(text)) for text in real]) > 0.95
    for text in _made_up():
        assert HEAD.match(text), text
        assert TAIL.search(text), text
        assert len(text) <= HEAD_CHARS + TAIL_CHARS + 40


def test_frames_are_as_frequent_as_in_real_output_and_point_at_the_bug_as_often(tmp_path: Path) -> None:
    pool = open_pool("builtin:repair", tmp_path)
    found = right = 0
    tasks = pool.tasks("train")
    for task in tasks:
        path, span = pool.function(task)
        lines = [int(n) for file, n, _, _ in FRAME.findall(task.instruction) if file == path and span.start_line <= int(n) <= span.end_line]
        found += bool(lines)
        right += bool(lines) and lines[0] == pool.gold_edit(task).line
    texts = _made_up(1000)
    frames = [match for text in texts if (match := FRAME.search(text.split("in test_")[1] if "in test_" in text else text))]
    assert abs(found / len(tasks) - len(frames) / len(texts)) < 0.1
    made_up_right = np.mean([match[2] == "41" for match in frames])
    assert abs(right / found - made_up_right) < 0.2
    assert all((match[1], match[3]) == ("kit/table.py", "get_cell") for match in frames)


def test_the_name_is_almost_always_shown_and_the_way_to_the_function_can_be_copied(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    shown = 0
    for index in range(60):
        text = maker.decode(maker.make(index, "navigate").token_ids)
        failure, hits, call = text.split("<|call|>search")[0], text.rsplit("<|tool|>", 1)[1], text.rsplit("<|call|>", 1)[1]
        name = re.search(r"<\|call\|>search<\|arg\|>(?:def )?(\w+)<\|end\|>", text)
        assert name is not None
        shown += name[1] in failure
        tool, file, line = call.removesuffix("<|end|>").split("<|arg|>")
        assert tool == "read"
        assert re.search(rf"^\[{file}\] \S+:{line}:.*def {name[1]}\b", hits.split("<|end|>")[0], re.MULTILINE), text
    assert shown >= 50


def test_names_have_the_shapes_of_real_ones() -> None:
    maker = NameMaker(["get_cell", "table_parse", "quick_sort_all"])
    names = [maker.make(np.random.default_rng(seed)) for seed in range(400)]
    assert all(name.isidentifier() for name in names)
    for shape in (r"_[a-z_]+", r"[a-z]+(?:[A-Z][a-z]+)+", r"(?:[A-Z][a-z]+)+", r"[a-z_]+\d", r"[a-z_]+_[A-Za-z]", r"[a-z]+(?:_[a-z]+){3,}"):
        assert any(re.fullmatch(shape, name) for name in names), shape
