"""Any imported task as a Harbor task directory that Harbor's own loader and lint accept.

A row of the SWE-bench family becomes two images of its own: the agent's (repository at its base commit, the bug if there is one, one
commit without a past, no test that grades) and the verifier's (the same, with the hidden tests). Between them only the difference travels,
written by a collect hook. The row itself lies in ``tests/record.json``, where no agent sees it, so that importing the directory gives the
row back.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.importers import answers, harbor, portable_grader
from strop.tasks.importers.diffs import files_of
from strop.tasks.importers.hostile import File, parse_json
from strop.tasks.importers.record import Blueprint, ImportedTask
from strop.tasks.importers.row_tables import ROW_TABLES
from strop.tasks.importers.rows import blueprint, import_row, test_command
from strop.tasks.importers.toml_text import dump_toml

RECORD = "tests/record.json"
MARK = "strop_format"
"""Key of ``[metadata]`` that says which format a directory was exported from."""

PATCH = "/logs/artifacts/agent.patch"

_PREPARE = """\
#!/bin/bash
# Puts the repository into the state that the work starts from. $1: "agent" or "verifier".
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd {workdir}
git config --global --add safe.directory {workdir}
git config --global user.name task
git config --global user.email task@localhost
base={base}
if [ -n "$base" ]; then git reset -q --hard "$base"; fi
if [ -s "$here/bug.patch" ]; then git apply --whitespace=nowarn "$here/bug.patch"; fi
if [ "$1" = agent ]; then
  while IFS= read -r path; do rm -f -- "$path"; done <"$here/hidden.txt"
fi
# The agent gets one commit without a past: later commits, other branches and dropped objects hold the solution.
# The verifier keeps it, because evaluation scripts check files out of the base commit.
if [ "$1" = agent ]; then rm -rf .git; fi
[ -e .git ] || git init -q
git add -A
git commit -q --allow-empty -m base
"""
# An agent that breaks its repository hands in no change; it must not be able to make the verdict fail.
_COLLECT = """\
{{ cd {workdir} && git add -A && git diff --binary --cached $(git rev-list --max-parents=0 HEAD | tail -n 1); }} > {patch} ||
: > {patch}"""
_TEST = """\
#!/bin/bash
# Applies the agent's difference to a fresh copy of the repository, runs the tests and writes the reward.
# Nothing is written where no verdict is possible.
set -u
cd {workdir} || exit 1
[ -f {patch} ] || {{ echo "the agent's difference is missing"; exit 1; }}
exclude=()
while IFS= read -r path; do exclude+=("--exclude=$path"); done </tests/graded.txt
if [ -s {patch} ] && ! git apply --binary --whitespace=nowarn "${{exclude[@]}}" {patch}; then
  echo "the agent's difference doesn't apply"
  echo '{{"reward": 0.0}}' >/logs/verifier/reward.json
  exit 0
fi
while IFS= read -r path; do git checkout -q HEAD -- "$path" 2>/dev/null || rm -f -- "$path"; done </tests/graded.txt
if [ -s /tests/test.patch ]; then git apply --whitespace=nowarn /tests/test.patch || exit 1; fi
# shellcheck disable=SC1091
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi
if [ -d .venv/bin ]; then PATH="$PWD/.venv/bin:$PATH"; fi
bash /tests/run.sh >/logs/verifier/tests.log 2>&1
code=$?
python3 /tests/grade.py /tests/plan.json /logs/verifier/tests.log "$code" /logs/verifier/reward.json
"""
_SOLVE = "#!/bin/bash\nset -eu\ncd {workdir}\ngit apply --whitespace=nowarn /solution/gold.patch\n"


def export_harbor(task: ImportedTask) -> dict[str, File]:
    """Return the files of a Harbor task directory.

    Raises:
        TaskError: The task can't be run by Harbor; the message says what it lacks.
    """
    if task.format == harbor.FORMAT:
        return harbor.export_files(task)
    if task.format in ROW_TABLES:
        return _export_row(task)
    if task.format in answers.TABLES:
        return _export_answer(task)
    raise TaskError(f"a task of format {task.format!r} has no Harbor directory")


def restore(files: Mapping[str, File], *, split: str) -> ImportedTask | None:
    """Return the row that a directory was exported from, or ``None`` if it wasn't, or was changed since."""
    if RECORD not in files:
        return None
    try:
        record = parse_json(files[RECORD].data, RECORD)
        held = {path: File(bytes.fromhex(data), executable) for path, data, executable in record["files"]}
        if record["format"] in answers.TABLES:
            task = answers.import_answer_task(record["row"], RECORD, format_name=record["format"], split=split)
        else:
            task = import_row(record["row"], RECORD, format_name=record["format"], split=split, files=held)
        return task if export_harbor(task) == dict(sorted(files.items())) else None
    except (TaskError, KeyError, TypeError, ValueError):
        return None


