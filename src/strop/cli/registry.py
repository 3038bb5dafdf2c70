"""Names of plug-ins: built-ins in tables, third parties through entry-point groups. Nothing is imported before it is used.

A third party adds to its ``pyproject.toml``::

    [project.entry-points."strop.sandboxes"]
    firecracker = "my_package.box:FirecrackerProvider"
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from strop.core.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Registry:
    """One kind of plug-in.

    Attributes:
        kind: What the configuration calls it, for messages.
        group: Entry-point group of third parties.
        builtins: Name to ``"module:attribute"``.
    """

    kind: str
    group: str
    builtins: Mapping[str, str]

    def targets(self) -> dict[str, str]:
        """Return every known name with its ``"module:attribute"``.

        Raises:
            ConfigError: A third party claims a built-in name or two claim the same.
        """
        found = dict(self.builtins)
        for entry in metadata.entry_points(group=self.group):
            if found.get(entry.name, entry.value) != entry.value:
                raise ConfigError(f"{self.kind} {entry.name!r} is claimed twice: by {found[entry.name]} and {entry.value}")
            found[entry.name] = entry.value
        return found

    def load(self, name: str) -> Any:
        """Import and return the class or function of a name.

        Raises:
            ConfigError: Unknown name (lists the known ones), or a plug-in that can't be imported (with its cause).
        """
        targets = self.targets()
        if name not in targets:
            raise ConfigError(f"unknown {self.kind} {name!r}.{nearest(name, targets)} Known: {', '.join(sorted(targets))}.")
        return resolve(targets[name], f"{self.kind} {name!r}")


def resolve(target: str, what: str) -> Any:
    """Import ``"module:attribute"``.

    Args:
        target: What to import.
        what: What the message of an error calls it.

    Raises:
        ConfigError: It can't be imported; the cause is in the message and chained.
    """
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(f"{what} ({target}) can't be loaded: {type(error).__name__}: {error}") from error
    return found


ENGINES = Registry("engine", "strop.engines", {"embedded": "strop.engine.embedded:EmbeddedEngine"})
SANDBOXES = Registry(
    "sandbox",
    "strop.sandboxes",
    {
        "bubblewrap": "strop.sandboxes:BubblewrapProvider",
        "docker": "strop.sandboxes.docker:DockerProvider",
        "kubernetes": "strop.sandboxes.kubernetes:KubernetesProvider",
    },
)
POOLS = Registry(
    "task pool format",
    "strop.pools",
    {
        "strop-repair-1": "strop.tasks.pool:RepairPool",
        "strop-suite-1": "strop.tasks.admission.pool:SuitePool",
        "strop-import-1": "strop.tasks.importers.pool:ImportPool",
    },
)
"""By what a pool directory says of itself (``strop.tasks.poolfile.pool_format``)."""
GRADERS = Registry("grader", "strop.graders", {"repair": "strop.grading.repair:RepairGrader", "suite": "strop.grading.suite:SuiteGrader"})
