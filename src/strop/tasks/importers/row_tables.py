"""Every column of the instance rows of the SWE-bench family and of R2E-Gym.

Sources: SWE-bench/SWE-bench @ 7a21e05 (``swebench/types.py``, ``swebench/task``, ``docs/guides/datasets.md``, and the columns of the rows
that 4.x published), SWE-bench/SWE-smith @ cf2e649, SWE-rebench/SWE-bench-fork @ 39316f7, SWE-rebench/SWE-rebench-V2 @ c71902a,
R2E-Gym/R2E-Gym @ 69bc953, and the dataset card of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.importers.hostile import parse_json
from strop.tasks.importers.schema import Field, Nested, Table, boolean, either, integer, list_of, map_of, number, plain, text, wrong

_TEXT = Field(check=text(), nullable=True)
_NEEDED = Field(check=text(empty=False), required=True)
_ID = Field(check=text(pattern=r"[^/\\\x00-\x1f\x7f]{1,200}", expected="a name without separators or control characters"), required=True)
_REPO = Field(
    check=text(pattern=r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(?:\.[A-Za-z0-9._-]+)*", expected="'owner/name'"),
    required=True,
)
_COMMIT = Field(check=text(pattern=r"[0-9a-fA-F]{7,64}", expected="a commit in hexadecimal digits"), nullable=True)
_COMMIT_NEEDED = Field(check=_COMMIT.check, required=True)
_ANY_TEXT = Field(check=text(), required=True)
"""There, but maybe empty."""
_TEXTS = Field(check=list_of(text()), nullable=True)
_INTEGER = Field(check=integer(), nullable=True)
_FLAG = Field(check=boolean, nullable=True)
_FREE = Field(check=plain, nullable=True)


def tests(value: Any, where: str) -> Any:
    """Check a set of tests: a list of names, or JSON text of one (as it is published); it stays what it was."""
    names = parse_json(value, where) if isinstance(value, str) else value
    list_of(text())(names, where)
    return value


def test_names(value: Any) -> tuple[str, ...]:
    """Return the names of a checked set of tests; none for a missing one."""
    return tuple(parse_json(value, "tests") if isinstance(value, str) else value or ())


_TESTS = Field(check=tests, required=True)
_MORE_TESTS = Field(check=tests, nullable=True)
_COMMANDS = Field(check=either(text(), list_of(text()), expected="a command or a list of commands"), nullable=True)
_ASSET = Table(name="an asset", fields={"path": _TEXT, "url": _TEXT})


def _asset_list(value: Any, where: str) -> Any:
    return list_of(either(text(), _ASSET.read, expected="an address, or a table of path and url"))(value, where)


_ASSETS = Table(
    name="image_assets", fields={key: Field(check=_asset_list, nullable=True) for key in ("problem_statement", "patch", "test_patch")}
)


def _assets(value: Any, where: str) -> Any:
    """Asset tables come as a table or as its JSON text."""
    _ASSETS.read(parse_json(value, where) if isinstance(value, str) and value else value or {}, where)
    return value


_CHANGE = {
    "instance_id": _ID,
    "repo": _REPO,
    "base_commit": _COMMIT_NEEDED,
    "patch": _ANY_TEXT,
    "test_patch": _ANY_TEXT,
    "FAIL_TO_PASS": _TESTS,
    "PASS_TO_PASS": _TESTS,
}
"""A change of a repository with its tests, as most of the family give it."""
_CORE = {
    **_CHANGE,
    "problem_statement": _ANY_TEXT,
    "hints_text": _TEXT,
    "created_at": _TEXT,
    "version": _TEXT,
    "environment_setup_commit": _COMMIT,
}
_BENCH = {
    **_CORE,
    "difficulty": _TEXT,
    "image_assets": Field(check=_assets, nullable=True),
    "issue_id": Field(check=either(integer(), text(), expected="a number or text"), nullable=True),
    "issue_url": _TEXT,
    "pr_url": _TEXT,
}

SWE_BENCH = Table(name="a SWE-bench row (4 or earlier)", fields=_BENCH)

EVAL_TYPES = ("pass_and_fail", "fail_only")
"""What an absent test means in SWE-bench 5: failed, or (``fail_only``, whose runners print failures alone) passed."""


def _v5(found: Mapping[str, Any], where: str) -> None:
    for marker in (">>>>> Start Test Output", ">>>>> End Test Output"):
        if marker not in found["eval_script"]:
            raise TaskError(f"{where}.eval_script has no marker {marker!r}; without it no result can be read")


SWE_BENCH_5 = Table(
    name="a SWE-bench 5 row",
    fields={
        **_BENCH,
        "image": _NEEDED,
        "eval_script": _NEEDED,
        "log_parser": _NEEDED,
        "eval_type": Field(check=text(choices=EVAL_TYPES), required=True),
    },
    verify=_v5,
)

TASK_YAML = Table(
    name="a SWE-bench 5 task.yaml",
    fields={
        **{
            key: field
            for key, field in SWE_BENCH_5.fields.items()
            if key not in ("patch", "test_patch", "problem_statement", "hints_text", "eval_script")
        },
        "FAIL_TO_PASS": Field(check=list_of(text())),
        "PASS_TO_PASS": Field(check=list_of(text())),
        "version": _NEEDED,
        "split": _NEEDED,
        "datasets": _TEXTS,
    },
)
"""``FAIL_TO_PASS`` and ``PASS_TO_PASS`` stand in ``tests.json`` beside it."""

SWEB_YAML = Table(
    name="sweb.yaml", fields={"datasets": Field(check=list_of(text(empty=False), empty=False), required=True), "splits": _TEXTS}
)

SWE_SMITH = Table(
    name="a SWE-smith row",
    fields={
        "instance_id": _ID,
        "repo": _REPO,
        "patch": Field(check=text(empty=False), required=True),
        "FAIL_TO_PASS": _TESTS,
        "PASS_TO_PASS": _TESTS,
        "image_name": _NEEDED,
        "created_at": _TEXT,
        "base_commit": _COMMIT,
        "problem_statement": _TEXT,
    },
)

INSTALL_CONFIG = Table(
    name="install_config",
    fields={
        "python": _TEXT,
        "install": _COMMANDS,
        "pre_install": _COMMANDS,
        "test_cmd": _COMMANDS,
        "log_parser": _TEXT,
        "reqs_path": _TEXTS,
        "env_yml_path": _TEXTS,
        "pip_packages": _TEXTS,
        "packages": _TEXT,
        "env_vars": Field(check=map_of(plain), nullable=True),
        "no_use_env": _FLAG,
        "instance_image_key": _TEXT,
        "docker_specs": _FREE,
    },
)
_SCORES = Table(name="llm_score", fields=dict.fromkeys(("difficulty_score", "issue_text_score", "test_score"), _INTEGER))
META = Table(
    name="meta",
    fields={
        "commit_name": _TEXT,
        "failed_lite_validators": _TEXTS,
        "has_test_patch": _FLAG,
        "is_lite": _FLAG,
        "num_modified_files": _INTEGER,
        "llm_score": Field(check=Nested(_SCORES), nullable=True),
    },
)
SWE_REBENCH = Table(
    name="a SWE-rebench row",
    fields={
        **_CORE,
        "FAIL_TO_FAIL": _MORE_TESTS,
        "PASS_TO_FAIL": _MORE_TESTS,
        "install_config": Field(check=Nested(INSTALL_CONFIG), required=True),
        "meta": Field(check=Nested(META), nullable=True),
        "requirements": _TEXT,
        "environment": _TEXT,
        "license_name": _TEXT,
        "docker_image": _TEXT,
        "image_name": _TEXT,
    },
)

_PARSED_BY_MODEL = Table(
    name="llm_metadata",
    fields={
        "code": _TEXT,
        "confidence": Field(check=number(), nullable=True),
        "detected_issues": Field(check=map_of(boolean), nullable=True),
        "difficulty": _TEXT,
        "external_urls": _TEXTS,
        "intent_completeness": _TEXT,
        "pr_categories": _TEXTS,
        "reasoning": _TEXT,
        "test_alignment_issues": _TEXTS,
    },
)


def _model_metadata(value: Any, where: str) -> Any:
    """One table, or a list of them."""
    return list_of(_PARSED_BY_MODEL.read)(value, where) if isinstance(value, list) else _PARSED_BY_MODEL.read(value, where)


META_2 = Table(
    name="meta",
    fields={
        "llm_metadata": Field(check=_model_metadata, nullable=True),
        "num_modified_files": _INTEGER,
        "num_modified_lines": _INTEGER,
        "pr_author": _TEXT,
        "pr_labels": _TEXTS,
        "pr_url": _TEXT,
    },
)
INSTALL_CONFIG_2 = Table(
    name="install_config",
    fields={
        "base_image_name": _TEXT,
        "docker_specs": _FREE,
        "install": _COMMANDS,
        "test_cmd": Field(check=_COMMANDS.check, required=True),
        "log_parser": _NEEDED,
        "log_parsers": _FREE,
    },
)
SWE_REBENCH_2 = Table(
    name="a SWE-rebench V2 row",
    fields={
        **_CHANGE,
        "created_at": _INTEGER,
        "problem_statement": _TEXT,
        "pr_description": _TEXT,
        "interface": _TEXT,
        "language": _NEEDED,
        "license": _TEXT,
        "image_name": _NEEDED,
        "install_config": Field(check=Nested(INSTALL_CONFIG_2), required=True),
        "meta": Field(check=Nested(META_2), nullable=True),
    },
)

_ENTITY = Table(
    name="modified_entity_summaries",
    fields={
        **dict.fromkeys(("ast_type_str", "file_name", "name", "type"), _TEXT),
        **dict.fromkeys(("start_lineno", "end_lineno"), _INTEGER),
    },
)


def statuses(value: Any, where: str) -> str:
    """Check the expected output of R2E-Gym: JSON text of a table from test name to status."""
    found = parse_json(text()(value, where), where)
    if not isinstance(found, dict) or not found:
        raise wrong(where, value, "JSON text of a table from test name to status")
    map_of(text(choices=("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")))(found, where)
    return value


R2E_GYM = Table(
    name="an R2E-Gym row",
    fields={
        "repo_name": _NEEDED,
        "docker_image": _NEEDED,
        "commit_hash": _COMMIT_NEEDED,
        "parsed_commit_content": _TEXT,
        "execution_result_content": _TEXT,
        "modified_files": _TEXTS,
        "modified_entity_summaries": Field(check=Nested(_ENTITY, is_list=True), nullable=True),
        "relevant_files": _TEXTS,
        "num_non_test_files": _INTEGER,
        "num_non_test_func_methods": _INTEGER,
        "num_non_test_lines": _INTEGER,
        "prompt": _TEXT,
        "problem_statement": _ANY_TEXT,
        "expected_output_json": Field(check=statuses, required=True),
    },
)
"""``prompt`` holds the gold change: it is kept, and never shown to an agent."""

ROW_TABLES: Mapping[str, Table] = {
    "swe-bench": SWE_BENCH,
    "swe-bench-5": SWE_BENCH_5,
    "swe-smith": SWE_SMITH,
    "swe-rebench": SWE_REBENCH,
    "swe-rebench-2": SWE_REBENCH_2,
    "r2e-gym": R2E_GYM,
}


def detect(row: Mapping[str, Any]) -> str:
    """Return the name of a row's format, from the columns that only one of them has.

    Raises:
        TaskError: It has the columns of none.
    """
    install = row.get("install_config")
    if "expected_output_json" in row or "parsed_commit_content" in row:
        return "r2e-gym"
    if "language" in row and "image_name" in row:
        return "swe-rebench-2"
    if isinstance(install, dict):
        return "swe-rebench-2" if "base_image_name" in install else "swe-rebench"
    if "eval_script" in row or "eval_type" in row:
        return "swe-bench-5"
    if "image_name" in row and "test_patch" not in row:
        return "swe-smith"
    if "instance_id" in row and "test_patch" in row:
        return "swe-bench"
    columns = ", ".join(sorted(map(str, row))[:12]) or "no columns"
    raise TaskError(f"a row with the columns {columns} has the format of none of: {', '.join(ROW_TABLES)}; name it with --format")
