"""Harbor task directories: every key read, unknown ones named, the directory written again unchanged."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from importer_harbor import TRAJECTORY, harbor_files, simple_harbor_files
from importer_kit import all_keys, given_paths, lay, used_keys

from strop.core.errors import TaskError
from strop.tasks.importers import atif, harbor
from strop.tasks.importers.formats import blueprint, import_path
from strop.tasks.importers.harbor_tables import TASK
from strop.tasks.importers.hostile import File, read_folder
from strop.tasks.importers.pool import ImportPool, write_files, write_pool


def test_every_key_of_every_table_is_read() -> None:
    assert all_keys(TASK) - used_keys(TASK, harbor.import_task(harbor_files(), "x").fields) == set()


def test_the_plan_of_a_task_with_everything() -> None:
    task = harbor.import_task(harbor_files(), "x")
    plan = blueprint(task)
    assert task.name == "acme/clamp"
    assert task.task.task_id == "harbor:acme/clamp"
    assert task.task.instruction == "Do the first thing.\n"
    assert task.task.limits.wall_s == 60.0
    first, second = plan.steps
    assert (first.verifier.is_separate, first.verifier.script) == (False, "steps/first/tests/test.sh")
    assert first.verifier.env == {"KEY": "${KEY:-none}", "C": "d"}
    assert (first.setup, first.history) == ("steps/first/workdir/setup.sh", "steps/first/trajectory.json")
    assert first.agent_network is not None
    assert (first.agent_network.mode, first.agent_network.hosts) == ("allowlist", ("localhost",))
    assert first.verifier.network is not None
    assert first.verifier.network.hosts == ("example.org", "*.example.org", "192.0.2.0/24", "2001:db8::1")
    assert second.verifier.is_separate
    assert second.verifier.place is not None
    assert (second.verifier.place.image, second.verifier.place.network.mode) == ("acme/verifier:1", "allowlist")
    assert second.verifier.script == ""
    assert second.min_reward == {"reward": 0.5, "style": 0.2}
    assert second.verifier.collect[0].user == "postgres"
    assert second.agent_timeout_s == 600
    assert plan.place.os == "linux"
    assert plan.place.network.mode == "public"
    assert plan.place.settings["memory_mb"] == 4096
    assert plan.gold.value == "solution/solve.sh"
    assert plan.reward_strategy == "final"
    assert {"compose", "gpu", "tpu", "mcp_servers", "steps", "separate verifier", "network allowlist"} <= set(plan.needs())


@pytest.mark.parametrize("files", [harbor_files(), simple_harbor_files()])
def test_import_export_import_is_identical(tmp_path: Path, files: dict[str, File]) -> None:
    lay(files, tmp_path / "task")
    first = import_path(tmp_path / "task")
    assert not first.refused
    write_files(tmp_path / "again" / "task", harbor.export_files(first.tasks[0]))
    second = import_path(tmp_path / "again")
    assert second.tasks == first.tasks
    assert read_folder(tmp_path / "again" / "task").keys() == files.keys()
    others = {path: file for path, file in read_folder(tmp_path / "again" / "task").items() if path != "task.toml"}
    assert others == {path: file for path, file in files.items() if path != "task.toml"}
    write_pool(tmp_path / "pool", first.tasks, source="x")
    pool = ImportPool(tmp_path / "pool", tmp_path / "cache")
    assert [pool.record(task) for task in pool.tasks("train")] == first.tasks


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(document, dict):
        yield path
        for key, value in document.items():
            if key not in ("env", "metadata", "headers", "min_reward", "arguments", "extra", "tool_definitions"):
                yield from places(value, (*path, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from places(value, (*path, number))


def test_an_unknown_key_is_refused_in_every_table() -> None:
    document = harbor.import_task(harbor_files(), "x").fields
    found = list(places(document))
    assert len(found) > 20
    for path in found:
        broken = copy.deepcopy(document)
        inner: Any = broken
        for key in path:
            inner = inner[key]
        known = next(iter(inner))
        inner[f"{known}x"] = 1
        with pytest.raises(TaskError) as error:
            TASK.read(broken, "task.toml")
        assert f"unknown key '{known}x'. Did you mean" in str(error.value), path


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[environment]\nmemroy_mb = 1", "task.toml.environment: unknown key 'memroy_mb'. Did you mean 'memory_mb'?"),
        ("[environment]\nmemory = '4G'\nmemory_mb = 1", "memory says 4096 MB and memory_mb says 1; keep memory_mb"),
        ("[environment]\nmemory = '4X'", "expected a size such as '4G'"),
        ("[environment]\nallowed_hosts = ['a.org']", "only valid with network_mode = 'allowlist'"),
        ("[agent]\nallowed_hosts = ['a.org']", "only valid with network_mode = 'allowlist', which is missing"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a.org']", "no URL, port or path"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.*.org']", "no URL, port or path"),
        ("[environment]\nnetwork_mode = 'alowlist'", "Did you mean 'allowlist'?"),
        ("[environment]\nos = 'beos'", "Known: linux, windows."),
        ("[environment]\ncpus = inf", "expected a finite number"),
        ("[environment]\ntpu = { type = 'v6e', topology = '2' }", "expected dimensions such as '2x4'"),
        ("[[environment.mcp_servers]]\nname = 'a'", "transport 'sse' needs the key 'url'"),
        ("[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'", "transport 'stdio' needs the key 'command'"),
        ("[[environment.mcp_servers]]\nname = 'a'\nurl = 'x'\nheaders = { Authorization = 'Bearer abc' }", "must name its credential as"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "exclude each other"),
        ("artifacts = ['a', { source = '/a/../b' }]", "expected a path without '..'"),
        ("artifacts = [{ source = '/a', destination = '/b' }]", "expected a relative path"),
        ("artifacts = [{ source = '/a', destination = 'manifest.json' }]", "manifest"),
        ("artifacts = [{ source = 'a', service = 'db' }]", "must be an absolute path"),
        ("schema_version = '2.0'", "schema_version is '2.0'"),
        ("[task]\nname = 'noslash'", "expected 'org/name'"),
        ("[task]\ndescription = 'x'", "the key 'name' is missing"),
        ("[[steps]]\nname = 'a/b'", "portable directory name"),
        ("[[steps]]\nname = 'NUL.txt'", "portable directory name"),
        ("[[steps]]\nname = 'A'\n[[steps]]\nname = 'a'", "are one name where case doesn't count"),
        ("multi_step_reward_strategy = 'max'", "Known: final, mean."),
        ("[verifier]\ntimeout_sec = '9'", "is '9', expected a finite number"),
        ("x = [", "is not TOML"),
        ("x = " + "[" * 3000, "nested too deeply|is not TOML"),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_place(config: str, said: str) -> None:
    with pytest.raises(TaskError, match=said.replace("[", "\\[") if said.count("[") else said):
        harbor.import_task(simple_harbor_files(config), "x")


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("instruction.md", "has no instruction.md"),
        ("tests/test.sh", "has no tests/test.sh"),
        ("environment/Dockerfile", "neither a folder"),
    ],
)
def test_a_missing_file_is_named(removed: str, said: str) -> None:
    files = simple_harbor_files()
    del files[removed]
    with pytest.raises(TaskError, match=said):
        harbor.import_task(files, "x")


def test_scripts_follow_the_operating_system_and_images_may_bring_their_tests() -> None:
    windows = simple_harbor_files("[environment]\nos = 'WINDOWS'\n")
    with pytest.raises(TaskError, match=r"tests/test\.bat"):
        harbor.import_task(windows, "x")
    assert harbor.import_task({**windows, "tests/test.bat": File(b"")}, "x").fields["environment"]["os"] == "windows"
    separate = simple_harbor_files("[verifier]\nenvironment_mode = 'separate'\n", tests__Dockerfile=b"FROM x\n")
    del separate["tests/test.sh"]
    verifier = harbor.blueprint(harbor.import_task(separate, "x")).steps[0].verifier
    assert verifier.place is not None
    assert verifier.place.build == "tests"


def test_an_ignore_file_elsewhere_is_refused() -> None:
    with pytest.raises(TaskError, match=r"environment/.harborignore has no effect there"):
        harbor.import_task(simple_harbor_files(environment___DOT_harborignore=b"x"), "x")


def test_a_folder_of_tasks_refuses_the_wrong_ones_and_reads_the_others(tmp_path: Path) -> None:
    lay(simple_harbor_files(), tmp_path / "set" / "good")
    lay(simple_harbor_files("[agnet]\n"), tmp_path / "set" / "bad")
    lay(simple_harbor_files("[task]\nname = 'a/b'\n"), tmp_path / "set" / "one")
    lay(simple_harbor_files("[task]\nname = 'a/b'\n"), tmp_path / "set" / "two")
    (tmp_path / "set" / "link").symlink_to(tmp_path / "set" / "good")
    found = import_path(tmp_path)
    assert [task.name for task in found.tasks] == ["good", "a/b"]
    reasons = dict(found.refused)
    assert "unknown key 'agnet'. Did you mean 'agent'?" in reasons[str(tmp_path / "set" / "bad")]
    assert "comes twice" in reasons[str(tmp_path / "set" / "two")]
    with pytest.raises(TaskError, match="holds no task"):
        import_path(lay({"a.txt": File(b"")}, tmp_path / "none"))
    with pytest.raises(TaskError, match="doesn't exist"):
        import_path(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------ trajectories


def test_a_trajectory_with_every_key_is_read() -> None:
    found = atif.read_trajectory(TRAJECTORY, "x")
    assert not set(atif.TRAJECTORY.paths()) - set(given_paths(found)) - {"steps[].message"}
    assert found["steps"][1]["message"][0]["source"]["media_type"] == "audio/mpeg"
    assert atif.read_trajectory(json.loads(json.dumps(found)), "x") == found


def changed(**keys: Any) -> dict[str, Any]:
    """The trajectory with other values: ``steps__0__x`` sets ``steps[0].x``."""
    document = copy.deepcopy(TRAJECTORY)
    for path, value in keys.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        inner: Any = document
        for part in parents:
            inner = inner[part]
        inner[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed(extras={}), "unknown key 'extras'. Did you mean 'extra'?"),
        (changed(schema_version="ATIF-v1.9"), "schema_version is 'ATIF-v1.9'"),
        (changed(steps=[]), "expected at least one step"),
        (changed(steps__1__step_id=3), "steps are numbered from 1"),
        (changed(steps__0__metrics={}), "'metrics' belongs to steps of the agent"),
        (changed(steps__1__llm_call_count=0), "can't be there when llm_call_count is 0"),
        (changed(steps__1__observation__results__0__source_call_id="d"), "names no tool call of the step"),
        (changed(steps__0__timestamp="yesterday"), "expected an ISO 8601 time"),
        (changed(steps__0__message=[{"type": "text"}]), "expected text or a list of content parts"),
        (changed(subagent_trajectories__0__trajectory_id=None), "needs a trajectory_id of its own"),
        (changed(steps__1__observation__results__0__subagent_trajectory_ref=[{"session_id": "s"}]), "needs the key 'trajectory_id'"),
    ],
)
def test_a_broken_trajectory_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        atif.read_trajectory(document, "x")
    files = simple_harbor_files(trajectory_DOT_json=json.dumps(document).encode())
    with pytest.raises(TaskError, match=said):
        harbor.import_task(files, "x")


def test_sub_agents_end_somewhere() -> None:
    document: dict[str, Any] = {"trajectory_id": "x", "agent": {"name": "a", "version": "1"}, "steps": TRAJECTORY["steps"][:1]}
    for _ in range(20):
        document = {**document, "subagent_trajectories": [document]}
    with pytest.raises(TaskError, match="nested more than 8 deep"):
        atif.read_trajectory(document, "x")


def test_the_exported_configuration_is_toml() -> None:
    task = harbor.import_task(harbor_files(), "x")
    assert tomllib.loads(harbor.export_files(task)["task.toml"].data.decode()) == task.fields
