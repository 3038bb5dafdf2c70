"""Tasks of ``strop env build`` as Harbor directories: what strop's gate admits, the exported verifier decides in the same way."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from test_importers_run import Stage

from strop.tasks.admission.pool import SuitePool
from strop.tasks.importers.exporting import export_pool, export_suite_task
from strop.tasks.importers.formats import import_path
from strop.tasks.importers.pool import ImportPool, write_pool

sys.path.insert(0, str(Path(__file__).parents[1] / "suites"))

from suite_kit import FILES, BuildOptions, build_once, give_environment, write_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap isn't installed"),
]


def test_a_built_pool_goes_to_harbor_and_back(tmp_path: Path) -> None:
    out = tmp_path / "pool"
    give_environment(out, FILES)
    limits = {"mutation": 0, "combined": 0, "deletion": 1, "history": 0}
    build_once(BuildOptions(out=out, limits=limits, workers=2), write_files(tmp_path / "shop", FILES))
    pool = SuitePool(out, tmp_path / "cache")
    tasks = pool.all_tasks()
    assert len(tasks) == 1
    for number, task in enumerate(tasks):
        files = export_suite_task(pool, task)
        stage = Stage(tmp_path / str(number), files, tmp_path / str(number) / "task" / "environment" / "workspace", "/workspace")
        assert stage.play("oracle", "bash /solution/solve.sh") == 1.0
        assert stage.play("noop", "true") == 0.0
    done = export_pool(out, tmp_path / "harbor")
    assert (len(done.written), done.refused) == (1, [])
    found = import_path(tmp_path / "harbor")
    assert not found.refused
    write_pool(tmp_path / "again", found.tasks, source="x")
    again = ImportPool(tmp_path / "again", tmp_path / "cache")
    assert {task.instruction.strip() for task in again.all_tasks()} == {task.instruction.strip() for task in tasks}
    for task in again.all_tasks():
        assert (Path(again.base_dir(task)) / "shop" / "stock.py").is_file()
