"""What an exported row does when it runs: images prepared, the oracle solves it, nothing does not, and no trace of the solution is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from importer_kit import lay
from importer_rows import ROWS

from strop.tasks.importers import harbor, harbor_export
from strop.tasks.importers.hostile import File
from strop.tasks.importers.rows import import_row

GOOD = "def clamp(x, low, high):\n    if x < low:\n        return low\n    return min(x, high)\n"
BAD = GOOD.replace("min(x, high)", "x")
BELOW = "from pkg.numbers import clamp\n\n\ndef test_below():\n    assert clamp(-1, 0, 5) == 0\n"
ABOVE = "\n\ndef test_above():\n    assert clamp(9, 0, 5) == 5\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap isn't installed"),
]


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *settings, *arguments], cwd=folder, capture_output=True, check=True, text=True).stdout


def image(folder: Path, source: str, tests: str) -> tuple[Path, str]:
    """A repository as images hold it: the base commit, and the fix in a later one."""
    for name, content in {"pkg/__init__.py": "", "pkg/numbers.py": source, "tests/test_numbers.py": tests}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "pkg" / "numbers.py").write_text(GOOD)
    git(folder, "commit", "-q", "--allow-empty", "-am", "the fix")
    git(folder, "reset", "-q", "--hard", base)
    return folder, base


def diff(before: str, after: str, path: str) -> str:
    import difflib

    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


class Stage:
    """Runs the parts of an exported directory where Harbor would."""

    def __init__(self, root: Path, files: Mapping[str, File], repository: Path, workdir: str = "/testbed") -> None:
        self.root, self.repository, self.workdir = root, repository, workdir
        self.task = lay(files, root / "task")
        self.hook = harbor.read_config(files["task.toml"].data, "x")["verifier"]["collect"][0]["command"]

    def box(self, name: str, command: str, **binds: Path) -> subprocess.CompletedProcess[str]:
        place, logs = self.root / name, self.root / f"{name}-logs"
        if not place.exists():
            shutil.copytree(self.repository, place)
            for folder in ("artifacts", "verifier"):
                (logs / folder).mkdir(parents=True)
        venv = Path(sys.prefix)
        argv = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for system in ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", sys.base_prefix, str(venv)):
            argv += ["--ro-bind-try", system, system]
        argv += ["--setenv", "PATH", f"{venv}/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
        argv += ["--bind", str(place), self.workdir, "--bind", str(logs), "/logs"]
        for target, source in binds.items():
            argv += ["--ro-bind", str(source), f"/{target}"]
        return subprocess.run([*argv, "bash", "-c", command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    def play(self, name: str, agent: str) -> float | None:
        """Prepare, let the agent work, collect, verify; returns the reward, ``None`` without a verdict."""
        environment = self.task / "environment"
        assert self.box(name, "bash /strop/prepare.sh agent", strop=environment).returncode == 0
        done = self.box(name, agent, solution=self.task / "solution")
        assert done.returncode == 0, done.stderr
        assert self.box(name, self.hook).returncode == 0
        verifier = f"{name}-verifier"
        done = self.box(verifier, "bash /tests/prepare.sh verifier", tests=self.task / "tests")
        assert done.returncode == 0, done.stderr
        shutil.copy(self.root / f"{name}-logs" / "artifacts" / "agent.patch", self.root / f"{verifier}-logs" / "artifacts")
        done = self.box(verifier, "bash /tests/test.sh", tests=self.task / "tests")
        reward = self.root / f"{verifier}-logs" / "verifier" / "reward.json"
        return json.loads(reward.read_text())["reward"] if reward.exists() else None


@pytest.fixture(params=["swe-bench", "swe-smith", "swe-bench-5", "swe-rebench-2"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    tests = ("tests/test_numbers.py::test_above",), ("tests/test_numbers.py::test_below",)
    row = {**ROWS[request.param], "FAIL_TO_PASS": list(tests[0]), "PASS_TO_PASS": list(tests[1])}
    if request.param == "swe-smith":
        repository, base = image(tmp_path / "image", GOOD, BELOW + ABOVE)
        row |= {"patch": diff(GOOD, BAD, "pkg/numbers.py")}
    else:
        repository, base = image(tmp_path / "image", BAD, BELOW)
        row |= {"patch": diff(BAD, GOOD, "pkg/numbers.py"), "test_patch": diff(BELOW, BELOW + ABOVE, "tests/test_numbers.py")}
    row["base_commit"] = base
    if request.param == "swe-bench-5":
        apply = f"git checkout {base} tests/test_numbers.py || exit 1\ngit apply - <<'EOF'\n{row['test_patch']}EOF\n"
        row["eval_script"] = (
            f"cd /testbed\n{apply}echo '>>>>> Start Test Output'\npython -m pytest -rA tests\necho '>>>>> End Test Output'\n"
        )
    if request.param == "swe-rebench-2":
        row["repo"] = "acme/testbed"
        row["install_config"] = {**row["install_config"], "test_cmd": ["python -m pytest -rA"]}
    return Stage(tmp_path, harbor_export.export_harbor(import_row(row, "row")), repository)


def test_the_oracle_solves_and_nothing_does_not(stage: Stage) -> None:
    assert stage.play("oracle", "bash /solution/solve.sh") == 1.0
    assert stage.play("noop", "true") == 0.0


def test_edited_tests_and_a_hidden_place_of_the_fix_are_of_no_use(stage: Stage) -> None:
    cheat = "cd /testbed && echo 'def test_above(): pass\ndef test_below(): pass' > tests/test_numbers.py"
    assert stage.play("cheat", cheat) == 0.0
    assert stage.play("broken", "rm -rf /testbed/.git") == 0.0
    found = stage.box("cheat", "cd /testbed && git log --all --oneline && git fsck --lost-found 2>/dev/null; grep -r 'min(x' .git . | head")
    assert found.stdout.count("\n") == 1, found.stdout
    assert "the fix" not in found.stdout


def test_no_difference_is_no_verdict(stage: Stage) -> None:
    stage.box("verifier", "bash /tests/prepare.sh verifier", tests=stage.task / "tests")
    stage.box("verifier", "bash /tests/test.sh", tests=stage.task / "tests")
    assert not (stage.root / "verifier-logs" / "verifier" / "reward.json").exists()
    assert os.listdir(stage.root / "verifier-logs" / "verifier") == []
