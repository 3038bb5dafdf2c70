"""Plug-ins: named, loaded late, and never quietly missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli import models
from strop.cli.registry import ENGINES, GRADERS, SANDBOXES, Registry, resolve
from strop.core.config import RunConfig
from strop.core.errors import CheckpointError, ConfigError
from strop.store import RunDir, save_checkpoint


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An installed distribution with entry points, as pip would leave it."""

    def install(name: str, target: str, code: str | None = None) -> None:
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[strop.sandboxes]\n{name.split('_')[0]} = {target}\n")
        if code is not None:
            (tmp_path / f"{target.split(':')[0]}.py").write_text(code)

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_a_third_party_is_found(third_party):
    third_party("firecracker", "my_box_a:Provider", "class Provider: pass")
    assert SANDBOXES.load("firecracker").__name__ == "Provider"
    assert "bubblewrap" in SANDBOXES.targets()


def test_a_broken_one_raises_with_its_cause(third_party):
    third_party("broken", "my_box_b:Provider", "import does_not_exist_anywhere")
    with pytest.raises(
        ConfigError, match=r"sandbox 'broken' \(my_box_b:Provider\) can't be loaded: ModuleNotFoundError.*does_not_exist_anywhere"
    ) as caught:
        SANDBOXES.load("broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_one_without_its_class_raises(third_party):
    third_party("empty", "my_box_c:Provider", "x = 1")
    with pytest.raises(ConfigError, match=r"AttributeError.*Provider"):
        SANDBOXES.load("empty")


def test_a_name_claimed_twice_is_refused(third_party):
    third_party("bubblewrap", "my_box_d:Provider", "class Provider: pass")
    with pytest.raises(ConfigError, match="'bubblewrap' is claimed twice"):
        SANDBOXES.targets()


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"unknown engine 'vlm'. Known: embedded"):
        Registry("engine", "strop.engines", {"embedded": "x:y"}).load("vlm")


@pytest.mark.parametrize("registry", [ENGINES, SANDBOXES, GRADERS], ids=lambda registry: registry.kind)
def test_every_built_in_loads(registry: Registry):
    for name in registry.builtins:
        assert callable(registry.load(name))


def test_resolve_reaches_into_classes():
    assert resolve("pathlib:Path.home", "x") == Path.home


def test_find_model_of_a_run(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig()) as run:
        with pytest.raises(CheckpointError, match="no model yet; stage done: none"):
            models.find_model(tmp_path / "run")
        run.store.publish("mid", lambda path: (path / "config.json").write_text("{}"))
        assert models.find_model(tmp_path / "run").name == "mid"
        run.store.publish("rl", lambda path: (path / "config.json").write_text("{}"))
        assert models.find_model(tmp_path / "run").name == "rl"
        run.store.put_fact("promoted", "mid")
        assert models.find_model(tmp_path / "run").name == "mid"
        (tmp_path / "run/checkpoints/mid/config.json").write_text("{ }")
        with pytest.raises(CheckpointError, match=r"config.json is damaged"):
            models.find_model(tmp_path / "run")


def test_find_model_of_a_directory(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointError, match="neither a run directory"):
        models.find_model(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text("{}")
    assert models.find_model(tmp_path / "hf") == tmp_path / "hf"
    with pytest.raises(ConfigError, match=r"no such directory. Did you mean '.*hf'"):
        models.find_model(tmp_path / "hff")
    save_checkpoint(tmp_path / "own", {})
    (tmp_path / "own/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not saved with it: config.json"):
        models.find_model(tmp_path / "own")