def harbor_name(task: ImportedTask) -> str:
    """Return the ``org/name`` of an exported task."""
    return f"{task.format}/{portable_name(task.name)}"


def portable_name(name: str) -> str:
    """Return a name with letters, digits, dashes and underscores only, as package names have them."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-_") or "task"


def test_script(workdir: str) -> str:
    """Return the ``test.sh`` of a verifier that gets the agent's difference; it uses run.sh, graded.txt, plan.json, grade.py of /tests."""
    return _TEST.format(workdir=shlex.quote(workdir), patch=PATCH)


def collect_command(workdir: str) -> str:
    """Return the collect hook that writes the agent's difference."""
    return _COLLECT.format(workdir=shlex.quote(workdir), patch=PATCH)


def _export_row(task: ImportedTask) -> dict[str, File]:
    plan = blueprint(task)
    where = f"{task.format} task {task.name!r}"
    run, parser = _runner(task, plan, where)
    workdir = shlex.quote(plan.place.workdir)
    graded = _graded(task, plan)
    # SWE-smith's images hold the failing tests; those of the others lack what the test patch brings.
    removed = graded if task.format == "swe-smith" else []
    prepare = _script(_PREPARE.format(workdir=workdir, base=shlex.quote(plan.base_commit)))
    start = {"prepare.sh": prepare, "bug.patch": _text(plan.bug_patch)}
    base, install = _base_image(task, plan, where)
    if install:
        start["install.sh"] = _script(install)
    verifier = plan.steps[0].verifier
    decisions = {
        "parser": parser,
        "eval_type": task.fields.get("eval_type") or "pass_and_fail",
        "fail_to_pass": list(verifier.fail_to_pass),
        "pass_to_pass": list(verifier.pass_to_pass),
        "expected": dict(verifier.expected),
    }
    test_patch = "" if task.format == "swe-bench-5" else plan.test_patch
    files = {
        harbor.CONFIG: _text(dump_toml(_config(task, plan))),
        harbor.INSTRUCTION: _text(plan.steps[0].instruction + "\n"),
        "environment/Dockerfile": _text(_dockerfile(base, bool(install), "/strop", "agent", plan.place.workdir)),
        "tests/Dockerfile": _text(_dockerfile(base, bool(install), "/tests", "verifier", plan.place.workdir)),
        "tests/test.sh": _script(test_script(plan.place.workdir)),
        "tests/run.sh": _script(run),
        "tests/test.patch": _text(test_patch),
        "tests/plan.json": _text(json.dumps(decisions, indent=1, ensure_ascii=False) + "\n"),
        "tests/grade.py": File(Path(portable_grader.__file__).read_bytes()),
        "environment/hidden.txt": _text("".join(f"{path}\n" for path in removed)),
        "tests/graded.txt": _text("".join(f"{path}\n" for path in graded)),
        RECORD: _text(json.dumps(_record(task), indent=1, ensure_ascii=False) + "\n"),
        **{f"environment/{path}": file for path, file in start.items()},
        **{f"tests/{path}": file for path, file in start.items()},
    }
    if plan.gold.value:
        files["solution/gold.patch"] = _text(plan.gold.value)
        files["solution/solve.sh"] = _script(_SOLVE.format(workdir=workdir))
    return dict(sorted(files.items()))


