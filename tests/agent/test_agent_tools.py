"""The tools: formats, errors that say what to do, and files of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_kit import BUGGY, TOOLS, DirSandbox, Hands, make_task
from hypothesis import given
from hypothesis import strategies as st

from strop.agent.output import HEAD_CHARS, TAIL_CHARS, command_output, stable_output, truncate
from strop.agent.toolspec import TOOL_NAMES, name_arguments, order_arguments, tool_specs
from strop.agent.workspace import EDIT_REACH
from strop.core.errors import SandboxError, TaskError
from strop.core.task import Limits, Task
from strop.ports import ExecResult

# ---------------------------------------------------------------------------------------------------------------- formats


def test_list(hands: Hands) -> None:
    assert hands("list") == "[1] README.md\n[2] pkg/__init__.py\n[3] pkg/numbers.py\n[4] tests/__init__.py\n[5] tests/test_numbers.py"


def test_list_is_capped_and_hides_caches(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "pkg" / "__pycache__").mkdir()
    (base / "pkg" / "__pycache__" / "numbers.pyc").write_bytes(b"\0")
    for number in range(50):
        (base / f"z{number:02}.py").write_text("")
    lines = Hands(DirSandbox(base, tmp_path / "box"), task)("list").split("\n")
    assert len(lines) == 41
    assert lines[-1] == "… 15 more, use search"
    assert not any("pycache" in line for line in lines)


def test_search(hands: Hands) -> None:
    assert hands("search", "clamp(x") == "[3] pkg/numbers.py:1:def clamp(x, low, high):"
    assert hands("search", "x < low:\n") == "[3] pkg/numbers.py:2:    if x < low:"
    assert hands("search", "no such text") == "no match"
    assert hands("search", "a.b") == "no match"  # a dot is a dot


def test_whole_words_come_before_parts_of_words(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "a.py").write_text("def nth_or_last(x): ...\n" * 9 + "def unnth(x): ...\n")
    (base / "b.py").write_text("x = nth_(1)\ndef nth(x): ...\nnths = 1  # of nth\n")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    assert hands("search", "nth").split("\n")[:3] == [
        "[3] b.py:2:def nth(x): ...",
        "[3] b.py:3:nths = 1  # of nth",
        "[2] a.py:1:def nth_or_last(x): ...",
    ]
    assert hands("search", "def nth").split("\n")[0] == "[3] b.py:2:def nth(x): ..."
    assert hands("search", "nth(x").split("\n")[:2] == ["[3] b.py:2:def nth(x): ...", "[2] a.py:10:def unnth(x): ..."]
    assert hands("search", "(x)").split("\n")[0] == "[2] a.py:1:def nth_or_last(x): ..."


def test_a_name_that_is_nowhere_gets_the_definitions_like_it(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "a.py").write_text("class Rules:\n    async def tokenize_rule(self):\n        pass\n\ndef other():\n    pass\n")
    (base / "b.py").write_text("def tokenize_rules(text): ...\ndef tokenize_rule(text): ...\n")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    answer = hands("search", "def tokenize_r_rule").split("\n")
    assert answer == [
        "[2] a.py:2:    async def tokenize_rule(self):",
        "[3] b.py:1:def tokenize_rules(text): ...",
        "no match; these are definitions like it",
    ]
    assert hands("search", "def completely_different") == "no match"
    assert hands("search", "+-*") == "no match"
    hands("edit", "2", "tokenize_rule", "2", "renamed_here")
    assert "b.py:2:def tokenize_rule(text)" in hands("search", "tokenize_r_rule")


def test_names_of_a_hostile_file_cost_little(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "a.py").write_text("".join(f"def n{i:06}(): ...\n" for i in range(60_000)) + "def " + "n" * 100_000)
    answer = Hands(DirSandbox(base, tmp_path / "box"), task)("search", "n000_001x")
    assert answer.startswith("[2] a.py:2:def n000001")


def test_search_gives_eight_hits_and_counts_the_rest(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "a.py").write_text("needle needle\n" * 5)
    (base / "b.py").write_text("x\n" + "needle\n" * 7)
    hits = Hands(DirSandbox(base, tmp_path / "box"), task)("search", "needle").split("\n")
    assert hits[:5] == [f"[2] a.py:{n}:needle needle" for n in range(1, 6)]
    assert hits[5:] == ["[3] b.py:2:needle", "[3] b.py:3:needle", "[3] b.py:4:needle", "… 4 more"]
    (base / "c.py").write_text("x needle\n" * 200)
    hits = Hands(DirSandbox(base, tmp_path / "box2"), task)("search", "needle").split("\n")
    assert len(hits) == 9
    assert hits[8] == "… over 99 more"


def test_search_sees_edits_and_what_commands_wrote(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "tests" / "test_numbers.py").write_text("open('pkg/__init__.py', 'w').write('written = 1\\n')\n")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    assert hands("search", "written") == "[5] tests/test_numbers.py:1:open('pkg/__init__.py', 'w').write('written = 1\\n')"
    hands("edit", "3", "clamp", "1", "written")
    assert hands("search", "written").startswith("[3] pkg/numbers.py:1:def written(x")
    hands("undo")
    assert "numbers.py:1:" not in hands("search", "written").replace("test_numbers", "")
    hands("test")
    assert hands("search", "written").startswith("[2] pkg/__init__.py:1:written = 1\n")


def test_read(hands: Hands) -> None:
    numbered = [f"{n}|{line}" for n, line in enumerate(BUGGY.rstrip("\n").split("\n"), 1)]
    assert hands("read", "3", "1") == hands("read", "pkg/numbers.py", "3") == "\n".join(numbered)
    assert hands("read", "./pkg/numbers.py", "5") == "\n".join(numbered[2:])
    assert hands("read", "/workspace/pkg/numbers.py", "2", "2") == "\n".join(numbered[1:3])


def test_read_is_capped(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "big.py").write_text("y" * 170 + "\n" + "x\n" * 200)
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    lines = hands("read", "big.py", "1", "9999").split("\n")
    assert len(lines) == 60
    assert lines[0] == "1|" + "y" * 160 + " [10 more characters]"
    assert [line.split("|")[0] for line in hands("read", "big.py", "100").split("\n")] == [str(n) for n in range(98, 122)]


def test_edit_and_undo(hands: Hands, sandbox: DirSandbox) -> None:
    assert hands("edit", "3", "<", "4", ">") == "ok\n4|    if x > high:"
    assert sandbox.read("pkg/numbers.py").decode() == BUGGY.replace("x < high", "x > high")
    assert hands("edit", "3", "    return x\n", "6", "") == "ok"
    assert hands("undo") == "ok\n6|    return x"
    assert hands("undo") == "ok\n4|    if x < high:"
    assert sandbox.changes() == {}
    assert hands("undo") == "error: nothing to undo"
    assert hands.box.tally.edits == 2


def test_edit_over_several_lines(hands: Hands, sandbox: DirSandbox) -> None:
    assert hands("edit", "3", "< low:\n        return low\n", "2", ">= low:\n        pass\n        ") == (
        "ok\n2|    if x >= low:\n3|        pass\n4|            if x < high:"
    )
    assert hands("edit", "3", "\n", "1", "  # c\n") == "ok\n1|def clamp(x, low, high):  # c\n2|    if x >= low:"
    assert hands("undo") == "ok\n1|def clamp(x, low, high):\n2|    if x >= low:"


def test_test_shows_the_real_output_without_its_time(hands: Hands, sandbox: DirSandbox) -> None:
    red = hands("test")
    assert "AssertionError: 9 != 5" in red
    assert "\nRan 2 tests\n" in red
    assert red.endswith("FAILED (failures=2)")
    assert hands("test") == red
    hands("edit", "3", "<", "4", ">")
    assert hands("test").endswith("Ran 2 tests\n\nOK")
    assert hands.result.sandbox_s > 0


def test_test_runs_the_command_of_the_task(sandbox: DirSandbox) -> None:
    task = make_task(provenance={"test_argv": json.dumps(["-c", "import sys; print('hi'); sys.exit(3)"])})
    hands = Hands(sandbox, task)
    assert hands("test") == "hi"
    assert not hands.box.tally.is_green


def test_test_that_hangs_or_prints_nothing(sandbox: DirSandbox) -> None:
    slow = make_task(provenance={"test_argv": json.dumps(["-c", "import time; time.sleep(60)"])}, limits=Limits(exec_s=0.5))
    hands = Hands(sandbox, slow)
    assert hands("test").endswith("[killed: ran longer than 0.5 s]")
    assert hands.box.tally.killed == {"timeout": 1}
    assert not hands.box.tally.is_green
    assert Hands(sandbox, make_task(provenance={"test_argv": '["-c", "1"]'}))("test") == "no output, exit code 0"


def test_submit_ends(hands: Hands) -> None:
    assert hands("submit") == ""
    assert hands.result.ends
    hands("list")
    assert not hands.result.ends


# ----------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "observation"),
    [
        (("serch", "x"), "no tool 'serch'. Did you mean search?"),
        (("", ""), "no tool ''. Tools: list, search, read, edit, test, undo, submit"),
        (("list", "x"), "list got 1 argument. Usage: list"),
        (("search",), "search got 0 arguments. Usage: search PATTERN"),
        (("search", ""), "PATTERN is empty"),
        (("read", "3"), "read got 1 argument. Usage: read FILE START [COUNT]"),
        (("read", "3", "1", "2", "4"), "read got 4 arguments. Usage: read FILE START [COUNT]"),
        (("read", "3", "x"), "START must be a number from 1, not 'x'"),
        (("read", "3", "0"), "START must be a number from 1, not '0'"),
        (("read", "3", "-1"), "START must be a number from 1, not '-1'"),
        (("read", "3", "1", "0"), "COUNT must be a number from 1, not '0'"),
        (("read", "3", "²"), "START must be a number from 1, not '²'"),
        (("read", "3", "7"), "no line 7: pkg/numbers.py has 6 lines"),
        (("read", "1", "2"), "no line 2: README.md has 1 line"),
        (("read", "2", "1"), "no line 1: pkg/__init__.py has 0 lines"),
        (("read", "6", "1"), "no file '6'. Files are numbered 1 to 5"),
        (("read", "0", "1"), "no file '0'. Files are numbered 1 to 5"),
        (("read", "99999999999", "1"), "no file '99999999999'. Files are numbered 1 to 5"),
        (("read", "numbers.py", "1"), "no file 'numbers.py'. Did you mean pkg/numbers.py?"),
        (("read", "pkg/number.py", "1"), "no file 'pkg/number.py'. Did you mean pkg/numbers.py?"),
        (("read", "../../etc/passwd", "1"), "no file '../../etc/passwd'."),
        (("read", "/etc/passwd", "1"), "no file '/etc/passwd'."),
        (("edit", "3", "<", "4", "<"), "OLD and NEW are the same; nothing was changed"),
        (("edit", "3", "", "4", "x"), "OLD is empty; to insert text, replace a piece of the line by itself and the new text"),
        (("edit", "3", ">", "4", "<"), "OLD not found in line 4:     if x < high:"),
        (("edit", "3", "return", "4", "x"), "OLD is not in line 4, and equally near in lines 3 and 5"),
        (("edit", "3", "a", "40", "b"), "no line 40: pkg/numbers.py has 6 lines"),
        (("undo",), "nothing to undo"),
    ],
)
def test_wrong_calls_are_explained(hands: Hands, sandbox: DirSandbox, call: tuple[str, ...], observation: str) -> None:
    assert hands(*call) == f"error: {observation}"
    assert sandbox.changes() == {}


def test_the_first_of_several_occurrences_in_a_line_is_replaced(hands: Hands) -> None:
    assert hands("edit", "3", "r", "5", "R") == "ok\n5|        Return high"
    assert hands("edit", "3", "low", "2", "l") == "ok\n2|    if x < l:"
    assert hands("edit", "3", "r", "2", "R") == "ok\n3|        Return low"


def test_a_line_number_that_is_a_little_off_is_put_right(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "pkg" / "numbers.py").write_text("\n".join(["x = 1", *["pass"] * EDIT_REACH, "y = 1"]) + "\n")
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    assert hands("edit", "3", "1", "6", "2").startswith(f"ok\n{EDIT_REACH + 2}|y = 2")  # the nearer of two
    assert hands("edit", "3", "1", str(EDIT_REACH + 1), "3").startswith("ok\n1|x = 3")
    assert hands("undo").startswith("ok\n1|x = 1")
    assert hands("edit", "3", "1", str(EDIT_REACH + 2), "3") == f"error: OLD not found in line {EDIT_REACH + 2}: y = 2\nOLD is in line 1"


def test_only_the_tools_of_the_task_exist(sandbox: DirSandbox) -> None:
    hands = Hands(sandbox, make_task(tools=("list", "submit")))
    assert hands("edit", "3", "<", "4", ">") == "error: no tool 'edit'. Tools: list, submit"
    with pytest.raises(TaskError, match=r"'lst', which does not exist. Did you mean 'list'"):
        Hands(sandbox, make_task(tools=("lst",)))


@pytest.mark.parametrize("argv", ["nonsense", "[]", "[1]", '{"a": 1}'])
def test_an_unreadable_test_command_is_an_error_of_the_task(sandbox: DirSandbox, argv: str) -> None:
    with pytest.raises(TaskError, match="expected a JSON list such as"):
        Hands(sandbox, make_task(provenance={"test_argv": argv}))


def test_long_nonsense_is_cut_in_errors(hands: Hands) -> None:
    assert len(hands("x" * 5000)) < 200
    assert len(hands("read", "y" * 5000, "1")) < 200


def test_files_that_a_command_removed_or_replaced(base: Path, tmp_path: Path, task: Task) -> None:
    (base / "tests" / "test_numbers.py").write_text(
        "import os\nos.remove('README.md')\nos.remove('pkg/numbers.py'); os.mkdir('pkg/numbers.py')\n"
    )
    hands = Hands(DirSandbox(base, tmp_path / "box"), task)
    hands("edit", "3", "<", "4", ">")
    hands("test")
    assert hands("read", "1", "1") == "error: cannot read README.md: No such file or directory"
    assert hands("edit", "3", "x", "1", "y") == "error: cannot read pkg/numbers.py: Is a directory"
    assert hands("undo") == "error: cannot write pkg/numbers.py: Is a directory"
    assert hands("search", "clamp") == "no match"


def test_a_broken_box_is_not_the_agents_error(sandbox: DirSandbox, task: Task) -> None:
    class Broken(DirSandbox):
        async def run_python(self, argv: object, *, timeout_s: float) -> ExecResult:
            raise SandboxError("the worker died")

    sandbox.__class__ = Broken
    with pytest.raises(SandboxError, match="the worker died"):
        Hands(sandbox, task)("test")


# ----------------------------------------------------------------------------------------------------------------- output


def test_output_is_stable() -> None:
    assert stable_output("Ran 8 tests in 0.003s\n\nOK") == "Ran 8 tests\n\nOK"
    assert stable_output("Ran 1 test in 12.345s") == "Ran 1 test"
    assert stable_output("<object object at 0x7f21c04ab0>, size 0x7f21") == "<object object at 0x...>, size 0x7f21"
    assert stable_output("It Ran 8 tests in 0.003s, he said") == "It Ran 8 tests in 0.003s, he said"


@given(st.text(max_size=400), st.integers(0, 100), st.integers(0, 100))
def test_truncate(text: str, head: int, tail: int) -> None:
    cut = truncate(text, head=head, tail=tail)
    if cut == text:
        assert len(text) <= head + tail + 40
    else:
        assert len(cut) < len(text)
        assert cut.startswith(text[:head])
        assert cut.endswith(text[len(text) - tail :])
        left_out = int(cut[head:].split("[")[1].split(" ")[0])
        assert head + tail + left_out == len(text)


def test_command_output_is_cut_by_rule() -> None:
    text = command_output("\n" + "h" * 2000 + "\r\n" + "t" * TAIL_CHARS + "\n")
    assert text == "h" * HEAD_CHARS + f"\n[{2001 - HEAD_CHARS} characters left out]\n" + "t" * TAIL_CHARS


# ------------------------------------------------------------------------------------------------------------------ table


def test_json_schema() -> None:
    schema = {spec.name: spec.json_schema()["function"] for spec in tool_specs(TOOL_NAMES)}
    assert schema["read"]["parameters"]["required"] == ["file", "start"]
    assert list(schema["read"]["parameters"]["properties"]) == ["file", "start", "count"]
    assert schema["edit"]["parameters"]["properties"]["line"]["type"] == "integer"
    assert all(item["description"] for item in schema.values())
    json.dumps(schema)


@given(st.sampled_from([*TOOL_NAMES, "nothing"]), st.lists(st.text(max_size=5), max_size=6))
def test_names_and_order_of_arguments_are_inverse(name: str, values: list[str]) -> None:
    assert order_arguments(name, name_arguments(name, values)) == values


def test_every_tool_of_the_table_works(sandbox: DirSandbox, task: Task) -> None:
    assert set(TOOLS) == set(TOOL_NAMES) == set(Hands(sandbox, task).box._tools)
