"""Where control groups are found, for both versions, on made-up file systems; the real kernel is used by the conformance suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.sandboxes.cgroups import Evidence, Group, Hierarchy, find_hierarchies, paths_of, remove_stale
from strop.sandboxes.ownership import identity


def _proc(root: Path, cgroup: str, mountinfo: str) -> Path:
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def _directory(path: Path, controllers: str | None = None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").write_text("")
    if controllers is not None:
        (path / "cgroup.subtree_control").write_text(controllers)


def test_version_2_uses_the_place_beside_the_own_group(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    _directory(mount, "cpu memory pids")
    _directory(mount / "user.slice/app.slice", "memory pids")
    _directory(mount / "user.slice", "cpu memory pids")
    _directory(mount / "user.slice/app.slice/term.scope", "")
    proc = _proc(tmp_path, "0::/user.slice/app.slice/term.scope\n", f"30 20 0:26 / {mount} rw shared:9 - cgroup2 cgroup2 rw\n")
    found = find_hierarchies(proc)
    assert {name: (h.version, h.parent) for name, h in found.items()} == {
        "memory": (2, mount / "user.slice/app.slice"),
        "pids": (2, mount / "user.slice/app.slice"),
    }


def test_version_2_controllers_may_come_from_different_levels(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    _directory(mount, "memory pids")
    _directory(mount / "a", "pids")
    _directory(mount / "a/b", "")
    proc = _proc(tmp_path, "0::/a/b\n", f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    found = find_hierarchies(proc)
    assert found["pids"].parent == mount / "a"
    assert found["memory"].parent == mount


def test_version_1_and_hybrid(tmp_path: Path) -> None:
    memory, unified = tmp_path / "memory", tmp_path / "unified"
    _directory(memory / "job")
    _directory(unified, "")
    proc = _proc(
        tmp_path,
        "4:memory:/job\n3:cpu,cpuacct:/\n0::/\n",
        f"30 20 0:26 / {memory} rw - cgroup cgroup rw,memory\n31 20 0:27 / {unified} rw - cgroup2 cgroup2 rw\n",
    )
    assert {name: (h.version, h.parent) for name, h in find_hierarchies(proc).items()} == {"memory": (1, memory / "job")}


def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    _directory(memory / "inner")
    proc = _proc(tmp_path, "4:memory:/docker/abc/inner\n", f"30 20 0:26 /docker/abc {memory} rw - cgroup cgroup rw,memory\n")
    assert find_hierarchies(proc)["memory"].parent == memory / "inner"


def test_nothing_writable_is_nothing_found(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "0::/x\n", f"30 20 0:26 / {tmp_path / 'absent'} rw - cgroup2 cgroup2 rw\n")
    assert find_hierarchies(proc) == {}


@pytest.mark.parametrize("version", [1, 2])
def test_limits_are_on_top_of_the_idle_worker_and_counters_are_read(tmp_path: Path, version: int) -> None:
    names = {
        1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        2: ("memory.current", "memory.max", "memory.events", "low 0\nmax 70\noom 9\noom_kill 3\noom_group_kill 5\n"),
    }[version]
    hierarchies = {name: Hierarchy(controller=name, version=version, parent=tmp_path) for name in ("memory", "pids")}
    group = Group("w0", hierarchies)
    directory = tmp_path / identity() / "w0"
    (directory / names[0]).write_text("1000\n")
    (directory / names[2]).write_text(names[3])
    if version == 1:
        (directory / "memory.max_usage_in_bytes").write_text("900\n")  # and none for swap
    (directory / "pids.current").write_text("4\n")
    (directory / "pids.events").write_text("max 2\n")
    group.limit(memory_bytes=5 << 20, processes=10)
    assert (directory / names[1]).read_text() == str((5 << 20) + 1000)
    assert (directory / "pids.max").read_text() == "14"
    assert group.evidence() == Evidence(oom_kills=3, limit_hits=9 if version == 2 else 0, refused_forks=2)


@pytest.mark.parametrize("name", ["memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes"])
def test_version_1_counts_a_limit_once_that_was_reached(tmp_path: Path, name: str) -> None:
    group = Group("w0", {"memory": Hierarchy(controller="memory", version=1, parent=tmp_path)})
    directory = tmp_path / identity() / "w0"
    (directory / "memory.usage_in_bytes").write_text("1000\n")
    (directory / "memory.oom_control").write_text("oom_kill 0\n")
    group.limit(memory_bytes=64 << 20, processes=10)
    for usage, hits in ((1 << 20, 0), (60 << 20, 0), (64 << 20, 1), (0, 1), ((64 << 20) - 4096, 2)):
        if usage:
            (directory / name).write_text(str(usage))
        assert group.evidence().limit_hits == hits
    assert (directory / name).read_text() == "0"  # set back, so that the next run starts low
    assert group.join_files == [str(directory / "cgroup.procs")]


def test_groups_of_dead_owners_are_removed_and_others_stay(tmp_path: Path) -> None:
    alive = identity()
    pid, start, namespace = alive.removeprefix("strop-").split("-")
    dead = f"strop-{pid}-{int(start) - 1}-{namespace}"
    foreign = f"strop-{pid}-{int(start) - 1}-1"
    for name in (alive, dead, foreign, "strop-other"):
        (tmp_path / name / "w0").mkdir(parents=True)
    remove_stale({"pids": Hierarchy(controller="pids", version=1, parent=tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, foreign, "strop-other"])


def test_the_groups_of_a_process_are_found_and_those_of_nobody_are_not() -> None:
    paths = paths_of(os.getpid())
    assert paths
    assert all((path / "cgroup.procs").exists() for path in paths.values())
    with pytest.raises(OSError, match=r"[Nn]o such"):
        Group.of_process(2**22 + 1, 1 << 30)
