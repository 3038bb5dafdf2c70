"""How a suite ran, kept as JSON, so that an interrupted build doesn't find it out again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from strop.tasks.repository.environment import Environment
from strop.tasks.repository.layout import find_layout
from strop.tasks.repository.metadata import read_metadata
from strop.tasks.repository.probe import Repository, generated_files
from strop.tasks.repository.source import Source
from strop.tasks.repository.suite import Coverage, SuiteSpec

_FORMAT = 1


def save_probe(path: Path, repository: Repository) -> None:
    """Write what was found about a repository, whole or not at all."""
    data = {
        "format": _FORMAT,
        "environment": repository.environment.folder.name,
        "requirements": list(repository.environment.requirements),
        "missing": [list(row) for row in repository.environment.missing],
        "tree": str(repository.tree),
        "spec": repository.spec.to_json(),
        "tests": list(repository.tests),
        "milliseconds": list(repository.milliseconds),
        "coverage": [[name, line, sorted(tests)] for (name, line), tests in sorted(repository.coverage.functions.items())],
        "excluded": {reason: list(row) for reason, row in repository.excluded.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def load_probe(path: Path, source: Source, pool: Path) -> Repository | None:
    """Return what is known about a source, ``None`` if nothing is or if its tree or environment is gone."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        environment = pool / "environments" / data["environment"]
        if data["format"] != _FORMAT or not environment.is_dir() or not Path(data["tree"]).is_dir():
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    metadata = read_metadata(source.files)
    coverage = Coverage({(name, int(line)): set(tests) for name, line, tests in data["coverage"]})
    return Repository(
        source=source,
        metadata=metadata,
        layout=find_layout(source.files, metadata.name or source.name),
        files={**generated_files(source.files, metadata), **source.files},
        environment=Environment(environment, tuple(data["requirements"]), tuple((row[0], row[1]) for row in data["missing"])),
        tree=Path(data["tree"]),
        spec=SuiteSpec.from_json(data["spec"]),
        tests=tuple(data["tests"]),
        milliseconds=tuple(data["milliseconds"]),
        coverage=coverage,
        excluded={reason: (row[0], row[1]) for reason, row in data["excluded"].items()},
    )
