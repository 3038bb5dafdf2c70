"""Reading a recipe: whatever stands in it or in an override, the answer is a configuration or one clear error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.config import load_config
from strop.core.errors import ConfigError

HOSTILE = ["1" * 5000, "[" * 3000, "nan", "inf", "-inf", "1e400", "'''", "\x00", "{a=", "1979-13-45", "\ud800", "0x" + "f" * 5000]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "key", ["rl.steps", "rl.learning_rate", "rl.temperature", "tasks.exclude_kinds", "promotion.min_gain", "midtrain.code_frac"]
)
def test_a_hostile_override_is_a_clear_error(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}={value}"])
    assert key.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize("text", ["rl.steps = " + "1" * 5000, "x = " + "[" * 3000, "\x00", "[rl]\nsteps = 1\nsteps = 2"])
def test_a_hostile_recipe_is_a_clear_error(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match="recipe"):
        load_config(recipe)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_no_override_ends_in_another_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(None, [text])
