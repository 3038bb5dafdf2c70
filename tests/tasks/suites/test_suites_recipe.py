"""A recipe over a pool of repository tasks: opened as what it says it is, refused where it can't work, evaluated and trained on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from suite_kit import episode_of, make_pool, make_task

from strop.cli.models import model_dir
from strop.cli.registry import GRADERS, POOLS
from strop.cli.run import check_pool
from strop.core.config import RunConfig, load_config
from strop.core.errors import ConfigError, TaskError
from strop.core.outcome import Scored
from strop.core.task import Task
from strop.ports import PoolCapabilities
from strop.runtime.build import build_grading
from strop.runtime.tasks import check_tasks, open_tasks
from strop.tasks.admission.pool import write_task
from strop.tasks.importers.pool import FORMAT as IMPORTED
from strop.tasks.importers.pool import write_pool
from strop.tasks.index import IndexedPool

FITTING = ["midtrain.enabled=false", "sandbox.memory_mb=1024", "tasks.max_tokens=400", "tasks.max_turns=2", "tasks.max_new_tokens=12"]
TASK = Task(task_id="t", instruction="Do it.", workspace="t", tools=("submit",), verifier="t", split="train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with one task to train on and one held out."""
    path = tmp_path_factory.mktemp("recipe") / "pool"
    make_pool(path)
    write_task(path / "tasks", replace(make_task(), task_id="shop-2.0:shop.price.discount#2", split="heldout"))
    return path


@pytest.fixture(autouse=True)
def private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(folder: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"tasks.pool={json.dumps(str(folder))}", *FITTING, *overrides])


def test_a_pool_is_what_it_says_it_is(folder: Path) -> None:
    tasks = open_tasks(recipe(folder), folder)
    check_tasks(recipe(folder), tasks)
    assert tasks.pool.capabilities.grader == "suite"
    assert (tasks.repairs, tasks.probes) == (None, None)
    assert [len(tasks.pool.tasks(split)) for split in ("train", "heldout", "hard")] == [1, 1, 0]
    limits = tasks.pool.tasks("train")[0].limits
    assert (limits.max_turns, limits.max_tokens, limits.max_new_tokens) == (2, 400, 12)
    assert limits.exec_s == 60.0, "what the recipe doesn't say is as the pool says"
    assert tasks.find("shop-2.0:shop.price.discount#2") is not None
    assert tasks.find("elsewhere") is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("midtrain.enabled=true", r"midtrain.enabled = true, but .*tasks.pool = .*kind 'suite'.*set midtrain.enabled = false"),
        ("grading.probe_frac=0.2", r"grading.probe_frac = 0.2, but probes can't be made.*set grading.probe_frac = 0"),
        ("sandbox.memory_mb=512", r"sandbox.memory_mb = 512, but .* admitted in boxes of 1024 MiB; set sandbox.memory_mb = 1024"),
        ("tasks.max_tokens=0", r"engine.max_tokens = 1536, but .* episodes of 65536 tokens; raise it, or set tasks.max_tokens = 1536"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_it_starts(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pool(recipe(folder, override))


def test_kinds_can_be_left_out_by_their_name(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"kind 'mutations' doesn't exist.*Did you mean 'mutation'"):
        check_pool(recipe(folder, "tasks.exclude_kinds=['mutations']"))
    with pytest.raises(ConfigError, match=r"has no held-out tasks \(0 in all\)"):
        check_pool(recipe(folder, "tasks.exclude_kinds=['mutation']"))


def test_a_pool_without_held_out_tasks_is_refused(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with pytest.raises(ConfigError, match=r"has no held-out tasks \(1 in all\)"):
        check_pool(recipe(tmp_path / "pool"))


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, TaskError, "is no task pool: it has neither pool.json nor meta.json"),
        ("{", TaskError, "can't be read: pool.json"),
        ('["strop-suite-1"]', TaskError, "is damaged: pool.json has the format None"),
        ('{"format": "strop-suit-1"}', ConfigError, "unknown task pool format 'strop-suit-1'. Did you mean 'strop-suite-1'"),
        ('{"format": "strop-suite-2"}', ConfigError, "unknown task pool format 'strop-suite-2'"),
    ],
)
def test_what_is_no_pool_that_is_known_is_refused(tmp_path: Path, content: str | None, error: type[Exception], message: str) -> None:
    if content is not None:
        (tmp_path / "pool.json").write_text(content)
    with pytest.raises(error, match=message):
        check_pool(recipe(tmp_path))


