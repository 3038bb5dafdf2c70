"""The pool that ships: its sizes, its balance, that no held-out function is training code in any form, and a sample run for real."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from strop.core.errors import TaskError
from strop.tasks.factory import logical_module
from strop.tasks.index import SPLITS
from strop.tasks.mutation import IDENTIFIER_KINDS, apply_edit, candidate_edits
from strop.tasks.pool import RepairPool, open_pool
from strop.tasks.spans import normalised_digest
from strop.tasks.split import split_of


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> RepairPool:
    return open_pool("builtin:repair", tmp_path_factory.mktemp("cache"))


def test_sizes_and_kinds(pool: RepairPool):
    for split, tasks, functions in (("train", 2000, 240), ("heldout", 300, 50), ("hard", 64, 20)):
        rows = pool.tasks(split)
        assert len(rows) >= tasks
        assert len({task.provenance["cluster"] for task in rows}) >= functions
    for split in ("train", "heldout"):
        kinds = Counter(task.provenance["kind"] for task in pool.tasks(split))
        assert sum(kinds[kind] for kind in IDENTIFIER_KINDS) <= 0.2 * kinds.total()
        assert sum(count >= 0.05 * kinds.total() for count in kinds.values()) >= 6
    assert sum(path.stat().st_size for path in pool.path.rglob("*") if path.is_file()) <= 12 * 2**20


def test_kinds_can_be_left_out_of_all_splits_but_the_harder_one(pool: RepairPool, tmp_path: Path):
    fewer = open_pool("builtin:repair", tmp_path, exclude_kinds=IDENTIFIER_KINDS)
    for split in SPLITS:
        kept = [task for task in pool.tasks(split) if split == "hard" or task.provenance["kind"] not in IDENTIFIER_KINDS]
        assert fewer.tasks(split) == tuple(kept)
    assert len(fewer.tasks("heldout")) >= 300
    assert len({task.provenance["cluster"] for task in fewer.tasks("heldout")}) >= 50
    with pytest.raises(TaskError, match=r"kind 'variables' doesn't exist.*Did you mean 'variable'"):
        open_pool("builtin:repair", tmp_path, exclude_kinds=["variables"])


def test_functions_trees_and_licences(pool: RepairPool):
    means = []
    for split in SPLITS:
        for task in pool.tasks(split):
            record = pool.function_record(task)
            length = record.span.end_line - record.span.start_line + 1
            assert length <= (40 if split == "hard" else 20)
            assert record.num_edits >= 10
            assert len(record.verifier.visible) == 8
            assert len(record.verifier.hidden) >= 16
            assert task.provenance["licence"]
            assert min(pool.record(task).failed) >= 1
            if split == "hard":
                assert length > 20 or task.provenance["kind"] in IDENTIFIER_KINDS
            means.append(record.num_edits)
    assert sum(means) / len(means) >= 30
    notice = (pool.path / "NOTICE").read_text()
    for archive in (pool.path / "trees").iterdir():
        tree_id = archive.name.removesuffix(".tar.zst")
        assert f"{tree_id}: " in notice
        assert "gpl" not in notice.partition(f"{tree_id}: ")[2].partition(";")[0].lower()


def test_splits_share_no_module_and_no_function_in_any_form(pool: RepairPool):
    digests: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for split in SPLITS:
        for task in pool.tasks(split):
            record = pool.function_record(task)
            package = record.source.partition(" ")[0]
            side = split_of(package, logical_module(package, record.verifier.path))
            assert side == ("train" if split == "train" else "heldout")
            digests[side].add(normalised_digest(pool.gold_source(task), record.span))
    assert not digests["train"] & digests["heldout"]
    listed = set((pool.path / "heldout_digests.txt").read_text().split())
    assert digests["heldout"] <= listed


def test_first_tasks_are_spread_over_functions(pool: RepairPool):
    first = pool.tasks("heldout")[:128]
    assert len({task.provenance["cluster"] for task in first}) >= 45
    assert len({task.provenance["kind"] for task in first}) >= 6


def test_gold_edits_are_candidates(pool: RepairPool):
    for split in SPLITS:
        for task in pool.tasks(split)[:20]:
            mutant, gold = pool.mutant_source(task), pool.gold_edit(task)
            assert apply_edit(mutant, gold) == pool.gold_source(task)
            assert gold in candidate_edits(mutant, pool.function(task)[1])


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_fails_and_its_repair_passes(pool: RepairPool, split: str):
    task = pool.tasks(split)[3]
    folder = pool.base_dir(task)
    assert sum(path.suffix == ".py" for path in Path(folder).rglob("*.py")) >= (4 if split == "hard" else 3)
    argv = [sys.executable, "-m", "unittest", "discover", "-q", "-s", "tests"]
    before = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert before.returncode
    file = Path(folder) / pool.function(task)[0]
    file.write_text(apply_edit(file.read_text(), pool.gold_edit(task)))
    assert subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False).returncode == 0


@pytest.mark.parametrize("damage", ["mutant", "tests", "neighbour", "missing", "tree"])
def test_a_damaged_workspace_is_made_again(tmp_path: Path, damage: str):
    first = open_pool("builtin:repair", tmp_path)
    task = first.tasks("heldout")[0]
    folder, record = Path(first.base_dir(task)), first.function_record(task)
    path, test_path = record.verifier.path, record.test_path
    neighbour = next(
        item for item in sorted(folder.rglob("*.py")) if item.stat().st_size and str(item.relative_to(folder)) not in (path, test_path)
    )
    whole = {item: item.read_bytes() for item in folder.rglob("*.py")}
    broken = {"mutant": folder / path, "tests": folder / test_path}.get(damage, neighbour)
    broken.unlink()  # a hard link: the tree keeps its file
    if damage == "tree":
        tree = next(item for item in tmp_path.rglob(neighbour.name) if "trees" in item.parts and item.read_bytes() == whole[neighbour])
        tree.write_bytes(b"")
    if damage != "missing":
        broken.write_bytes(b"")
    assert open_pool("builtin:repair", tmp_path).base_dir(task) == str(folder)
    assert {item: item.read_bytes() for item in folder.rglob("*.py")} == whole
