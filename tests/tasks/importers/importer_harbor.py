"""A Harbor task directory that uses every key and every kind of file, and a small one."""

from __future__ import annotations

import json

from strop.tasks.importers.hostile import File

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
