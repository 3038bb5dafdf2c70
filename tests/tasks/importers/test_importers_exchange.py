"""``strop env import`` and ``strop env export`` through the command line; tasks whose answer is a text."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from importer_harbor import harbor_files, simple_harbor_files
from importer_kit import lay, lay_task_repository
from importer_rows import ANSWERS, ROWS

from strop.cli.exchange import add_commands
from strop.core.errors import TaskError
from strop.tasks.importers import answers, harbor_export
from strop.tasks.importers.formats import blueprint, import_files, import_path
from strop.tasks.importers.pool import ImportPool, write_pool

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def env(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The commands in this process: ``(exit code, stdout, stderr)``."""
    before = signal.getsignal(signal.SIGTERM)
    app = typer.Typer(pretty_exceptions_enable=False)
    add_commands(app)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(argument) for argument in arguments], prog_name="strop env")
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    yield run
    signal.signal(signal.SIGTERM, before)


def test_import_then_export_then_import(env: Cli, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(list(ROWS.values())[2:]))
    code, out, _ = env("import", tmp_path / "rows.json", "--out", tmp_path / "pool", "--split", "heldout")
    assert code == 0
    assert "swe-smith              1 read" in out
    assert "network no-network (4)" in out
    code, out, _ = env("export", tmp_path / "pool", "--out", tmp_path / "harbor", "--format", "harbor")
    assert (code, out.split()[:2]) == (0, ["exported", "4"])
    code, _, _ = env("export", tmp_path / "pool", "--out", tmp_path / "native", "--format", "native", "--task", "swe-smith")
    assert code == 0
    assert [json.loads(line) for line in (tmp_path / "native" / "swe-smith.jsonl").read_text().splitlines()] == [ROWS["swe-smith"]]
    assert env("import", tmp_path / "harbor", "--out", tmp_path / "again", "--split", "heldout")[0] == 0
    first, second = (ImportPool(tmp_path / name, tmp_path / "cache") for name in ("pool", "again"))
    assert {task.task_id: first.record(task) for task in first.all_tasks()} == {
        task.task_id: second.record(task) for task in second.all_tasks()
    }


def test_folders_come_back_in_their_own_format(env: Cli, tmp_path: Path) -> None:
    lay(harbor_files(), tmp_path / "in" / "everything")
    lay_task_repository(tmp_path / "repository")
    for source, kind in ((tmp_path / "in", "harbor"), (tmp_path / "repository", "repository")):
        assert env("import", source, "--out", tmp_path / f"{kind}-pool")[0] == 0
        assert env("export", tmp_path / f"{kind}-pool", "--out", tmp_path / f"{kind}-out", "--format", "native")[0] == 0
        again = import_path(tmp_path / f"{kind}-out").tasks
        assert [task.fields for task in again] == [task.fields for task in import_path(source).tasks]
        assert [task.files for task in again] == [task.files for task in import_path(source).tasks]


def test_what_is_wrong_is_said_and_counts(env: Cli, tmp_path: Path) -> None:
    lay(simple_harbor_files("[agnet]\n"), tmp_path / "set" / "bad")
    lay(simple_harbor_files(), tmp_path / "set" / "good")
    code, out, _ = env("import", tmp_path / "set")
    assert code == 1
    assert "harbor                 1 read" in out
    assert "unknown key 'agnet'. Did you mean 'agent'?" in out
    code, out, _ = env("import", tmp_path / "set", "--json")
    assert (code, json.loads(out)["read"], len(json.loads(out)["refused"])) == (1, {"harbor": 1}, 1)
    assert env("import", tmp_path / "nowhere")[0] == 1
    assert env("import", tmp_path / "set", "--format", "harbour")[2].count("Did you mean 'harbor'?") == 1
    assert env("import", tmp_path / "set", "--split", "heldou")[0] == 2
    code, _, err = env("export", tmp_path / "set", "--out", tmp_path / "out")
    assert (code, "is no pool" in err) == (1, True)
    assert env("export", tmp_path / "none", "--out", tmp_path / "out")[0] == 2
    (tmp_path / "there").mkdir()
    assert "nothing is overwritten" in env("export", tmp_path / "set", "--out", tmp_path / "there")[2]
    assert "choose another folder" in env("import", tmp_path / "set", "--out", tmp_path / "there")[2]


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_task_with_an_answer_comes_back(tmp_path: Path, name: str) -> None:
    task = answers.import_answer_task(ANSWERS[name], "row", format_name=name)
    assert task.task.instruction.startswith(ANSWERS[name]["question"])
    assert "144" not in task.task.instruction
    write_pool(tmp_path / "pool", [task], source="x")
    pool = ImportPool(tmp_path / "pool", tmp_path / "cache")
    assert pool.record(task.task) == task
    assert Path(pool.base_dir(task.task), "answer.txt").read_text() == "ANSWER\n"
    assert blueprint(task).needs() == ("network no-network", "separate verifier")
    known = next(iter(ANSWERS[name]))
    with pytest.raises(TaskError, match=f"unknown key '{known}s'. Did you mean '{known}'"):
        answers.import_answer_task({**ANSWERS[name], f"{known}s": 1}, "row", format_name=name)


def test_only_what_an_image_can_judge_is_exported() -> None:
    task = answers.import_answer_task(ANSWERS["reasoning-gym"], "row", format_name="reasoning-gym")
    files = harbor_export.export_harbor(task)
    assert import_files(files, "x") == task
    assert b"reasoning-gym==0.1.25" in files["tests/Dockerfile"].data
    assert not any(b"144" in file.data for path, file in files.items() if path.startswith(("environment/", "instruction")))
    with pytest.raises(TaskError, match="judged by the code of its taskset"):
        harbor_export.export_harbor(answers.import_answer_task(ANSWERS["verifiers"], "row", format_name="verifiers"))


@pytest.mark.parametrize(("package", "name"), [("reasoning-gym", "chain_sum"), ("verifiers", "acme_tasks:Sums")])
def test_a_missing_package_names_the_command_that_installs_it(env: Cli, package: str, name: str) -> None:
    code, _, err = env("import", f"{package}:{name}")
    assert code == 1
    assert f"{sys.executable} -m pip install {package}" in err
    assert "can't be run" in env("import", f"{package}:{name}", "--python", "/no/python")[2]
    assert "expected a JSON object" in env("import", f"{package}:{name}", "--config", "[]")[2]
