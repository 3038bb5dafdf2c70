"""One full example of every format: each key of its table is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.tasks.importers.hostile import File
from strop.tasks.importers.schema import Nested, Table

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

TASK_TOML = """\
version = "1.4"
source = "acme-bench"
multi_step_reward_strategy = "final"
artifacts = ["/app/out.txt", { source = "/var/db", destination = "db", exclude = ["*.tmp"], service = "database" }]

[task]
name = "acme/clamp"
version = "2"
description = "Two steps"
authors = [{ name = "A. Uthor", email = "a@example.org" }, { name = "B" }]
keywords = ["x", "ü"]

[metadata]
difficulty = "easy"
born = 2024-05-01T10:00:00Z
day = 2024-05-01
limits = { a = [1, 2.5, true], "odd key" = "" }

[verifier]
timeout_sec = 120.0
user = 1000
network_mode = "allowlist"
allowed_hosts = ["Example.org.", "*.example.org", "192.0.2.0/24", "2001:DB8::1"]
environment_mode = "separate"
[verifier.env]
KEY = "${KEY:-none}"
[verifier.environment]
docker_image = "acme/verifier:1"
memory = "512M"
network_mode = "allowlist"
allowed_hosts = ["localhost"]
[[verifier.collect]]
command = "pg_dump > /tmp/db.sql"
service = "database"
timeout_sec = 30
user = "postgres"

[agent]
timeout_sec = 600
user = "agent"
network_mode = "no-network"

[environment]
build_timeout_sec = 100
os = "Linux"
cpus = 1.5
memory = "4G"
storage = "10240M"
gpus = 1
gpu_types = ["H100"]
tpu = { type = "v6e", topology = "2x4" }
skills_dir = "/skills"
workdir = "/app"
allow_internet = true
[environment.env]
A = "b"
[environment.healthcheck]
command = "curl localhost"
interval_sec = 1
timeout_sec = 2.5
start_period_sec = 3
start_interval_sec = 1
retries = 5
[[environment.mcp_servers]]
name = "files"
transport = "http"
url = "http://localhost:1/mcp"
headers = { Authorization = "Bearer ${TOKEN}" }
[[environment.mcp_servers]]
name = "local"
transport = "stdio"
command = "serve"
args = ["--fast"]

[solution.env]
B = "c"

[[steps]]
name = "first"
min_reward = 0.5
artifacts = [{ source = "/app/first.txt" }]
[steps.agent]
timeout_sec = 60.0
network_mode = "allowlist"
allowed_hosts = ["localhost"]
[steps.verifier]
environment_mode = "shared"
[steps.verifier.env]
C = "d"
[steps.healthcheck]
command = "true"

