"""One full row of every format of rows, and one answer task of every package: each key of its table is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GOLD = """\
diff --git a/pkg/numbers.py b/pkg/numbers.py
index 1111111..2222222 100644
--- a/pkg/numbers.py
+++ b/pkg/numbers.py
@@ -1,4 +1,4 @@
 def clamp(x, low, high):
     if x < low:
         return low
-    return x
+    return min(x, high)
"""
TEST_PATCH = """\
diff --git a/tests/test_numbers.py b/tests/test_numbers.py
index 3333333..4444444 100644
--- a/tests/test_numbers.py
+++ b/tests/test_numbers.py
@@ -1,2 +1,5 @@
 from pkg.numbers import clamp
 
+
+def test_above():
+    assert clamp(9, 0, 5) == 5
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
EVAL = "#!/bin/bash\ncd /testbed\necho '>>>>> Start Test Output'\npytest -rA tests\necho '>>>>> End Test Output'\n"

CORE: dict[str, Any] = {
    "instance_id": "acme__pkg-12",
    "repo": "acme/pkg",
    "base_commit": COMMIT,
    "patch": GOLD,
    "test_patch": TEST_PATCH,
    "problem_statement": "clamp ignores its upper bound.\r\n",
    "hints_text": "look at min()",
    "created_at": "2024-05-01T10:00:00Z",
    "version": "1.4",
    "FAIL_TO_PASS": json.dumps(["tests/test_numbers.py::test_above"]),
    "PASS_TO_PASS": json.dumps(["tests/test_numbers.py::test_below"]),
    "environment_setup_commit": COMMIT,
}
BENCH = {
    **CORE,
    "difficulty": "<15 min fix",
    "image_assets": json.dumps({"problem_statement": ["https://example.org/a.png"], "patch": [], "test_patch": None}),
    "issue_id": 11,
    "issue_url": "https://example.org/issues/11",
    "pr_url": "https://example.org/pull/12",
}
SMITH_BUG = """\
diff --git a/pkg/numbers.py b/pkg/numbers.py
index 2222222..1111111 100644
--- a/pkg/numbers.py
+++ b/pkg/numbers.py
@@ -1,4 +1,4 @@
 def clamp(x, low, high):
     if x < low:
         return low
-    return min(x, high)
+    return x
"""
PARSED_COMMIT = {
    "file_diffs": [
        {
            "old_file_content": "",
            "new_file_content": "",
            "header": {"file": {"path": "pkg/numbers.py"}, "misc_line": None},
            "index_line": {"old_commit_hash": "1111111", "new_commit_hash": "2222222", "mode": "100644"},
            "is_binary_file": False,
            "binary_line": None,
            "minus_file": {"path": "a/pkg/numbers.py"},
            "plus_file": {"path": "b/pkg/numbers.py"},
            "hunks": [
                {
                    "descriptor": {"old_range": {"start": 1, "length": 4}, "new_range": {"start": 1, "length": 4}, "section": ""},
                    "line_group": {
                        "all_lines": [
                            {"content": "def clamp(x, low, high):", "type": "context"},
                            {"content": "    if x < low:", "type": "context"},
                            {"content": "        return low", "type": "context"},
                            {"content": "    return x", "type": "deleted"},
                            {"content": "    return min(x, high)", "type": "added"},
                        ]
                    },
                }
            ],
        },
        {"header": {"file": {"path": "tests/test_numbers.py"}}, "hunks": []},
    ],
    "old_commit_hash": COMMIT,
    "new_commit_hash": COMMIT,
    "commit_message": "Respect the upper bound",
    "commit_date": "2024-05-01T10:00:00",
}
ROWS: Mapping[str, dict[str, Any]] = {
    "swe-bench": BENCH,
    "swe-bench-5": {
        **BENCH,
        "image_assets": {"test_patch": [{"path": "tests/expected.png", "url": "https://example.org/b.png"}]},
        "FAIL_TO_PASS": ["tests/test_numbers.py::test_above"],
        "PASS_TO_PASS": ["tests/test_numbers.py::test_below"],
        "image": "swebench/sweb.eval.x86_64.acme_1776_pkg-12:latest",
        "eval_script": EVAL,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    },
    "swe-smith": {
        "instance_id": "acme__pkg.01234567.lm_rewrite__abc",
        "repo": "swesmith/acme__pkg.01234567",
        "patch": SMITH_BUG,
        "FAIL_TO_PASS": ["tests/test_numbers.py::test_above"],
        "PASS_TO_PASS": ["tests/test_numbers.py::test_below"],
        "image_name": "swebench/swesmith.x86_64.acme_1776_pkg.01234567",
        "created_at": "2025-04-01T00:00:00",
        "base_commit": COMMIT,
        "problem_statement": "",
    },
    "swe-rebench": {
        **CORE,
        "FAIL_TO_PASS": ["tests/test_numbers.py::test_above"],
        "PASS_TO_PASS": ["tests/test_numbers.py::test_below"],
        "FAIL_TO_FAIL": [],
        "PASS_TO_FAIL": [],
        "install_config": {
            "python": "3.9",
            "install": "pip install -e .[dev]",
            "pre_install": ["apt-get update"],
            "test_cmd": "pytest --no-header -rA --tb=line",
            "log_parser": "parse_log_pytest",
            "reqs_path": ["requirements.txt"],
            "env_yml_path": None,
            "pip_packages": ["pytest==7.4.0"],
            "packages": "requirements.txt",
            "env_vars": {"LANG": "C.UTF-8"},
            "no_use_env": None,
            "instance_image_key": None,
            "docker_specs": {"python_version": "3.9"},
        },
        "meta": {
            "commit_name": "head_commit",
            "failed_lite_validators": ["has_hyperlinks"],
            "has_test_patch": True,
            "is_lite": False,
            "num_modified_files": 1,
            "llm_score": {"difficulty_score": 1, "issue_text_score": 0, "test_score": 0},
        },
        "requirements": "pytest==7.4.0\n",
        "environment": "name: pkg\n",
        "license_name": "MIT",
        "docker_image": None,
        "image_name": None,
    },
    "swe-rebench-2": {
        "instance_id": "acme__pkg-12",
        "repo": "acme/pkg",
        "base_commit": COMMIT,
        "created_at": 1609298073000,
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "problem_statement": "clamp ignores its upper bound.",
        "pr_description": "Respect the upper bound",
        "interface": "Function: clamp(x, low, high) Location: pkg/numbers.py",
        "language": "python",
        "license": "mit",
        "FAIL_TO_PASS": ["tests/test_numbers.py::test_above"],
        "PASS_TO_PASS": [],
        "image_name": "docker.io/swerebenchv2/acme-pkg:12-0123456",
        "install_config": {
            "base_image_name": "python:latest",
            "docker_specs": None,
            "install": ["pip install -e ."],
            "test_cmd": ["pytest -rA"],
            "log_parser": "parse_log_pytest",
            "log_parsers": None,
        },
        "meta": {
            "llm_metadata": [
                {
                    "code": "A",
                    "confidence": 0.97,
                    "detected_issues": {"B1": False},
                    "difficulty": "easy",
                    "external_urls": [],
                    "intent_completeness": "complete",
                    "pr_categories": ["regression_bug"],
                    "reasoning": "plain",
                    "test_alignment_issues": [],
                }
            ],
            "num_modified_files": 1,
            "num_modified_lines": 1,
            "pr_author": "someone",
            "pr_labels": [],
            "pr_url": None,
        },
    },
    "r2e-gym": {
        "repo_name": "pkg",
        "docker_image": "namanjain12/pkg_final:0123456",
        "commit_hash": COMMIT,
        "parsed_commit_content": json.dumps(PARSED_COMMIT),
        "execution_result_content": "{}",
        "modified_files": ["pkg/numbers.py"],
        "modified_entity_summaries": [
            {
                "ast_type_str": "ClassDef",
                "file_name": "pkg/numbers.py",
                "name": "clamp",
                "type": "function",
                "start_lineno": 1,
                "end_lineno": 4,
            }
        ],
        "relevant_files": ["pkg/numbers.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 2,
        "prompt": "the diff is ... min(x, high)",
        "problem_statement": "<r>[ISSUE]\nclamp ignores its upper bound.\n[/ISSUE]</r>",
        "expected_output_json": json.dumps({"TestClamp.test_above": "PASSED"}),
    },
}

ANSWERS: dict[str, dict[str, Any]] = {
    "reasoning-gym": {
        "dataset": "chain_sum",
        "version": "0.1.25",
        "config": {"min_terms": 2},
        "seed": 3,
        "size": 4,
        "index": 1,
        "question": "State the final answer: 57 + 87 =",
        "answer": "144",
    },
    "verifiers": {
        "taskset": "acme_tasks:Sums",
        "version": "0.4.0",
        "config": {},
        "index": 0,
        "key": "abc",
        "question": "What is 1 + 1?",
        "data": {"idx": 0, "prompt": "What is 1 + 1?", "total": 2},
    },
}