_JUDGE = """\
import json, subprocess, sys
from pathlib import Path

path = Path("/app/answer.txt")
answer = path.read_text("utf-8", "replace").strip() if path.is_file() else ""
request = json.loads(Path("/tests/request.json").read_text())
stdin = json.dumps({**request, "answer": answer})
done = subprocess.run([sys.executable, "/tests/side.py", "score"], input=stdin, capture_output=True, text=True)
reply = json.loads(done.stdout.splitlines()[-1])
print(reply)
if "score" in reply:
    Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reply["score"]}))
"""
_SLIM = "python:3.11-slim-bookworm"


def _export_answer(task: ImportedTask) -> dict[str, File]:
    """A task of reasoning-gym: one file for the answer, and the package in the verifier's image."""
    if task.format != "reasoning-gym":
        raise TaskError(f"{task.format} task {task.name!r} is judged by the code of its taskset, which no image can be made of here")
    version = task.fields["version"]
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+!-]*", version):
        raise TaskError(f"{task.format} task {task.name!r} has the version {version!r}, expected for example '0.1.25'")
    environment = {"network_mode": "no-network", "workdir": "/app"}
    config = {
        "schema_version": "1.4",
        "artifacts": [f"/app/{answers.ANSWER_FILE}"],
        "task": {"name": harbor_name(task), "keywords": [task.format, task.fields["dataset"]]},
        "metadata": {MARK: task.format, "name": task.name},
        "agent": {"timeout_sec": 600.0},
        "verifier": {"timeout_sec": 300.0, "environment_mode": "separate", "environment": environment},
        "environment": environment,
    }
    files = {
        harbor.CONFIG: _text(dump_toml(config)),
        harbor.INSTRUCTION: _text(task.task.instruction + "\n"),
        "environment/Dockerfile": _text(f"FROM {_SLIM}\nWORKDIR /app\nCOPY workspace/ /app/\n"),
        "tests/Dockerfile": _text(f"FROM {_SLIM}\nRUN pip install --no-cache-dir reasoning-gym=={version}\nWORKDIR /app\nCOPY . /tests/\n"),
        "tests/test.sh": _script("#!/bin/bash\npython3 /tests/judge.py\n"),
        "tests/judge.py": _text(_JUDGE),
        "tests/side.py": File(answers.side_of(task.format).read_bytes()),
        "tests/request.json": _text(json.dumps(answers.score_request(task), indent=1, ensure_ascii=False) + "\n"),
        RECORD: _text(json.dumps(_record(task), indent=1, ensure_ascii=False) + "\n"),
        **task.files,
    }
    if task.fields.get("answer"):
        files["solution/answer.txt"] = _text(task.fields["answer"])
        files["solution/solve.sh"] = _script(f"#!/bin/bash\ncp /solution/answer.txt /app/{answers.ANSWER_FILE}\n")
    return dict(sorted(files.items()))


def _config(task: ImportedTask, plan: Blueprint) -> dict[str, Any]:
    workdir = plan.place.workdir
    hook = {"command": collect_command(workdir), "timeout_sec": 120.0}
    return {
        "schema_version": "1.4",
        "task": {"name": harbor_name(task), "keywords": [task.format, task.task.provenance["source"]]},
        "metadata": {MARK: task.format, "name": task.name},
        "agent": {"timeout_sec": 3600.0},
        "verifier": {
            "timeout_sec": plan.steps[0].verifier.timeout_s,
            "environment_mode": "separate",
            "collect": [hook],
            "environment": {"network_mode": "no-network", "workdir": workdir},
        },
        "environment": {"build_timeout_sec": 1800.0, "network_mode": "no-network", "workdir": workdir},
    }