def test_imported_tasks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool", [], source="nothing")
    assert json.loads((pool / "pool.json").read_text())["format"] == IMPORTED
    with pytest.raises(TaskError, match=r"were imported: .* no grader here starts.* a pool that `strop env build` made"):
        check_pool(recipe(pool))


def test_the_grader_is_that_of_the_pool(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"grader 'repair' can't decide the tasks of tasks.pool = .*; their grader is 'suite'"):
        build_grading(recipe(folder), folder, grader="repair")

    async def rewards() -> list[float]:
        tasks, provider, grader = build_grading(recipe(folder), folder)
        task = tasks.pool.tasks("heldout")[0]
        try:
            gold = tasks.pool.gold_files(task)  # type: ignore[attr-defined]
            outcomes = [await grader.grade(task, episode_of(task, changes)) for changes in (gold, {})]
        finally:
            await grader.close()
            await provider.close()
        assert all(isinstance(outcome, Scored) for outcome in outcomes), outcomes
        return [outcome.reward for outcome in outcomes]  # type: ignore[union-attr]

    assert asyncio.run(rewards()) == [1.0, 0.0]


@pytest.mark.timeout(600)
def test_a_run_evaluates_and_trains_on_them(folder: Path, tmp_path: Path) -> None:
    from strop.runtime.pipeline import evaluate_checkpoint, run_pipeline
    from strop.store import RunDir
    from strop.ui.view import make_view

    small = ["rl.steps=1", "rl.groups=1", "rl.group_size=2", "eval.tasks=1", "eval.samples=1", "rl.drop_system_prompt=0"]
    config = recipe(folder, *small)
    view = make_view(plain=True)
    try:
        with RunDir.create(tmp_path / "run", config) as run:
            run_pipeline(config, run, False, view)
            store = run.store
            assert store.stage() == "report"
            assert [row["policy"] for row in store.fact("baselines")] == ["unchanged"]
            assert [row["policy"] for row in store.fact("evaluations")] == ["base", "mid", "rl"]
            trained = list(store.episodes(phase="rl"))
            assert [episode.key.task_id for episode in trained] == ["shop-2.0:shop.price.discount#1"] * 2
            assert all(isinstance(episode.outcome, Scored) and episode.traces for episode in trained)
            assert {row.key.task_id for row in store.rows(phase="eval.*")} == {"shop-2.0:shop.price.discount#2"}
            assert len(store.commits(phase="rl")) >= 1
        rows = evaluate_checkpoint(config, model_dir(config.model.base), view)
        assert [row["tasks"] for row in rows] == [1, 1]
    finally:
        view.close()


class AcmePool(IndexedPool[str]):
    """A third party's pool: two tasks, no repairs, no function-level verifiers."""

    def __init__(self, path: Path, cache_dir: Path, **options: Any) -> None:
        made = [(replace(TASK, task_id=split, split=split), split) for split in ("train", "heldout")]
        super().__init__(Path(path), made, **options)

    @property
    def capabilities(self) -> PoolCapabilities:
        return PoolCapabilities(grader="acme", box_memory_mb=0)

    def base_dir(self, task: Task) -> str:
        return str(self.path)


class AcmeGrader:
    """Says which pool it was made for."""

    def __init__(self, pool: AcmePool, runner: object, *, seed: int) -> None:
        self.pool, self.seed = pool, seed


def test_a_third_party_brings_a_pool_and_its_grader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(cast("dict[str, str]", POOLS.builtins), "acme-1", f"{__name__}:AcmePool")
    monkeypatch.setitem(cast("dict[str, str]", GRADERS.builtins), "acme", f"{__name__}:AcmeGrader")
    (tmp_path / "pool.json").write_text('{"format": "acme-1"}')
    config = recipe(tmp_path, "sandbox.memory_mb=64", "seed=7")
    check_pool(config)
    tasks, provider, grader = build_grading(config, tmp_path)
    asyncio.run(provider.close())
    assert isinstance(grader, AcmeGrader)
    assert (grader.pool, grader.seed) == (tasks.pool, 7)
    assert tasks.pool.tasks("train")[0].limits.max_turns == 2
