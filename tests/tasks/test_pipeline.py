"""Factory, box, gate and pool on a small package, with planted faults for every check of the gate."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from strop.core.errors import TaskError
from strop.tasks.box import Box
from strop.tasks.build import Build
from strop.tasks.factory import Prepared
from strop.tasks.gate import Gate
from strop.tasks.mutation import apply_edit
from strop.tasks.pool import INSTRUCTION, RepairPool, open_pool
from strop.tasks.selection import Quota, choose_mutants, drop_duplicates
from strop.tasks.verifier import Verifier, observe

Built = tuple[Build, Any, list[Prepared]]


def prepared_by_name(built: Built) -> dict[str, Prepared]:
    return {prepared.candidate.span.name: prepared for prepared in built[2]}


def run_visible(folder: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "unittest", "discover", "-q", "-s", "tests"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def all_cases_hold(folder: str, verifier: Verifier) -> list[bool]:
    """Run every case of a verifier in its own interpreter over ``folder``."""
    code = (
        "import json, sys, importlib; sys.path.insert(0, '.')\n"
        "from strop.tasks.verifier import Verifier, observe\n"
        "v = Verifier.from_json(json.load(sys.stdin)); f = getattr(importlib.import_module(v.module), v.qualname)\n"
        "print(json.dumps([c.is_met(*observe(f, c.args, c.kwargs, drain=v.drain)) for c in (*v.visible, *v.hidden)]))"
    )
    text = json.dumps(verifier.to_json())
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, input=text, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# ---------------------------------------------------------------------------------------------------------------- factory


def test_factory_prepares_what_can_be_tested(built: Built):
    build, candidates, _ = built
    prepared = prepared_by_name(built)
    assert {"shorten", "runs", "clamp_all"} <= set(prepared)
    assert "stamped" not in prepared
    assert build.refused["function: uses time"] == 1
    assert [candidate.calls for candidate in candidates["kit-1.0"] if candidate.span.name == "shorten"] == [((["hello world", 8], {}),)]
    assert prepared["runs"].verifier.drain
    assert not prepared["shorten"].verifier.drain


def test_cases_are_plenty_distinct_and_hidden_ones_were_never_shown(built: Built):
    for prepared in built[2]:
        verifier = prepared.verifier
        assert len(verifier.visible) == 8
        assert len(verifier.hidden) >= 16
        calls = [json.dumps([case.args, case.kwargs], sort_keys=True) for case in (*verifier.visible, *verifier.hidden)]
        assert len(set(calls)) == len(calls)
        assert prepared.num_edits >= 10
        compile(prepared.test_text, prepared.test_path, "exec")


def test_preparing_again_gives_the_same(built: Built):
    build, candidates, prepared = built
    fresh = Build(out=build.out.with_name("again"), seed=build.seed, limit=0, workers=1, trees=build.trees)
    (fresh.work / "trees").parent.mkdir(parents=True)
    os.symlink(build.work / "trees", fresh.work / "trees")
    assert fresh.prepare_all(candidates) == prepared
    assert fresh.prepare_all(candidates) == prepared, "kept parts differ from fresh ones"


def test_duplicates_are_dropped_within_and_across_splits(built: Built):
    prepared = prepared_by_name(built)
    digests = {name: item.candidate.digest for name, item in prepared.items()}
    assert digests["runs"] == digests["renamed_runs"]
    kept, dropped = drop_duplicates(built[2], set())
    assert dropped == 1
    assert len({item.candidate.digest for item in kept}) == len(kept)
    heldout = dataclasses.replace(prepared["runs"], candidate=dataclasses.replace(prepared["runs"].candidate, split="heldout"))
    assert drop_duplicates([heldout], {digests["runs"]}) == ([], 1)
    assert drop_duplicates([heldout], {digests["shorten"]}) == ([heldout], 0)


def test_selection_balances_kinds_and_bounds_identifiers(built: Built):
    chosen = choose_mutants(built[2], Quota(40, 12), 0)
    kinds = [edit.kind for _, edit in chosen]
    identifiers = sum(kind in ("variable", "argument_swap") for kind in kinds)
    assert len(chosen) >= 20
    assert identifiers <= 0.18 * len(chosen)
    assert len(set(kinds)) >= 5
    assert chosen == choose_mutants(built[2], Quota(40, 12), 0)
    taken = {(prepared.candidate.cluster, edit) for prepared, edit in chosen}
    again = choose_mutants(built[2], Quota(40, 12), 0, taken=taken)
    assert not {(prepared.candidate.cluster, edit) for prepared, edit in again} & taken


# ---------------------------------------------------------------------------------------------------------------- box


@pytest.fixture(scope="module")
def gate_boxes(built: Built):
    trees = built[0].work / "trees"
    with Box(trees, with_site=True) as usual, Box(trees, hash_seed=7, environment={"TZ": "Asia/Tokyo"}) as other:
        yield usual, other


def test_box_has_no_network_and_a_read_only_root(built: Built, gate_boxes: tuple[Box, Box], tmp_path: Path):
    code = (
        "import os, socket\n"
        "def probe(path):\n"
        "    try:\n        open(path, 'w').close()\n        return 'written'\n"
        "    except OSError as error:\n        return error.errno\n"
        "def connect(address):\n"
        "    try:\n        socket.create_connection((address, 53), 1)\n        return 'connected'\n"
        "    except OSError as error:\n        return error.errno\n"
    )
    tree = tmp_path / "trees" / "x"
    tree.mkdir(parents=True)
    (tree / "probe.py").write_text(code)
    cases = [{"args": [f"{tmp_path}/x"], "expected": 30}, {"args": ["/usr/x"], "expected": 30}, {"args": ["/trees/x/y"], "expected": 30}]
    request = {"tree": "/trees/x", "module": "probe", "drain": False}
    with Box(tmp_path / "trees") as box:
        assert box.ask("replay", name="probe", cases=cases, orders=[[0, 1, 2]], **request)["passed"] in ([[1, 2]], [[0, 1, 2]])
        unreachable = [{"args": ["192.0.2.1"], "expected": 101}]
        assert box.ask("replay", name="connect", cases=unreachable, orders=[[0]], **request) == {"passed": [[0]]}
    assert not (tmp_path / "x").exists()


def test_box_survives_hangs_exits_and_a_dead_server(tmp_path: Path):
    tree = tmp_path / "trees" / "x"
    tree.mkdir(parents=True)
    (tree / "bad.py").write_text(
        "import os, time\ndef sleep(n):\n    time.sleep(n)\ndef spin(n):\n    while True: pass\n"
        "def leave(n):\n    os._exit(n)\ndef kill(n):\n    os.kill(os.getppid(), 9)\n    time.sleep(9)\ndef good(n):\n    return n\n"
    )
    request = {"tree": "/trees/x", "module": "bad", "drain": False, "cases": [{"args": [9], "expected": 9}], "orders": [[0]]}
    with Box(tmp_path / "trees") as box:
        assert box.ask("replay", name="sleep", deadline_s=0.5, **request) == {"refused": "deadline"}
        assert box.ask("replay", name="spin", deadline_s=30, **request) == {"passed": [[]]}
        assert box.ask("replay", name="leave", **request) == {"refused": "died"}
        with pytest.raises(TaskError, match="ends at once"):
            box.ask("replay", name="kill", **request)
        assert box.ask("replay", name="good", **request) == {"passed": [[0]]}
        assert box.restarts == 3


# ---------------------------------------------------------------------------------------------------------------- gate


def test_gate_admits_mutants_and_counts_planted_faults(built: Built, gate_boxes: tuple[Box, Box]):
    build, _, _ = built
    prepared = prepared_by_name(built)["shorten"]
    source = build.source_of(prepared.candidate)
    gate = Gate(*gate_boxes, seed=0)
    edit = prepared.mutants[0]
    (admitted,) = gate.admit(prepared, source, [edit])
    assert admitted.failed[0] >= 1
    assert admitted.failed[1] >= 1
    assert "FAILED" in admitted.output
    assert not gate.refused

    harmless = dataclasses.replace(edit, line=7, old=">>>", new=">>>>")
    assert gate.admit(prepared, source, [harmless]) == []
    assert gate.refused == {"mutant: isn't detected": 1}

    gate.refused.clear()
    wrong = dataclasses.replace(prepared.verifier.hidden[0], expected="wrong", raises=None)
    faulty = dataclasses.replace(prepared, verifier=dataclasses.replace(prepared.verifier, hidden=(wrong, *prepared.verifier.hidden[1:])))
    assert gate.admit(faulty, source, [edit]) == []
    assert gate.refused == {"gold: fails": 1}

    gate.refused.clear()
    assert gate.admit(dataclasses.replace(prepared, test_text="import nothing\n"), source, [edit]) == []
    assert gate.refused == {"gold: its unit tests fail": 1}


def test_gate_refuses_what_depends_on_order_or_environment(built: Built, tmp_path: Path):
    _, _, prepared = built
    source = (
        "import os\n\n\ncount = 0\n\n\ndef f(n):\n    global count\n    count += 1\n    return n if count < 20 else n + 1\n\n\n"
        "def g(n):\n    return n if os.environ.get('TZ') == 'UTC' else n + 1\n"
    )
    tree = tmp_path / "trees" / "odd-1"
    tree.mkdir(parents=True)
    (tree / "odd.py").write_text(source)
    base = prepared[0]
    cases = tuple(dataclasses.replace(base.verifier.visible[0], args=(n,), kwargs={}, expected=n, raises=None) for n in range(24))
    with Box(tmp_path / "trees", with_site=True) as usual, Box(tmp_path / "trees", environment={"TZ": "Asia/Tokyo"}) as other:
        for name, reason in (("f", "gold: fails"), ("g", "gold: depends on the environment")):
            verifier = Verifier(module="odd", qualname=name, path="odd.py", visible=cases[:8], hidden=cases[8:])
            candidate = dataclasses.replace(base.candidate, tree_id="odd-1", path="odd.py", module="odd")
            gate = Gate(usual, other, seed=0)
            assert gate.admit(dataclasses.replace(base, candidate=candidate, verifier=verifier), source, base.mutants[:1]) == []
            assert gate.refused == {reason: 1}


# ---------------------------------------------------------------------------------------------------------------- pool


def test_pool_tasks_fail_and_their_gold_edit_repairs_them(pool_dir: Path, tmp_path: Path):
    pool = RepairPool(pool_dir, tmp_path)
    tasks = pool.tasks("train")
    assert len(tasks) >= 6
    assert len({task.task_id for task in tasks}) == len(tasks)
    for task in tasks[:2]:
        folder = pool.base_dir(task)
        assert (Path(folder) / "LICENSE").exists()
        verifier = pool.verifier(task)
        path, span = pool.function(task)
        before = run_visible(folder)
        assert before.returncode
        last = task.instruction.rstrip().rsplit("\n", 1)[-1]
        assert task.instruction.startswith(INSTRUCTION)
        assert last == before.stderr.rstrip().rsplit("\n", 1)[-1]
        held = all_cases_hold(folder, verifier)
        assert pool.record(task).failed == (8 - sum(held[:8]), len(held) - 8 - sum(held[8:]))
        file = Path(folder) / path
        assert file.read_text() == pool.mutant_source(task)
        assert span.start_line <= pool.gold_edit(task).line <= span.end_line
        assert pool.gold_edit(task) in pool.candidates(task)
        repaired = apply_edit(file.read_text(), pool.gold_edit(task))
        assert repaired == pool.gold_source(task)
        file.write_text(repaired)
        assert run_visible(folder).returncode == 0
        assert all(all_cases_hold(folder, verifier))


def test_workspaces_are_made_once_by_many(pool_dir: Path, tmp_path: Path):
    pools = [RepairPool(pool_dir, tmp_path) for _ in range(4)]
    task = pools[0].tasks("train")[0]
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda pool: pool.base_dir(task), pools))
    assert len(folders) == 1
    (folder,) = folders
    assert not [path for path in Path(folder).parent.iterdir() if path.name.startswith(".")]
    other = pools[0].tasks("train")[1]
    assert pools[0].base_dir(other) != folder


def test_pool_answers_wrong_questions_clearly(pool_dir: Path, tmp_path: Path):
    pool = RepairPool(pool_dir, tmp_path)
    with pytest.raises(TaskError, match="Did you mean 'heldout'"):
        pool.tasks("held_out")
    stranger = dataclasses.replace(pool.tasks("train")[0], task_id="x")
    with pytest.raises(TaskError, match="isn't in the pool"):
        pool.verifier(stranger)
    with pytest.raises(TaskError, match="builtin:repair"):
        open_pool("builtin:repairs", tmp_path)
    with pytest.raises(TaskError, match=r"meta\.json"):
        RepairPool(tmp_path, tmp_path)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in pool_dir.iterdir():
        if path.is_file():
            (damaged / path.name).write_bytes(path.read_bytes())
    (damaged / "tasks.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(TaskError, match=r"tasks\.jsonl\.zst"):
        RepairPool(damaged, tmp_path)
    (damaged / "meta.json").write_text('{"format": 99}')
    with pytest.raises(TaskError, match="format 99"):
        RepairPool(damaged, tmp_path)


def test_meta_counts_what_is_there(pool_dir: Path, tmp_path: Path):
    pool = RepairPool(pool_dir, tmp_path)
    counts = pool.meta["splits"]["train"]
    assert counts["tasks"] == len(pool.tasks("train")) == sum(counts["kinds"].values())
    assert pool.meta["python"]
    assert "kit-1.0: MIT" in (pool_dir / "NOTICE").read_text()


def test_observe_needs_nothing_but_plain_data(pool_dir: Path, tmp_path: Path):
    pool = RepairPool(pool_dir, tmp_path)
    data = json.loads(json.dumps(pool.verifier(pool.tasks("train")[0]).to_json()))
    verifier = Verifier.from_json(data)
    assert observe(lambda *_, **__: 0, verifier.visible[0].args, verifier.visible[0].kwargs, drain=False) == (0, None)
