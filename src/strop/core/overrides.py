"""Overrides of a recipe's keys from the command line, and values in messages about them. No torch here."""

from __future__ import annotations

import tomllib
from typing import Any

from strop.core.errors import ConfigError


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key of a recipe that has been read; the value is read as TOML, and as plain text when it isn't TOML.

    Raises:
        ConfigError: It doesn't look like ``section.key=value``, or goes through a value.
    """
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} must look like section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or more digits or brackets than anything can mean
        value = text
    *parents, leaf = key.strip().split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
    node[leaf] = value


def brief(value: object) -> str:
    """Return a value as an error message shows it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."