def _record(task: ImportedTask) -> dict[str, Any]:
    files = [[path, file.data.hex(), file.executable] for path, file in sorted(task.files.items())]
    return {"format": task.format, "row": dict(task.fields), "files": files}


def _graded(task: ImportedTask, plan: Blueprint) -> list[str]:
    """Files that hold the tests that grade: the verifier takes them from the base commit, whatever the agent made of them."""
    if task.format == "swe-smith":
        return sorted({name.split("::")[0] for name in plan.steps[0].verifier.fail_to_pass if "::" in name})
    return [path for path in files_of(plan.test_patch) if _is_safe(path)]


def _is_safe(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/") and "\n" not in path


def _runner(task: ImportedTask, plan: Blueprint, where: str) -> tuple[str, str]:
    """The script that runs the tests, and the name of its log's parser."""
    fields, install = task.fields, task.fields.get("install_config") or {}
    verifier = plan.steps[0].verifier
    if script := fields.get("eval_script"):
        return script, fields["log_parser"]
    if task.format == "r2e-gym":
        return "#!/bin/bash\nbash run_tests.sh\n", "pytest"
    names = [*verifier.fail_to_pass, *verifier.pass_to_pass]
    paths = sorted({name.split("::")[0] for name in names})
    if command := test_command(task):
        targets = " ".join(shlex.quote(path) for path in paths) if "pytest" in command and task.format == "swe-rebench" else ""
        return f"#!/bin/bash\n{command} {targets}".rstrip() + "\n", install.get("log_parser") or "pytest"
    if not names or not all("::" in name and _is_safe(name) for name in names):
        raise TaskError(f"{where} has no test command, and its tests aren't named as pytest names them; export it from a SWE-bench 5 row")
    targets = " ".join(shlex.quote(path) for path in paths)
    return f"#!/bin/bash\npython -m pytest --disable-warnings --color=no --tb=no -rA {targets}\n", "pytest"


def _base_image(task: ImportedTask, plan: Blueprint, where: str) -> tuple[str, str]:
    """The first lines of both Dockerfiles, and the script that installs a repository where there is no ready image."""
    if plan.place.image:
        if re.search(r"\s", plan.place.image):
            raise TaskError(f"{where}: the image {plan.place.image!r} has spaces in its name")
        return f"FROM {plan.place.image}\n", ""
    install = task.fields.get("install_config") or {}
    version = install.get("python") or ""
    if not re.fullmatch(r"3\.\d+", version):
        raise TaskError(f"{where} has no image, and install_config.python is {version!r}, expected for example '3.9'")
    lines = ["#!/bin/bash", "set -eu", "cd /testbed", f"git checkout -q {shlex.quote(plan.base_commit)}"]
    for key in ("pre_install", "install"):
        value = install.get(key) or []
        lines += [value] if isinstance(value, str) else value
    lines += [f"python -m pip install {shlex.quote(name)}" for name in install.get("pip_packages") or []]
    address = shlex.quote(f"https://github.com/{task.fields['repo']}")
    clone = f"RUN git clone -q {address} /testbed\n"
    return f"FROM python:{version}-bookworm\n{clone}", "\n".join(lines) + "\n"


def _dockerfile(base: str, has_install: bool, folder: str, mode: str, workdir: str) -> str:
    install = f"bash {folder}/install.sh && " if has_install else ""
    tail = f" && rm -rf {folder}" if mode == "agent" else ""
    return f"{base}COPY . {folder}/\nRUN {install}bash {folder}/prepare.sh {mode}{tail}\nWORKDIR {workdir}\n"


def _text(text: str) -> File:
    return File(text.encode())


def _script(text: str) -> File:
    return File(text.encode(), executable=True)
