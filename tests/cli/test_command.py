"""The command as a person meets it: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from strop.cli.configuration import config_markdown, to_toml
from strop.core.config import RunConfig, load_config
from strop.core.metrics import reference_markdown
from strop.store import RunDir
from strop.store.rundir import flat

ROOT = Path(__file__).resolve().parents[2]
PATCHED = """
import sys, types
import strop.cli.run as run
run.check_run = lambda config: None
pipeline = types.ModuleType("strop.runtime.pipeline")
{body}
sys.modules["strop.runtime.pipeline"] = pipeline
from strop.cli.main import main
sys.exit(main())
"""


def strop(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "strop", *arguments], capture_output=True, text=True, check=False, cwd=cwd, timeout=60)


def with_pipeline(body: str, *arguments: str) -> list[str]:
    """Command line of ``strop`` whose pipeline is ``body``; everything around it is the real thing."""
    return [sys.executable, "-c", PATCHED.format(body=body), *arguments]


def one_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_help_loads_nothing_heavy():
    heavy = ("torch", "transformers", "sqlalchemy", "numpy", "pydantic")
    code = "import sys\nfrom strop.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit as e:\n"
    code += f"    print(e.code, *[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    for name in ("run", "eval", "episodes", "replay", "regrade", "serve", "doctor", "report", "config", "sandbox", "numerics"):
        assert f"\n  {name} " in done.stdout


def test_help_is_instant():
    """Processor seconds, since the clock on the wall depends on what else runs; loading torch takes over a second of them."""
    assert min(_cpu_seconds_of_help() for _ in range(3)) < 0.5


def _cpu_seconds_of_help() -> float:
    child = subprocess.Popen([sys.executable, "-m", "strop", "--help"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "quickstrat.toml"), "Did you mean 'quickstart.toml'"),
        (("run", "quickstart.toml", "--set", "rl.stepz=3"), "unknown key 'rl.stepz'. Did you mean 'steps'"),
        (("run", "quickstart.toml", "--set", "rl.steps=many"), "rl.steps = 'many'"),
        (("run", "quickstart.toml", "--set", "rl.steps"), "section.key=value"),
        (("run", "quickstart.toml", "--set", "grading.drop=['netwrk']"), "grading.drop: unknown rule 'netwrk'. Did you mean 'network'"),
        (("run", "quickstart.toml", "--set", "engine.backend='embeded'"), "unknown engine 'embeded'. Did you mean 'embedded'"),
        (("run", "quickstart.toml", "--set", "model.base='builtin:tinny'"), "model 'builtin:tinny' does not ship with strop"),
        (("config", "diff", "nowhere.toml"), "does not exist"),
    ],
)
def test_what_is_wrong_is_named_with_exit_code_2(tmp_path: Path, arguments, message):
    (tmp_path / "quickstart.toml").write_text("[rl]\nsteps = 2\n")
    assert message in one_error(strop(*arguments, cwd=tmp_path), 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["quickstart.toml"]


@pytest.mark.parametrize("arguments", [("episodes", "nowhere"), ("report", "nowhere"), ("replay", "nowhere"), ("hacks", "nowhere")])
def test_no_run_there_is_exit_code_1(tmp_path: Path, arguments):
    assert "nowhere is not a run directory" in one_error(strop(*arguments, cwd=tmp_path), 1)


@pytest.mark.parametrize("arguments", [("frob",), ("run",), ("episodes", "x", "--step", "two")])
def test_usage_is_exit_code_2(arguments):
    done = strop(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


def test_an_old_python_is_told():
    code = "import sys; sys.version_info = (3, 9, 7); import strop.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: strop needs Python 3.11 or newer; this is 3.9 (")


def test_a_second_run_into_the_same_directory(tmp_path: Path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("")
    command = with_pipeline("pipeline.run_pipeline = lambda c, r, resumed, v: v.message(f'resumed={resumed}')", "run", str(recipe))
    command += ["--out", str(tmp_path / "out")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "resumed=False" in first.stdout
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "already holds a run" in one_error(second, 2)
    third = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert "resumed=True" in third.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path, number):
    recipe = tmp_path / "r.toml"
    recipe.write_text("")
    body = "import time\ndef wait(config, run, resumed, view):\n    view.message('ready')\n    time.sleep(60)\npipeline.run_pipeline = wait"
    command = with_pipeline(body, "run", str(recipe), "--set", "seed=3", "--out", str(tmp_path / "out"))
    # A test run started in the background ignores SIGINT, and its children inherit that; a person's shell doesn't.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, number)
    _, error = child.communicate(timeout=30)
    assert child.returncode == 130
    assert error == f"stopped. Continue with: strop run {recipe} --set 'seed=3' --out {tmp_path / 'out'} --resume\n"


def test_a_fault_of_ours_leaves_its_traceback_in_the_run(tmp_path: Path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("")
    body = "def fault(*_):\n    raise ZeroDivisionError('no episodes')\npipeline.run_pipeline = fault"
    done = subprocess.run(
        with_pipeline(body, "run", str(recipe), "--out", str(tmp_path / "out")), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unexpected error: ZeroDivisionError: no episodes" in done.stderr
    (log,) = (tmp_path / "out" / "logs").iterdir()
    assert str(log) in done.stderr
    assert "in fault\nZeroDivisionError: no episodes" in log.read_text()


@pytest.mark.parametrize(("found", "code"), [([], 0), (["episode rl/0/t/0: token 5 is 7, recorded 8"], 1)])
def test_a_replay_that_differs_fails(tmp_path: Path, found: list[str], code: int):
    RunDir.create(tmp_path / "run", RunConfig()).close()
    command = with_pipeline(f"pipeline.replay_run = lambda run, view: {found!r}", "replay", str(tmp_path / "run"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "".join(f"differs: {line}\n" for line in found))
    assert ("every token, reward and digest is the same" in done.stdout) == (not found)


def test_a_closed_pipe_is_no_error(tmp_path: Path):
    done = subprocess.run(f"{sys.executable} -m strop config reference | head -1", shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("# Configuration\n", "")


def test_config_show_reads_back(tmp_path: Path):
    done = strop("config", "show", "--set", "rl.steps=7", "--set", "name='a \"quoted\" one'")
    path = tmp_path / "shown.toml"
    path.write_text(done.stdout)
    assert load_config(path) == load_config(None, ["rl.steps=7", "name='a \"quoted\" one'"])
    assert tomllib.loads(to_toml(RunConfig()))["rl"]["steps"] == RunConfig().rl.steps


def test_config_diff(tmp_path: Path):
    (tmp_path / "a.toml").write_text("[rl]\nsteps = 7\n")
    done = strop("config", "diff", str(tmp_path / "a.toml"))
    assert done.stdout == f"rl.steps: 7 -> {RunConfig().rl.steps}\n"
    RunDir.create(tmp_path / "run", load_config(None, ["rl.steps=9"])).close()
    done = strop("config", "diff", str(tmp_path / "a.toml"), str(tmp_path / "run"))
    assert done.stdout == "rl.steps: 7 -> 9\n"


def test_the_reference_has_every_key():
    page = config_markdown()
    for key in flat(RunConfig()):
        assert f"| `{key.rpartition('.')[2]}` |" in page
    assert "| ``" not in page
    for line in page.splitlines():
        if line.startswith("| `"):
            assert line.count(" | ") == 3, line
            assert line.split(" | ")[3].strip(" |"), f"no meaning: {line}"


def test_the_reference_pages_are_up_to_date():
    for name, text in (("config.md", config_markdown()), ("metrics.md", reference_markdown())):
        assert (ROOT / "docs/reference" / name).read_text(encoding="utf-8") == text, f"{name} is old: run make docs"