[[steps]]
name = "second"
min_reward = { reward = 0.5, style = 0.2 }
"""
TRAJECTORY = {
    "schema_version": "ATIF-v1.8",
    "session_id": "s",
    "trajectory_id": "t",
    "agent": {"name": "a", "version": "1", "model_name": "m", "tool_definitions": [{"type": "function"}], "extra": {}},
    "steps": [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hi"}], "timestamp": "2024-05-01T10:00:00Z", "extra": None},
        {
            "step_id": 2,
            "source": "agent",
            "message": [{"type": "audio", "source": {"media_type": "audio/mp3", "path": "a.mp3", "duration_sec": 1.5}}],
            "model_name": "m",
            "reasoning_effort": "low",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {"x": 1}, "extra": {}}],
            "observation": {
                "results": [
                    {
                        "source_call_id": "c",
                        "content": "ok",
                        "subagent_trajectory_ref": [{"trajectory_id": "u", "session_id": "s", "trajectory_path": None, "extra": {}}],
                        "extra": {},
                    }
                ]
            },
            "metrics": {
                "prompt_tokens": 1,
                "completion_tokens": 2,
                "cached_tokens": 0,
                "cost_usd": 0.1,
                "prompt_token_ids": [1],
                "completion_token_ids": [2, 3],
                "logprobs": [-0.5, -0.25],
                "extra": {},
            },
            "is_copied_context": False,
            "llm_call_count": 1,
        },
    ],
    "notes": "n",
    "final_metrics": {
        "total_prompt_tokens": 1,
        "total_completion_tokens": 2,
        "total_cached_tokens": 0,
        "total_cost_usd": 0.1,
        "total_steps": 2,
        "extra": {},
    },
    "continued_trajectory_ref": None,
    "subagent_trajectories": [
        {"trajectory_id": "u", "agent": {"name": "b", "version": "1"}, "steps": [{"step_id": 1, "source": "system", "message": "x"}]}
    ],
    "extra": {"k": 1},
}


def harbor_files() -> dict[str, File]:
    """A multi-step task that uses every key and every kind of file."""
    files = {
        "task.toml": TASK_TOML.encode(),
        "README.md": b"# Clamp\n",
        ".gitignore": b"*.pyc\n",
        "environment/Dockerfile": b"FROM ubuntu:24.04\n",
        "environment/docker-compose.yaml": b"services: {}\n",
        "environment/data.bin": bytes(range(256)),
        "solution/solve.sh": b"#!/bin/bash\n",
        "solution/.harborignore": b"*.log\n",
        "tests/test.sh": b"#!/bin/bash\r\necho 1 > /logs/verifier/reward.txt\r\n",
        "steps/first/instruction.md": b"<!-- canary 123 -->\n\nDo the first thing.\n",
        "steps/first/trajectory.json": json.dumps(TRAJECTORY).encode(),
        "steps/first/workdir/setup.sh": b"#!/bin/bash\n",
        "steps/first/tests/test.sh": b"#!/bin/bash\n",
        "steps/second/instruction.md": "Do the second thing: prüfe es.\n".encode(),
        "steps/second/solution/solve.sh": b"#!/bin/bash\n",
    }
    return {path: File(data, path.endswith(".sh")) for path, data in sorted(files.items())}


def simple_harbor_files(config: str = "", **more: bytes) -> dict[str, File]:
    """A single-step task; ``more`` maps paths with ``__`` for ``/`` and ``_DOT_`` for ``.`` to contents."""
    files = {
        "task.toml": (config or 'schema_version = "1.4"\n').encode(),
        "instruction.md": b"Say hello.\n",
        "environment/Dockerfile": b"FROM ubuntu:24.04\n",
        "tests/test.sh": b"#!/bin/bash\n",
        **{path.replace("__", "/").replace("_DOT_", "."): data for path, data in more.items()},
    }
    return {path: File(data, path.endswith(".sh")) for path, data in sorted(files.items())}


def lay(files: Mapping[str, File], folder: Path) -> Path:
    """Write files below a folder."""
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.executable else 0o644)
    return folder


def lay_task_repository(root: Path) -> Path:
    """A SWE-bench 5 task repository with one instance that has every key and file."""
    row = dict(ROWS["swe-bench-5"])
    folder = root / "tasks" / row["instance_id"]
    columns = {"patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh", "problem_statement": "problem_statement.md"}
    files = {name: row.pop(column) for column, name in columns.items()} | {"hints.md": row.pop("hints_text")}
    tests = {key: row.pop(key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    row |= {"split": "test", "datasets": ["acme/pkg-bench"]}
    files |= {
        "task.yaml": "".join(f"{key}: {json.dumps(value)}\n" for key, value in row.items()),
        "tests.json": json.dumps(tests),
        "Dockerfile": "FROM scratch\n",
        "test_assets/tests/expected.png": "\x00png",
        "assets/a.txt": "a",
        "problem_assets/b.txt": "b",
    }
    lay({path: File(text.encode()) for path, text in files.items()}, folder)
    (root / "sweb.yaml").write_text("datasets: [acme/pkg-bench]\nsplits:\n- test\n- dev\n")
    return root


def used_keys(table: Table, data: Any) -> set[tuple[str, str]]:
    """Return ``(table, key)`` for every key that data of a table has, tables below it included."""
    found: set[tuple[str, str]] = set()
    for item in data if isinstance(data, list) else [data]:
        if isinstance(item, Mapping):
            found |= {(table.name, key) for key in item}
            for key, value in item.items():
                below = getattr(table.fields[key].check, "table", None)
                found |= used_keys(below, value) if below is not None else set()
    return found


def all_keys(table: Table) -> set[tuple[str, str]]:
    """Return ``(table, key)`` for every key of a table and of those below it."""
    below = [field.check.table for field in table.fields.values() if isinstance(field.check, Nested)]
    return {(table.name, key) for key in table.fields}.union(*map(all_keys, below))


def given_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of data in the notation of ``Table.paths``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{prefix}{key}"
            is_list = isinstance(item, list) and any(isinstance(entry, Mapping) for entry in item)
            for entry in item if is_list else [item]:
                yield from given_paths(entry, f"{prefix}{key}{'[]' if is_list else ''}.")
