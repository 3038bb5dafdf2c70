"""``strop config``: show, diff, reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from strop.core.config import RunConfig, load_config
from strop.core.errors import ConfigError


def load_any(source: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a recipe, of a run directory or (``None``) the defaults, with overrides."""
    if source is not None and source.is_dir():
        from strop.store import RunDir

        with RunDir.open(source) as run:
            return with_overrides(run.config, overrides)
    return load_config(source, overrides)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration with dotted overrides applied on top."""
    if not overrides:
        return config
    from strop.store.rundir import flat

    return load_config(None, [*(f"{key}={toml_value(value)}" for key, value in flat(config).items()), *overrides])


def show(source: Path | None, overrides: Sequence[str]) -> int:
    """Print a configuration in TOML."""
    print(to_toml(load_any(source, overrides)), end="")
    return 0


def diff(first: Path, second: Path | None) -> int:
    """Print differing keys, one a line: ``key: first -> second``."""
    from strop.store.rundir import flat

    left, right = flat(load_any(first)), flat(load_any(second))
    keys = [key for key in sorted(left | right) if left.get(key) != right.get(key)]
    for key in keys:
        print(f"{key}: {toml_value(left[key])} -> {toml_value(right[key])}")
    if not keys:
        print("no difference")
    return 0


def to_toml(config: BaseModel) -> str:
    """Return a configuration as TOML that ``load_config`` reads back to an equal one."""
    values = config.model_dump(mode="json")
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, content in values.items():
        if isinstance(content, dict):
            lines += ["", f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in content.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return one value in TOML notation."""
    if isinstance(value, float):
        return repr(value)  # 1e-05 and inf are TOML too
    if isinstance(value, (bool, int, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    raise ConfigError(f"{value!r} has no TOML notation")


def reference(*, metrics: bool, write: Path | None) -> int:
    """Print or write the generated reference pages."""
    from strop.core.metrics import reference_markdown

    if write is None:
        print(reference_markdown() if metrics else config_markdown(), end="")
        return 0
    write.mkdir(parents=True, exist_ok=True)
    for name, text in (("config.md", config_markdown()), ("metrics.md", reference_markdown())):
        (write / name).write_text(text, encoding="utf-8")
        print(write / name)
    return 0


def config_markdown() -> str:
    """Return the configuration reference: one table per section, from the models' own field texts."""
    lines = ["# Configuration", "", "Generated from `strop.core.config` by `strop config reference`; don't edit.", ""]
    lines += ["A recipe is a TOML file with these keys; every key can be overridden with `--set section.key=value`.", ""]
    plain = {name: field for name, field in RunConfig.model_fields.items() if not _is_section(field.annotation)}
    lines += ["## (top level)", "", *_field_table(plain)]
    for name, field in RunConfig.model_fields.items():
        if _is_section(field.annotation):
            section: Any = field.annotation
            lines += ["", f"## {name}", "", *_field_table(section.model_fields)]
    return "\n".join(lines) + "\n"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _field_table(fields: dict[str, Any]) -> list[str]:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{toml_value(field.default)}`"
        meaning = " ".join((field.description or "").replace("``", "`").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type_text(field)} | {default} | {meaning} |")
    return lines


_TYPE_WORDS = {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}
_LIMIT_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _type_text(field: Any) -> str:
    if get_origin(field.annotation) is Literal:
        return " or ".join(f"`{toml_value(value)}`" for value in get_args(field.annotation))
    limits = [f"{sign} {getattr(item, key)}" for item in field.metadata for key, sign in _LIMIT_SIGNS.items() if hasattr(item, key)]
    name: str = field.annotation.__name__
    return ", ".join([_TYPE_WORDS.get(name, name), *limits])
