"""What Harbor itself says about task directories; run by the Python of an environment that has Harbor, never by ours.

python harbor_side.py schema                 JSON: keys of its task and trajectory models
python harbor_side.py check DIR...           JSON: for each directory, its name as loaded, errors, and what its lint says
python harbor_side.py templates OUT          write its own task templates, as `harbor task init` and its wizards lay them
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any


def schema() -> dict[str, list[str]]:
    """Every key of both models, dotted, lists marked with ``[]``."""
    from harbor.models.task.config import TaskConfig
    from harbor.models.trajectories import Trajectory

    return {"task": sorted(_paths(TaskConfig.model_json_schema())), "trajectory": sorted(_paths(Trajectory.model_json_schema()))}


def _paths(document: dict[str, Any]) -> set[str]:
    found: set[str] = set()

    def walk(node: dict[str, Any], prefix: str, seen: tuple[str, ...]) -> None:
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name not in seen:
                walk(document["$defs"][name], prefix, (*seen, name))
            return
        for choice in [*node.get("anyOf", []), *node.get("oneOf", []), *node.get("allOf", [])]:
            walk(choice, prefix, seen)
        if node.get("type") == "array" and isinstance(node.get("items"), dict):
            walk(node["items"], f"{prefix}[]", seen)
        for key, below in node.get("properties", {}).items():
            path = f"{prefix}.{key}" if prefix else key
            found.add(path)
            walk(below, path, seen)

    root = document
    if "$ref" in root:
        root = document["$defs"][root["$ref"].rpartition("/")[2]]
    walk(root, "", ())
    return found


def check(folders: list[str]) -> dict[str, Any]:
    """Load and lint each directory."""
    from harbor.lint.compose import ComposeLoadError
    from harbor.lint.models import COMPOSE_RULES, DEFAULT_RULES, LintRule
    from harbor.lint.task import lint_task
    from harbor.models.task.task import Task

    report = {}
    for folder in folders:
        row: dict[str, Any] = {
            "name": None,
            "error": None,
            "default": [],
            "other": [],
            "valid": Task.is_valid_dir(folder),
            "without_compose": False,
        }
        try:
            row["name"] = Task(Path(folder)).name
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        try:
            findings = lint_task(Path(folder))
        except ComposeLoadError:
            # Its checks of Compose files need the docker command; a task without such a file never comes here.
            row["without_compose"] = True
            findings = lint_task(Path(folder), selected_rules=set(LintRule) - COMPOSE_RULES)
        for finding in findings:
            row["default" if finding.rule in DEFAULT_RULES else "other"].append(f"{finding.rule}: {finding.message} ({finding.path})")
        report[folder] = row
    return report


def templates(out: Path) -> list[str]:
    """Lay every task template that Harbor ships."""
    import harbor

    root = Path(harbor.__file__).parent
    out.mkdir(parents=True)
    command = Path(sys.executable).with_name("harbor")
    for name, options in {
        "plain": [],
        "package": ["--description", "A task", "--author", "A. Uthor <a@example.org>"],
        "shared": ["--verifier-mode", "shared"],
        "no-solution": ["--no-solution"],
        "no-pytest": ["--no-pytest"],
        "no-package": ["--no-package"],
        "canary": ["--include-canary-strings"],
        "steps": ["--steps", "3"],
        "steps-shared": ["--steps", "2", "--verifier-mode", "shared"],
    }.items():
        argv = [str(command), "task", "init", f"acme/{name}", "--tasks-dir", str(out), *options]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"{' '.join(argv)} failed: {done.stderr or done.stdout}")
    shutil.copytree(root / "cli" / "template-task", out / "template-task", ignore=shutil.ignore_patterns("__pycache__"))
    adapter = out / "template-adapter"
    shutil.copytree(root / "cli" / "template-adapter" / "task-template", adapter)
    text = (adapter / "task.toml").read_text()
    text = re.sub(r"TODO_ORG/\{\{ADAPTER_ID\}\}__\{task_id\}", "acme/adapter__1", text)
    (adapter / "task.toml").write_text(text)
    for name in ("annotator/annotate-task-template", "../analyze/analyze-task-template", "../analyze/check-task-template"):
        # These are completed by Harbor when they are used: it adds the instruction.
        target = out / Path(name).name
        shutil.copytree(root / "cli" / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "instruction.md").write_text("Look at the task.\n")
    return sorted(str(path.parent) for path in out.glob("*/task.toml"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    verb, *rest = sys.argv[1:]
    print(json.dumps(schema() if verb == "schema" else check(rest) if verb == "check" else templates(Path(rest[0]))))
