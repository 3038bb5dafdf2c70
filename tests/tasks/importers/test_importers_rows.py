"""Rows of the SWE-bench family and of R2E-Gym: every column read, unknown ones named, rows written again unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from importer_kit import given_paths, lay_task_repository
from importer_rows import COMMIT, GOLD, ROWS, TEST_PATCH

from strop.core.errors import TaskError
from strop.tasks.importers import harbor_export
from strop.tasks.importers.formats import blueprint, import_files, import_path, row_line
from strop.tasks.importers.hostile import File, read_folder
from strop.tasks.importers.pool import ImportPool, write_files, write_pool
from strop.tasks.importers.portable_grader import grade, parse_pytest
from strop.tasks.importers.row_tables import ROW_TABLES, detect
from strop.tasks.importers.rows import import_row
from strop.tasks.importers.task_repository import export_instance

FORMATS = list(ROWS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_column_is_read_and_the_row_comes_back(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    assert not set(ROW_TABLES[name].paths()) - set(given_paths(row))
    assert detect(row) == name
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    first = import_path(tmp_path / "rows.jsonl", split="heldout")
    assert not first.refused
    assert first.tasks[0].fields == row
    (tmp_path / "again.jsonl").write_text(row_line(first.tasks[0]))
    assert import_path(tmp_path / "again.jsonl", split="heldout").tasks == first.tasks
    write_files(tmp_path / "harbor" / "x", harbor_export.export_harbor(first.tasks[0]))
    assert import_path(tmp_path / "harbor", split="heldout").tasks == first.tasks
    write_pool(tmp_path / "pool", first.tasks, source="x")
    pool = ImportPool(tmp_path / "pool", tmp_path / "cache")
    assert [pool.record(task) for task in pool.tasks("heldout")] == first.tasks
    with pytest.raises(TaskError, match="use a sandbox that starts images"):
        pool.base_dir(first.tasks[0].task)


@pytest.mark.parametrize("name", FORMATS)
def test_an_unknown_column_is_refused_in_every_table(name: str) -> None:
    row = ROWS[name]
    key = next(iter(row))
    with pytest.raises(TaskError, match=f"unknown key '{key}x'. Did you mean '{key}'"):
        import_row({**row, f"{key}x": 1}, "row", format_name=name)
    for table in ("install_config", "meta"):
        if table in row:
            inner = next(iter(row[table]))
            with pytest.raises(TaskError, match=rf"row\.{table}: unknown key '{inner}x'. Did you mean '{inner}'"):
                import_row({**row, table: {**row[table], f"{inner}x": 1}}, "row")


@pytest.mark.parametrize("name", FORMATS)
def test_no_agent_is_told_the_solution(name: str) -> None:
    task = import_row(ROWS[name], "row")
    plan = blueprint(task)
    told = " ".join([task.task.instruction, *task.task.provenance.values()])
    assert "min(x, high)" not in told
    assert "test_above" not in told
    assert "min(x, high)" in plan.gold.value
    assert plan.gold.kind == "patch"
    assert plan.place.network.mode == "no-network"
    assert plan.steps[0].verifier.is_separate


def test_what_each_format_means() -> None:
    plans = {name: blueprint(import_row(row, "row")) for name, row in ROWS.items()}
    assert plans["swe-bench"].place.image == "swebench/sweb.eval.x86_64.acme_1776_pkg-12:latest"
    assert plans["swe-smith"].gold.value == GOLD
    assert plans["swe-smith"].bug_patch == ROWS["swe-smith"]["patch"]
    assert plans["r2e-gym"].gold.value == GOLD
    assert plans["r2e-gym"].steps[0].verifier.expected == {"TestClamp.test_above": "PASSED"}
    assert plans["swe-rebench"].place.image == ""
    assert plans["swe-rebench-2"].place.workdir == "/pkg"
    for name in ("swe-bench", "swe-bench-5", "swe-rebench", "swe-rebench-2"):
        assert plans[name].test_patch == TEST_PATCH
        assert plans[name].base_commit == COMMIT
        assert plans[name].steps[0].verifier.fail_to_pass == ("tests/test_numbers.py::test_above",)
    assert "Interface:\nFunction: clamp" in import_row(ROWS["swe-rebench-2"], "row").task.instruction
    assert import_row(ROWS["r2e-gym"], "row").task.instruction == "clamp ignores its upper bound."


def other(name: str, **keys: Any) -> dict[str, Any]:
    return {key: value for key, value in {**ROWS[name], **keys}.items() if value is not ...}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (other("swe-bench", patch=...), "the key 'patch' is missing"),
        (other("swe-bench", repo="acme"), "expected 'owner/name'"),
        (other("swe-bench", repo="acme/pkg; rm"), "expected 'owner/name'"),
        (other("swe-bench", base_commit="HEAD"), "expected a commit in hexadecimal digits"),
        (other("swe-bench", instance_id="../x"), "expected a name without separators"),
        (other("swe-bench", FAIL_TO_PASS="[1"), "is not JSON"),
        (other("swe-bench", FAIL_TO_PASS=[1]), "expected text"),
        (other("swe-bench", PASS_TO_PASS=ROWS["swe-bench"]["FAIL_TO_PASS"]), "stands in FAIL_TO_PASS and in PASS_TO_PASS"),
        (other("swe-bench", patch=TEST_PATCH), "patch and test_patch are the same"),
        (other("swe-bench", patch="fix it"), "it isn't a unified diff"),
        (other("swe-bench", image_assets={"patches": []}), "unknown key 'patches'. Did you mean 'patch'"),
        (other("swe-bench-5", eval_script="pytest"), "has no marker"),
        (other("swe-bench-5", eval_type="fail"), "Did you mean 'fail_only'"),
        (other("swe-smith", patch="fix it"), "no file in the diff"),
        (other("swe-rebench-2", created_at="2024"), "expected an integer"),
        (other("r2e-gym", expected_output_json="[]"), "JSON text of a table"),
        (other("r2e-gym", expected_output_json='{"a": "GREEN"}'), "is 'GREEN'"),
        (other("r2e-gym", parsed_commit_content='{"file_diffs": [1]}'), "is no parsed commit"),
        ({"a": 1}, "has the format of none of"),
    ],
)
def test_a_wrong_row_is_refused_with_its_column(row: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        import_row(row, "row")


def test_a_task_repository_comes_back(tmp_path: Path) -> None:
    first = import_path(lay_task_repository(tmp_path / "repo"))
    assert not first.refused
    assert len(first.tasks) == 1
    task = first.tasks[0]
    assert task.fields["problem_statement"] == ROWS["swe-bench-5"]["problem_statement"]
    name = task.name
    write_files(tmp_path / "again" / "tasks" / name, export_instance(task))
    (tmp_path / "again" / "sweb.yaml").write_bytes((tmp_path / "repo" / "sweb.yaml").read_bytes())
    assert import_path(tmp_path / "again").tasks == first.tasks
    assert read_folder(tmp_path / "again" / "tasks" / name).keys() == read_folder(tmp_path / "repo" / "tasks" / name).keys()
    assert import_files(harbor_export.export_harbor(task), "x") == task


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("task.yaml", None, "lacks task.yaml"),
        ("gold.patch", None, "lacks gold.patch"),
        ("task.yaml", b"a: &a 1\nb: *a\n", "aliases aren't read"),
        ("task.yaml", b"instance: x\n", "unknown key 'instance'. Did you mean 'instance_id'"),
        ("tests.json", b'{"FAIL_TO_PASS": []}', "must have the keys FAIL_TO_PASS and PASS_TO_PASS"),
        ("test.patch", b"\xff", "isn't UTF-8"),
    ],
)
def test_a_broken_instance_is_refused(tmp_path: Path, path: str, content: bytes | None, said: str) -> None:
    lay_task_repository(tmp_path)
    target = tmp_path / "tasks" / "acme__pkg-12" / path
    target.unlink() if content is None else target.write_bytes(content)
    [(_, why)] = import_path(tmp_path).refused
    assert said in why


def test_settings_of_a_task_repository_are_read_strictly(tmp_path: Path) -> None:
    lay_task_repository(tmp_path)
    (tmp_path / "sweb.yaml").write_text("datasets: [other]\n")
    [(_, why)] = import_path(tmp_path).refused
    assert "the data set 'acme/pkg-bench' isn't in sweb.yaml: other" in why
    (tmp_path / "sweb.yaml").write_text("dataset: x\n")
    with pytest.raises(TaskError, match=r"unknown key 'dataset'. Did you mean 'datasets'"):
        import_path(tmp_path)
    (tmp_path / "sweb.yaml").rename(tmp_path / "elsewhere")
    (tmp_path / "sweb.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match=r"sweb.yaml' can't be read"):
        import_path(tmp_path)


def test_a_changed_export_is_a_harbor_task_of_its_own() -> None:
    task = import_row(ROWS["swe-smith"], "row")
    files = harbor_export.export_harbor(task)
    assert import_files(files, "x") == task
    changed = import_files({**files, "instruction.md": File(b"Something else.\n")}, "x")
    assert changed.format == "harbor"
    assert changed.task.instruction == "Something else.\n"


def test_what_harbor_cannot_run_is_not_exported() -> None:
    django = other("swe-bench", FAIL_TO_PASS='["test_a (admin.tests.X)"]', PASS_TO_PASS="[]")
    with pytest.raises(TaskError, match="aren't named as pytest names them"):
        harbor_export.export_harbor(import_row(django, "row"))
    bare = other("swe-rebench", install_config={**ROWS["swe-rebench"]["install_config"], "python": None})
    with pytest.raises(TaskError, match=r"install_config.python is ''"):
        harbor_export.export_harbor(import_row(bare, "row"))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps(ROWS["swe-smith"]) + "\n") * 2)
    found = import_path(tmp_path / "a.jsonl")
    assert len(found.tasks) == 1
    assert "comes twice" in found.refused[0][1]


# ------------------------------------------------------------------------------------------------ the portable grader

LOG = """\
tests/test_a.py::test_one PASSED                         [ 50%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_p[a b]
XFAIL tests/test_a.py::test_x - known
SKIPPED [2] tests/test_a.py:3: no reason
SKIPPED tests/test_a.py::test_s
\x1b[31mFAILED\x1b[0m tests/test_a.py::test_two - assert 1 == 2
"""


def test_a_log_of_pytest_is_read() -> None:
    assert parse_pytest(LOG) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_p[a b]": "PASSED",
        "tests/test_a.py::test_x": "XFAIL",
        "tests/test_a.py::test_s": "SKIPPED",
        "tests/test_a.py::test_two": "FAILED",
    }


@pytest.mark.parametrize(
    ("fail_to_pass", "pass_to_pass", "more", "reward"),
    [
        (["test_one"], ["test_s", "test_x"], {}, 1.0),
        (["test_one"], ["test_two"], {}, 0.0),
        (["test_s"], [], {}, 0.0),
        (["test_none"], [], {}, 0.0),
        (["test_none"], [], {"eval_type": "fail_only"}, 1.0),
        (["test_p[a"], [], {}, 1.0),
        (["test_one"], [], {"parser": "parse_log_jest"}, None),
        ([], [], {"expected": {"test_one": "PASSED"}}, 0.0),
        (
            [],
            [],
            {"expected": {"test_one": "PASSED", "test_p[a b]": "PASSED", "test_x": "XFAIL", "test_s": "SKIPPED", "test_two": "FAILED"}},
            1.0,
        ),
    ],
)
def test_the_rules_of_the_portable_grader(
    fail_to_pass: list[str], pass_to_pass: list[str], more: dict[str, Any], reward: float | None
) -> None:
    plan = {
        "parser": "parse_log_pytest",
        "fail_to_pass": [f"tests/test_a.py::{name}" for name in fail_to_pass],
        "pass_to_pass": [f"tests/test_a.py::{name}" for name in pass_to_pass],
        **more,
    }
    assert grade(plan, LOG, 1)[0] == reward


def test_an_unbelievable_log_gets_no_verdict() -> None:
    plan = {"parser": "pytest", "fail_to_pass": ["a::b"], "pass_to_pass": []}
    assert grade(plan, "PASSED a::b\n", 1)[0] is None
    assert grade(plan, "", 0)[0] is None
    assert grade(plan, "PASSED a::b\n", 0)[0] == 1.0
