"""The whole way, in real boxes: source, suite, drafts, gate, pool, grading, the agent's loop. Slow: hundreds of test runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from leak_plants import git
from suite_kit import FILES, OLDER, PRICE, STOCK, TEST_PRICE, build_once, episode_of, give_environment, write_files

from strop.core.errors import TaskError
from strop.grading.suite import SuiteGrader
from strop.grading.suite_check import check_task
from strop.sandboxes import BubblewrapProvider
from strop.tasks.admission.build import KINDS, BuildOptions
from strop.tasks.admission.gate import SuiteGate
from strop.tasks.admission.pool import SuitePool
from strop.tasks.admission.record import TREE, SuiteTask
from strop.tasks.admission.tally import SourceTally
from strop.tasks.makers.draft import Draft
from strop.tasks.makers.history import Step, history_draft, steps_of
from strop.tasks.repository.probe import Repository, probe
from strop.tasks.repository.source import open_source

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Repository:
    folder = tmp_path_factory.mktemp("probe")
    give_environment(folder, FILES)

    async def run() -> Repository:
        boxes = BubblewrapProvider()
        try:
            return await probe(open_source(str(source), download_dir=folder), boxes, folder, folder)
        finally:
            await boxes.close()

    return asyncio.run(run())


def examine(repository: Repository, draft: Draft, scratch: Path) -> Any:
    async def run() -> Any:
        boxes = BubblewrapProvider()
        try:
            return await SuiteGate(repository, boxes, scratch, seed=0, places=(), tree="t").examine(draft)
        finally:
            await boxes.close()

    return asyncio.run(run())


def mutation(before: str, after: str, path: str = "shop/price.py", source: str = PRICE, name: str = "discount", **more: Any) -> Draft:
    assert before in source
    start = source[: source.index(f"def {name}")].count("\n") + 1
    text = source.replace(before, after, 1).encode()
    given = {"kind": "mutation", "families": ("x",), "cluster": f"{path}:{name}", "subject": path, "regions": ((path, start, start + 6),)}
    return Draft(base={path: text}, gold={path: source.encode()}, **{**given, **more})


def test_the_suite_is_found(repository: Repository) -> None:
    assert len(repository.tests) == 14
    assert repository.excluded == {}
    assert repository.layout.packages == ("shop",)
    line = STOCK.split("\n").index("    def take(self, name, count=1):") + 1
    callers = {repository.tests[number] for number in repository.coverage.tests_of("shop/stock.py", line, line + 6)}
    assert "tests/test_stock.py::test_take" in callers
    assert "tests/test_stock.py::test_add_nothing" not in callers


def test_a_real_bug_is_admitted(repository: Repository, tmp_path: Path) -> None:
    verdict = examine(repository, mutation("count >= 5", "count > 5"), tmp_path)
    assert verdict.status == "admitted", verdict.reason
    assert verdict.task.verifier.fail_to_pass == ("tests/test_price.py::TestPrice::test_some",)
    sides = [run["side"] for run in verdict.evidence["runs"]]
    assert sides[:6] == ["broken"] * 3 + ["solved"] * 3
    assert len({run["first_in_order"] for run in verdict.evidence["runs"]}) > 1
    assert verdict.evidence["mutants"][-1][1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (mutation("* 80 // 100", "* 8 // 10"), "no test notices it"),
        (mutation("    return price\n", "    import os\n    os._exit(0)\n"), "without a change the run ends early (exit0)"),
        (mutation("    return price\n", "    while True:\n        pass\n"), "without a change the run ends early (timeout)"),
        (mutation("def discount(price, count):", "def discount(price):\n    count = 1"), "nothing passes without it"),
        (mutation("count >= 5", "count > 5", regions=(("shop/price.py", 900, 901),)), "no test calls it"),
    ],
    ids=["equivalent", "ends the process", "hangs", "breaks everything", "not covered"],
)
def test_drafts_that_are_refused(repository: Repository, tmp_path: Path, draft: Draft, reason: str) -> None:
    if reason == "nothing passes without it":
        draft = dataclasses.replace(draft, base={"shop/price.py": b"raise RuntimeError\n", "shop/stock.py": b"raise RuntimeError\n"})
    verdict = examine(repository, draft, tmp_path)
    assert (verdict.status, verdict.reason) == ("refused", reason)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_solution_is_refused(repository: Repository, tmp_path: Path) -> None:
    draft = mutation("count >= 5", "count > 5")
    verdict = examine(repository, dataclasses.replace(draft, gold={"shop/price.py": PRICE.replace("90", "91").encode()}), tmp_path)
    assert (verdict.status, verdict.reason) == ("refused", "the solution fails")


def test_a_flaky_bug_is_quarantined_with_evidence(repository: Repository, tmp_path: Path) -> None:
    coins = (
        "\n\ndef _coin(function):\n    import os\n\n    return lambda *a, **k: function(*a, **k) if os.urandom(1)[0] % 2 else -1\n\n\n"
        "with_tax, discount = _coin(with_tax), _coin(discount)\n"
    )
    draft = mutation("count >= 5", "count > 5")
    for _ in range(3):  # with five coins a run, equal runs are rare
        verdict = examine(repository, dataclasses.replace(draft, base={"shop/price.py": (PRICE + coins).encode()}), tmp_path)
        if verdict.status == "quarantined":
            break
    assert verdict.status == "quarantined", verdict.reason
    assert verdict.evidence["flaky"]
    assert len([run for run in verdict.evidence["runs"] if run["side"] == "broken"]) >= 2


def test_an_order_dependent_bug_is_quarantined(repository: Repository, tmp_path: Path) -> None:
    counter = "    discount.calls = getattr(discount, 'calls', 0) + 1\n    if discount.calls == 1:\n        return -1\n    return price\n"
    verdict = examine(repository, mutation("    if count >= 10:", counter + "    if count >= 10:"), tmp_path)
    assert verdict.status == "quarantined", verdict.reason
    assert verdict.evidence["flaky"]


def test_an_instruction_with_the_solution_is_refused(repository: Repository, tmp_path: Path) -> None:
    step = Step("abc", "Write\n\n    return price * 90 // 100\n\nwhere five are bought", OLDER, FILES)
    draft = history_draft(repository, step)
    assert isinstance(draft, Draft)
    verdict = examine(repository, draft, tmp_path)
    assert verdict.reason.startswith("the instruction holds a line of the solution")


def test_a_step_of_history_is_admitted(repository: Repository, tmp_path: Path) -> None:
    draft = history_draft(repository, Step("1..2", "Discounts for many.", OLDER, FILES))
    assert isinstance(draft, Draft)
    verdict = examine(repository, draft, tmp_path)
    assert verdict.status == "admitted", verdict.reason
    task: SuiteTask = verdict.task
    assert {test.rpartition("::")[2] for test in task.verifier.fail_to_pass} >= {"test_few", "test_some", "test_many"}
    assert any("test_stock.py" in test for test in task.verifier.pass_to_pass)
    assert task.gold == {"shop/price.py": TREE}
    assert task.tests == {"tests/test_price.py": TREE}


def test_commits_and_releases_give_the_same_step(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    git(folder, "init", "-q")
    for message, files in (("Start", OLDER), ("Discounts\n\nfor many.\n\nSigned-off-by: a", FILES), ("Notes", {**FILES, "NEWS": b"x"})):
        write_files(folder, files)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", message)
    source = open_source(str(folder), download_dir=tmp_path)
    (step,) = steps_of(dataclasses.replace(repository, source=source), limit=5)
    assert step.message == "Discounts\n\nfor many."
    assert (dict(step.before), dict(step.after)) == (OLDER, FILES)
    releases = dataclasses.replace(repository.source, releases=(("shop-1", OLDER),))
    (other,) = steps_of(dataclasses.replace(repository, source=releases), limit=5)
    assert history_draft(repository, other) == "says nothing about itself"
    other = dataclasses.replace(other, message="x")
    drafts = [history_draft(repository, item) for item in (step, other)]
    assert isinstance(drafts[0], Draft)
    assert isinstance(drafts[1], Draft)
    assert (drafts[0].base, drafts[0].gold, drafts[0].tests) == (drafts[1].base, drafts[1].gold, drafts[1].tests)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ({**OLDER, "shop/price.py": FILES["shop/price.py"]}, "changes no tests"),
        ({**OLDER, "tests/test_price.py": FILES["tests/test_price.py"]}, "changes no source"),
        ({**FILES, "shop/price.py": FILES["shop/price.py"] + b"".join(b"x%d = 1\n" % n for n in range(2000))}, "changes too much"),
    ],
)
def test_steps_that_make_no_task(repository: Repository, after: dict[str, bytes], reason: str) -> None:
    assert history_draft(repository, Step("a", "b", OLDER, after)) == reason


def test_a_copy_in_the_environment_is_refused(repository: Repository, tmp_path: Path) -> None:
    place = repository.environment.folder / "old" / "shop"
    write_files(place, {"price.py": PRICE.encode()})
    try:
        verdict = examine(repository, mutation("count >= 5", "count > 5"), tmp_path)
    finally:
        shutil.rmtree(place.parent)
    assert verdict.reason.startswith("the solution can be read elsewhere (site-packages)")


# ------------------------------------------------------------------------------------------------------------------ the build


def test_a_build_makes_tasks_of_each_kind(built: tuple[BuildOptions, SourceTally], pool: SuitePool) -> None:
    options, tally = built
    assert tally.problem == ""
    assert {kind: tally.number(kind, "admitted") for kind in KINDS} == {"mutation": 3, "combined": 1, "deletion": 2, "history": 0}
    assert len(pool.all_tasks()) == 6
    refused = (
        [json.loads(line) for line in (options.out / "refused.jsonl").read_text().splitlines()]
        if tally.number("mutation", "refused")
        else []
    )
    assert all(row["reason"] and row["id"] for row in refused)
    for task in pool.all_tasks():
        report = json.loads(next((options.out / "leaks").glob(f"*{task.task_id[-8:]}*")).read_text())
        assert report["leaks"] == []


def test_going_on_does_nothing_twice(built: tuple[BuildOptions, SourceTally], source: Path) -> None:
    options, tally = built
    before = {path: path.stat().st_mtime_ns for path in (options.out / "tasks").iterdir()}
    again = build_once(options, source)
    assert again.counts == tally.counts
    assert {path: path.stat().st_mtime_ns for path in (options.out / "tasks").iterdir()} == before


def test_the_same_build_elsewhere_gives_the_same_tasks(built: tuple[BuildOptions, SourceTally], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    give_environment(out, FILES)
    build_once(BuildOptions(out=out, limits=built[0].limits, workers=1), source)
    names = {path.name for path in (built[0].out / "tasks").iterdir()}
    assert {path.name for path in (out / "tasks").iterdir()} == names


def test_every_task_passes_the_gate_again(pool: SuitePool, provider: BubblewrapProvider) -> None:
    async def check() -> list[str]:
        return [(await check_task(pool, task, provider, rounds=1)).problem for task in pool.all_tasks()]

    assert asyncio.run(check()) == [""] * 6


def test_the_gate_notices_what_became_of_a_task(pool: SuitePool, provider: BubblewrapProvider) -> None:
    task = next(task for task in pool.all_tasks() if task.provenance["kind"] == "mutation")
    (path,) = pool.gold_files(task)
    leak = Path(pool.base_dir(task)) / f"{path}.orig"
    leak.write_bytes(pool.gold_files(task)[path] or b"")
    try:
        problem = asyncio.run(check_task(pool, task, provider, rounds=1)).problem
    finally:
        leak.unlink()
    assert problem.startswith("the solution can be read elsewhere: backup")
    told = dataclasses.replace(task, instruction=task.instruction + (pool.gold_files(task)[path] or b"").decode())
    assert asyncio.run(check_task(pool, told, provider, rounds=1)).problem.startswith("the instruction holds a line")


def test_the_workspace_lacks_hidden_tests_and_has_the_bug(pool: SuitePool) -> None:
    for task in pool.all_tasks():
        base = Path(pool.base_dir(task))
        for path, data in pool.base_files(task).items():
            assert (base / path).read_bytes() == data
        for test in pool.suite(task).hidden:
            file, _, rest = test.partition("::")
            name = rest.rpartition("::")[2].partition("[")[0]
            assert f"def {name}(" not in (base / file).read_text()
            assert f"def {name}(" in (pool.hidden_files(task)[file] or b"").decode()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"shop/__init__.py": b""}, "holds no tests"),
        ({"README": b"x"}, "holds no Python package"),
        ({**FILES, "shop/__init__.py": b"raise ImportError('broken')\n"}, "no test can be imported"),
        (
            {**FILES, "tests/test_price.py": TEST_PRICE.replace("assertEqual", "assertNotEqual").encode(), "tests/test_stock.py": b""},
            "the suite of",
        ),
        ({**FILES, "tests/test_price.py": b"def test_x():\n    import os\n    os._exit(3)\n", "tests/test_stock.py": b""}, "the suite"),
    ],
    ids=["no tests", "no package", "import error", "failing suite", "suite that ends the process"],
)
def test_a_source_that_cannot_be_used_is_said(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    source = write_files(tmp_path / "shop", files)
    out = tmp_path / "pool"
    give_environment(out, files)
    tally = build_once(BuildOptions(out=out, limits={"mutation": 1}), source)
    assert problem in tally.problem
    assert not (out / "tasks").exists()


def test_a_truncated_archive_is_said(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shop-1.tar.gz", "w:gz") as archive:
        archive.add(write_files(tmp_path / "shop-1", FILES), "shop-1")
    data = (tmp_path / "shop-1.tar.gz").read_bytes()
    (tmp_path / "shop-1.tar.gz").write_bytes(data[:-40])
    tally = build_once(BuildOptions(out=tmp_path / "pool", limits={"mutation": 1}), tmp_path / "shop-1.tar.gz")
    assert "truncated" in tally.problem


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(TaskError, match="holds no pool"):
        build_once(BuildOptions(out=tmp_path), source)


def test_line_ends_of_other_systems(tmp_path: Path) -> None:
    files = {path: data.replace(b"\n", b"\r\n") for path, data in FILES.items()}
    source = write_files(tmp_path / "shop", files)
    out = tmp_path / "pool"
    give_environment(out, files)
    tally = build_once(BuildOptions(out=out, limits={"mutation": 2, "deletion": 1}), source)
    assert tally.number("mutation", "admitted") == 2
    pool = SuitePool(out, tmp_path / "cache")
    for task in pool.all_tasks():
        for data in pool.base_files(task).values():
            assert data is not None
            assert b"\n" not in data.replace(b"\r\n", b"")


def test_grader_is_the_gate(pool: SuitePool, provider: BubblewrapProvider) -> None:
    """What the gate calls a solution scores 1 with another seed, in the grader."""

    async def grade() -> set[float]:
        grader = SuiteGrader(pool, provider, seed=77)
        try:
            outcomes = [await grader.grade(task, episode_of(task, pool.gold_files(task))) for task in pool.all_tasks()]
        finally:
            await grader.close()
        return {outcome.reward for outcome in outcomes}  # type: ignore[union-attr]

    assert asyncio.run(grade()) == {1.0}
