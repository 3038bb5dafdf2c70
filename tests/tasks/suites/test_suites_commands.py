"""``strop env list``, ``show``, ``run`` and ``gate`` on a pool of one task."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from suite_kit import BUGGY, PRICE, make_pool

from strop.cli.envbuild import print_tallies
from strop.cli.envplay import gate_pool, list_pool, play_task, show_task
from strop.core.errors import ConfigError, TaskError
from strop.tasks.admission.pool import SuitePool
from strop.tasks.admission.tally import SourceTally, short_reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pool(tmp_path_factory.mktemp("commands") / "pool").path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_list_and_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_pool(folder, None) == 0
    assert "shop-2.0:shop.price.discount#1" in capsys.readouterr().out
    assert show_task(folder, "discount", files=True) == 0
    text = capsys.readouterr().out
    assert "There is a bug in shop" in text
    assert "-    elif count > 5:\n+    elif count >= 5:" in text
    assert "h tests/test_price.py::TestPrice::test_some" in text
    assert "  shop/stock.py" in text


def test_unknown_names_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="isn't in the pool"):
        show_task(folder, "discout", files=False)
    with pytest.raises(ConfigError, match=r"agent 'orakle' doesn't exist. Did you mean 'oracle'"):
        play_task(folder, "discount", agent="orakle", seed=0)
    with pytest.raises(ConfigError, match=r"has no tasks of kind 'mutatoin'. Did you mean 'mutation'"):
        list_pool(folder, "mutatoin")
    with pytest.raises(TaskError, match="make one with `strop env build"):
        list_pool(tmp_path, None)
    (tmp_path / "pool.json").write_text('{"format": "other"}')
    with pytest.raises(TaskError, match="has format 'other'"):
        list_pool(tmp_path, None)


def test_oracle_and_noop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert play_task(folder, "discount", agent="oracle", seed=1) == 0
    assert "1 files changed, outcome 1 5/5" in capsys.readouterr().out
    assert play_task(folder, "discount", agent="noop", seed=1) == 1
    assert "0 files changed, outcome 0 unchanged" in capsys.readouterr().out


def test_a_person_in_the_box(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["pwd", "cd shop", "ls", "test", "sed -i 's/count > 5/count >= 5/' price.py", "exit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert play_task(folder, "discount", agent="shell", seed=1) == 0
    text = capsys.readouterr().out
    assert "/workspace/shop$ " in text
    assert "stock.py" in text
    assert "4 passed" in text


def test_gate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_pool(folder, part=None, limit=0, rounds=1, workers=1) == 0
    assert "1 of 1 tasks pass the gate" in capsys.readouterr().out
    pool = SuitePool(folder, Path(folder).with_name("elsewhere"))
    (task,) = pool.all_tasks()
    assert (Path(pool.base_dir(task)) / "shop" / "price.py").read_text() == BUGGY
    assert pool.gold_files(task) == {"shop/price.py": PRICE.encode()}


def test_the_table_of_a_build(capsys: pytest.CaptureFixture[str]) -> None:
    tally = SourceTally(source="shop-2.0", tests=14, suite_s=0.25)
    tally.count("mutation", "admitted", "", 2.0)
    tally.count("mutation", "refused", "no test notices it", 1.0)
    tally.count("history", "quarantined", "without a change 3 tests pass in one order and fail in another", 1.0)
    print_tallies([tally, SourceTally(source="broken.tar.gz", problem="archive 'broken.tar.gz' is truncated or damaged: x")], Path("p"))
    text = capsys.readouterr().out
    assert "no test notices it" in text
    assert "refused source broken.tar.gz: archive" in text
    assert "1 tasks in p" in text
    assert tally.gate_s("mutation") == 3.0
    assert short_reason("a 3 b: c") == "a N b"
